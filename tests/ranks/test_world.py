"""World: who the ranks are, errors that all raise, objects and messages, parts of batches, and where a value lies."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from mpi4py import MPI

import mpitrain
from mpitrain import World
from mpitrain.errors import CheckpointError, ConfigError, DataError, MismatchError, MpitrainError, TreeError
from mpitrain.job.recovery import numbers_in_job

from .common import skip_alone


def test_who_the_ranks_are(world: World) -> None:
    """They are those of MPI, all on one node, with communicators of their own."""
    host = socket.gethostname()
    assert (world.rank, world.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert (world.is_root, world.generation) == (world.rank == 0, 0)
    assert (world.host, world.hosts) == (host, (host,) * world.size)
    assert (world.num_nodes, world.node_rank, world.node_ranks) == (1, 0, (0,) * world.size)
    assert (world.local_rank, world.local_size) == (world.rank, world.size)
    assert (world.name(), world.name(0)) == (f"rank {world.rank} on {host}", f"rank 0 on {host}")
    for one, other in ((world.comm, MPI.COMM_WORLD), (world.objects, MPI.COMM_WORLD), (world.comm, world.objects)):
        assert MPI.Comm.Compare(one, other) == MPI.CONGRUENT


def test_the_ranks_of_a_group_have_their_numbers_and_the_group_is_freed(world: World) -> None:
    everyone = MPI.COMM_WORLD.Get_group()
    odd = everyone.Incl(list(range(world.size - 1, -1, -2)))
    assert numbers_in_job(odd) == list(range(world.size - 1, -1, -2))
    empty = everyone.Excl(list(range(world.size)))
    assert numbers_in_job(empty) == []
    everyone.Free()
    assert odd == empty == MPI.GROUP_NULL


def test_world_is_made_once_and_never_changes(world: World) -> None:
    assert mpitrain.init() is world
    with pytest.raises(ConfigError, match="called before"):
        mpitrain.init(bucket_mib=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.generation = 1  # type: ignore[misc]


def test_print(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.print("step", 3, None)
    assert capsys.readouterr().out == ("step 3 None\n" if world.rank == 0 else "")
    world.print("step", 3, all_ranks=True)
    assert capsys.readouterr().out == f"[rank {world.rank} on {socket.gethostname()}] step 3\n"
    world.print()
    assert capsys.readouterr().out == ("\n" if world.rank == 0 else "")


def failing(world: World, errors: dict[int, Exception]) -> None:
    with world.together("try something"):
        if world.rank in errors:
            raise errors[world.rank]


@pytest.mark.parametrize("kind", [DataError, CheckpointError, MpitrainError], ids=lambda kind: kind.__name__)
def test_an_error_of_ours_on_one_rank_is_raised_on_all(world: World, kind: type[MpitrainError]) -> None:
    for odd in range(world.size):
        error = kind("the file is missing")
        with pytest.raises(kind) as caught:
            failing(world, {odd: error})
        assert type(caught.value) is kind
        assert caught.value.known_everywhere
        if world.rank == odd:
            assert caught.value is error
        else:
            assert str(caught.value) == f"{world.name(odd)}, try something: the file is missing"
        assert world.sum(1) == world.size


def test_another_error_on_one_rank_is_raised_on_all(world: World) -> None:
    """Its cause is kept on the rank that failed."""
    for odd in range(world.size):
        error = KeyError("weights")
        with pytest.raises(MpitrainError) as caught:
            failing(world, {odd: error})
        assert type(caught.value) is MpitrainError
        assert caught.value.known_everywhere
        assert str(caught.value) == f"{world.name(odd)}, try something: KeyError: 'weights'"
        assert caught.value.__cause__ is (error if world.rank == odd else None)


def test_the_error_of_the_lowest_rank_is_raised(world: World) -> None:
    skip_alone(world)
    low, high = world.size - 2, world.size - 1
    with pytest.raises(MpitrainError) as caught:
        failing(world, {low: DataError("first"), high: ConfigError("second")})
    assert type(caught.value) is DataError
    assert str(caught.value).endswith("first")


def test_broadcast_from_every_rank(world: World) -> None:
    for root in range(world.size):
        value = {"from": root, "array": numpy.arange(root), "none": None}
        # What the others pass is not looked at: it need not even be possible to pickle it.
        result = world.broadcast_object(value if world.rank == root else lambda: None, root)
        assert result["from"] == root
        assert result["array"].tolist() == list(range(root))
        assert (result is value) == (world.rank == root)


def test_gather_to_every_rank(world: World) -> None:
    """Objects of unequal lengths."""
    expected = ["x" * 10 * rank for rank in range(world.size)]
    for root in range(world.size):
        assert world.gather("x" * 10 * world.rank, root) == (expected if world.rank == root else None)
    assert world.allgather("x" * 10 * world.rank) == expected


def test_large_objects(world: World) -> None:
    """5 MB: far beyond what any MPI sends without an answer from the receiver."""
    last = world.size - 1
    large = numpy.random.default_rng(0).bytes(5_000_000)
    mine = large if world.rank == last else None
    assert world.broadcast_object(mine, root=last) == large
    assert world.allgather(mine) == [None] * last + [large]


def test_a_large_message_around_the_ring(world: World) -> None:
    """5 MB from rank to rank."""
    array = numpy.arange(625_000.0)
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.rank == 0:
        world.send(array, following)
    received = world.recv(previous)
    assert received.tobytes() == (array + previous).tobytes()
    if world.rank:
        world.send(received + 1, following)


def test_messages_arrive_by_tag_and_in_order(world: World) -> None:
    """To every rank, this one too."""
    for to in range(world.size):
        for number in range(3):
            for tag in (0, 1, 31767):
                world.send((world.rank, tag, number), to, tag)
    for source in reversed(range(world.size)):
        for tag in (31767, 0, 1):
            for number in range(3):
                assert world.recv(source, tag) == (source, tag, number)


def test_a_message_to_oneself_is_a_copy(world: World) -> None:
    value = [numpy.zeros(200_000)]
    world.send(value, world.rank)
    value[0][:] = 1
    assert not world.recv(world.rank)[0].any()
    # Nobody else could send it, so waiting would never end.
    with pytest.raises(MismatchError, match="has sent itself nothing with tag 0"):
        world.recv(world.rank)


@pytest.mark.parametrize("wrong", [-1, "size", 10**6])
def test_ranks_that_do_not_exist(world: World, wrong: int | str) -> None:
    rank = world.size if wrong == "size" else int(wrong)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("root", lambda: world.broadcast(1.0, root=rank)),
        ("root", lambda: world.broadcast_object(1, root=rank)),
        ("root", lambda: world.gather(1, root=rank)),
        ("to", lambda: world.send(1, rank)),
        ("source", lambda: world.recv(rank)),
    ]
    for argument, call in calls:
        with pytest.raises(ValueError, match=f"{argument}={rank}; ranks are 0 to {world.size - 1}"):
            call()
    assert world.sum(1) == world.size


@pytest.mark.parametrize("tag", [-1, -999, 32768])
def test_tags_that_are_not_the_users(world: World, tag: int) -> None:
    with pytest.raises(ValueError, match=f"tag={tag}; tags are 0 to 31767"):
        world.send(1, 0, tag)
    with pytest.raises(ValueError, match=f"tag={tag}; tags are 0 to 31767"):
        world.recv(0, tag)


@pytest.mark.parametrize(
    "lengths", [(7,), (14, 14, 14), (8, 8, 5), (12, 12, 1), (9, 0, 9)], ids=lambda lengths: "-".join(map(str, lengths))
)
def test_parts_are_disjoint_complete_and_in_order(world: World, lengths: tuple[int, ...]) -> None:
    starts = numpy.cumsum((0, *lengths))
    batches = [numpy.arange(begin, begin + length) for begin, length in zip(starts, lengths, strict=False)]
    parts = list(world.shard(batches))
    assert len(parts) == len(batches)
    every = world.allgather(parts)
    for index, batch in enumerate(batches):
        of_ranks = [its[index] for its in every]
        assert numpy.concatenate(of_ranks).tolist() == batch.tolist()
        sizes = [len(part) for part in of_ranks]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


def test_shard_of_trees_from_a_generator(world: World) -> None:
    def batches() -> Any:
        for length in (10, 9):
            yield {"x": numpy.arange(2 * length).reshape(length, 2), "y": (numpy.arange(length), None)}

    for part, length in zip(world.shard(batches()), (10, 9), strict=True):
        rows = numpy.array_split(numpy.arange(length), world.size)[world.rank]
        assert part["x"].tolist() == [[2 * row, 2 * row + 1] for row in rows]
        assert part["y"][0].tolist() == rows.tolist()
        assert part["y"][1] is None


def test_shard_starts_where_it_is_told(world: World) -> None:
    batches = [numpy.full(7, 0), numpy.full(7, 1), numpy.full(1, 2)]
    whole = [part.tolist() for part in world.shard(batches)]
    for start in range(4):
        assert [part.tolist() for part in world.shard(batches, start=start)] == whole[start:]
    for given, start in ((batches, 4), ([], 0), ([], 1)):
        text = f"there are {len(given)} batches, and the shard starts at batch {start}"
        with pytest.raises(DataError, match=text) as caught:
            list(world.shard(given, start=start))
        assert caught.value.known_everywhere
    with pytest.raises(ValueError, match="start=-1"):
        next(world.shard(batches, start=-1))


def test_first_batch_smaller_than_the_ranks(world: World) -> None:
    for start in (0, 1):
        shard = world.shard([numpy.zeros(world.size - 1), numpy.zeros(world.size)], start=start)
        with pytest.raises(DataError, match=f"batch 0 has {world.size - 1} samples for {world.size} ranks") as caught:
            next(shard)
        assert caught.value.known_everywhere


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((numpy.zeros(8), numpy.zeros(9)), r"found \[0\] 8, \[1\] 9"),
        ([numpy.zeros(8), 3.0], r"found \[0\] 8, \[1\] a number"),
        ({"x": numpy.array(1.0)}, r"found \['x'\] a number"),
        ([], "found no arrays"),
    ],
)
def test_batches_without_a_number_of_samples(world: World, batch: Any, text: str) -> None:
    shard = world.shard([numpy.zeros(7), batch])
    next(shard)
    with pytest.raises(DataError, match=f"batch 1: .*{text}"):
        next(shard)


def test_equal_values(world: World) -> None:
    for value in (numpy.arange(6.0).reshape(2, 3), numpy.zeros((0, 2)), numpy.array(1), 2.5, numpy.array([numpy.nan])):
        layout = world.where(value, "equal")
        assert layout.kind == "equal"
        assert layout.groups == (tuple(range(world.size)),)
        assert layout.shapes == (numpy.shape(value),) * world.size
        world.where(value, "sum")
    # The order in memory does not count.
    mixed = numpy.arange(6.0).reshape(2, 3)
    assert world.where(numpy.asfortranarray(mixed) if world.rank else mixed).kind == "equal"


def test_zeros_of_other_signs_differ(world: World) -> None:
    skip_alone(world)
    last = world.size - 1
    value = -0.0 if world.rank == last else 0.0
    layout = world.where(value)
    assert (layout.kind, layout.groups) == ("differs", (tuple(range(last)), (last,)))
    with pytest.raises(MismatchError, match=rf"rank {last} on .*: other bits; rank 0 on .*: float64 \(\)"):
        world.where(value, "equal")


@pytest.mark.parametrize("samples", [0, 1, 2, 7, 60])
def test_parts_of_a_batch(world: World, samples: int) -> None:
    batch = numpy.arange(2.0 * samples).reshape(samples, 2)
    ends = [samples * rank // world.size for rank in range(world.size + 1)]
    layout = world.where(batch[ends[world.rank] : ends[world.rank + 1]], "parts")
    assert sum(shape[0] for shape in layout.shapes) == samples
    lengths = {shape[0] for shape in layout.shapes}
    assert layout.kind == ("parts" if len(lengths) > 1 else "equal" if world.size == 1 or samples == 0 else "differs")
    if layout.kind == "parts":
        with pytest.raises(MismatchError, match=r"dtype and shape of summands of a sum are equal on all ranks"):
            world.where(batch[ends[world.rank] : ends[world.rank + 1]], "sum")
    if world.size > 1:
        other = batch.astype(numpy.float32) if world.rank == 1 else batch
        with pytest.raises(
            MismatchError, match=r"rank 1 on .*: float32 .*; rank 0 on .*: float64 .*all dimensions but"
        ):
            world.where(other, "parts")
        assert world.where(other).kind == "unlike"
        assert "rank 1 has float32" in str(world.where(other))
        with pytest.raises(MismatchError, match=r"rank 1 on .*: float64 \(\)"):
            world.where(numpy.array(1.0) if world.rank == 1 else numpy.ones(1), "parts")


def test_summands(world: World) -> None:
    layout = world.where(numpy.full(3, world.rank // 2), "sum")
    assert layout.groups == tuple(tuple(range(first, min(first + 2, world.size))) for first in range(0, world.size, 2))


@pytest.mark.parametrize("value", ["text", None, [1, 2], numpy.array([None])])
def test_what_has_no_layout(world: World, value: Any) -> None:
    with pytest.raises(TreeError, match=r"rank \d on .*: where (takes|does not take)"):
        world.where(value)


def test_layouts_that_cannot_be_expected(world: World) -> None:
    with pytest.raises(ValueError, match="'equal', 'parts', 'sum'"):
        world.where(1, "part")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(MismatchError, match="a number is not a part of a batch"):
        world.where(1.0, "parts")
    if world.size > 1:
        with pytest.raises(MismatchError, match=r"where, expected='sum'"):
            world.where(1, "sum" if world.rank == world.size - 1 else "equal")
