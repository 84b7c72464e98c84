"""The division of parameters between servers, and of ranks into servers and workers."""

from __future__ import annotations

import numpy
import pytest

from mpitrain.context import JobContext
from mpitrain.reducer.bucket import Parameter, plan_layout
from mpitrain.reducer.division import Division, PartSize, divide, divide_whole, line_of, members, owners_of, sizes_of
from mpitrain.role import role_of, server_ranks

NARROW, WIDE = numpy.dtype("float32"), numpy.dtype("float64")
LAYOUT = plan_layout(
    [
        Parameter("a", (2, 3), NARROW),
        Parameter("b", (4,), WIDE),
        Parameter("none", (0,), NARROW),
        Parameter("c", (), NARROW),
        Parameter("d", (6,), WIDE),
    ]
)


def whole(num_servers: int) -> Division:
    return divide_whole(LAYOUT.parameters, owners_of(LAYOUT.parameters, num_servers), num_servers)


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5, 11])
def test_every_element_has_one_server(num_servers: int) -> None:
    for division in (divide(LAYOUT, num_servers), whole(num_servers)):
        seen = {dtype: numpy.zeros(count, int) for dtype, count in LAYOUT.counts.items()}
        assert len(division.parts) == num_servers
        for part in division.parts:
            for dtype, own in part.items():
                seen[dtype][own] += 1
        assert all((counts == 1).all() for counts in seen.values())
        placed = {dtype: numpy.zeros(count, int) for dtype, count in LAYOUT.counts.items()}
        for parameter, (begin, end) in zip(division.layout.parameters, division.layout.places, strict=True):
            assert end - begin == parameter.count
            placed[parameter.dtype][begin:end] += 1
        assert all((counts == 1).all() for counts in placed.values())


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5, 11])
def test_an_even_division_is_even_and_a_whole_one_cuts_nothing(num_servers: int) -> None:
    for part in divide(LAYOUT, num_servers).parts:
        for dtype, own in part.items():
            least = LAYOUT.counts[dtype] // num_servers
            assert least <= own.stop - own.start <= least + 1
    division = whole(num_servers)
    for part in division.parts:
        for index, own, _ in members(division.layout, part):
            assert own == slice(0, LAYOUT.parameters[index].count)


def test_the_largest_parameters_go_to_the_servers_with_the_fewest_bytes() -> None:
    parameters = [Parameter(name, (count,), NARROW) for name, count in {"a": 3, "b": 5, "c": 4, "d": 2, "e": 9}.items()]
    assert owners_of(parameters, 2) == {"e": 0, "b": 1, "c": 1, "a": 0, "d": 1}


@pytest.mark.parametrize("num_servers", [1, 2, 3, 11])
def test_members_are_the_elements_of_a_part(num_servers: int) -> None:
    for division in (divide(LAYOUT, num_servers), whole(num_servers)):
        layout = division.layout
        flats = {dtype: numpy.arange(float(count)) for dtype, count in layout.counts.items()}
        views = layout.views(flats)
        for part in division.parts:
            parts = {dtype: numpy.full(own.stop - own.start, -1.0) for dtype, own in part.items()}
            for index, own, place in members(layout, part):
                parts[layout.parameters[index].dtype][place] = views[index].reshape(-1)[own]
            for dtype, own in part.items():
                numpy.testing.assert_array_equal(parts[dtype], flats[dtype][own])


def test_the_line_has_the_bytes_of_each() -> None:
    layout = plan_layout([Parameter("w", (3, 2**18), NARROW)])
    line = line_of(divide(layout, 2), ["server 0 on a", "server 1 on b"])
    assert line == "server 0 on a: 1.6 MB, server 1 on b: 1.6 MB of 3.1 MB of parameters"


@pytest.mark.parametrize(
    ("node_ranks", "num_servers", "expected"),
    [
        ([0, 0, 0], 1, [0]),
        ([0, 0, 0], 2, [0, 1]),
        ([0, 0, 1, 1], 2, [0, 2]),  # one on each node
        ([0, 1, 0, 1], 3, [0, 1, 2]),
        ([0, 0, 0, 1, 1, 2], 4, [0, 3, 5, 1]),  # then the second rank of the first node
    ],
)
def test_servers_are_on_different_nodes(node_ranks: list[int], num_servers: int, expected: list[int]) -> None:
    assert server_ranks(node_ranks, num_servers) == expected
    roles = [role_of(JobContext(servers=num_servers), rank, node_ranks) for rank in range(len(node_ranks))]
    assert [roles[rank].number for rank in expected] == list(range(num_servers))
    assert roles[0].kind == "server"
    assert {roles[rank].kind for rank in expected[1:]} <= {"shard"}
    workers = [role for rank, role in enumerate(roles) if rank not in expected]
    assert {role.kind for role in workers} == {"worker"}
    assert roles[0].num_workers == len(workers)
    assert {role.num_servers for role in roles} == {num_servers}


def test_the_size_of_each_part() -> None:
    """By hand: NARROW has a (6), none (0), c (1); WIDE has b (4), d (6). A tensor without values is in no part."""
    assert sizes_of(divide(LAYOUT, 1)) == [PartSize(108, 4, 0, "d", 48)]
    # NARROW is cut after 4 of 7 elements, WIDE after 5 of 10.
    assert sizes_of(divide(LAYOUT, 2)) == [PartSize(56, 1, 2, "b", 32), PartSize(52, 1, 2, "d", 40)]
    assert sizes_of(whole(2)) == [PartSize(52, 2, 0, "d", 48), PartSize(56, 2, 0, "b", 32)]
    # More servers than elements of a dtype, and than tensors.
    assert sizes_of(divide(LAYOUT, 11))[10] == PartSize(0, 0, 0, "", 0)
    assert sizes_of(whole(5))[4] == PartSize(0, 0, 0, "", 0)
    assert PartSize(0, 0, 0, "", 0).line() == "0 B of parameters; whole tensors: 0, in part: 0"
    assert PartSize(3_000_000, 1000, 1, "w", 999_949).line() == (
        "3.0 MB of parameters; whole tensors: 1,000, in part: 1, the largest: w with 999.9 kB"
    )
    assert PartSize(1500, 1, 0, "w", 999).line().startswith("1.5 kB of parameters; ")
    assert PartSize(1500, 1, 0, "w", 999).line().endswith(" w with 999 B")
    assert PartSize(8, 1, 0, f"{'w' * 50}.b", 8).line().endswith(f"the largest: {'w' * 37}... with 8 B")
