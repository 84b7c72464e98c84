"""The places of run_on, by name, for jobs that this machine cannot have: several nodes, GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from mpitrain.remote.block import WorldPlaces

# Two ranks on a, two on b, one on c.
HOSTS, NODES = ("a", "a", "b", "b", "c"), (0, 0, 1, 1, 2)
PLACES = WorldPlaces(HOSTS, NODES, ("cuda:0", "cuda:1", "cuda:0", "cuda:0", ""))


@pytest.mark.parametrize(
    ("where", "ranks"),
    [
        (4, (4,)),
        ("rank 0", (0,)),
        ("node 1", (2, 3)),
        ("a", (0, 1)),
        ("a/cuda:0", (0,)),
        ("b/cuda:0", (2, 3)),
        ("cuda:1", (1,)),
        (["c", 0, "node 0"], (0, 1, 4)),
        (range(2), (0, 1)),
    ],
)
def test_a_place(where: Any, ranks: tuple[int, ...]) -> None:
    assert PLACES.ranks(where) == ranks


@pytest.mark.parametrize("where", ["cuda:0", "c/cuda:0", "cpu", "", "node 3", "rank 5", 5, -1, ["a", "d"]])
def test_no_place(where: Any) -> None:
    """cuda:0 is on two hosts, so it needs one."""
    first = where[-1] if isinstance(where, list) else where
    with pytest.raises(ValueError, match=r"is not a place of this World") as raised:
        PLACES.ranks(where)
    assert str(raised.value) == (
        f"where={first!r} is not a place of this World; there are ranks 0 to 4, 'node 0' (ranks 0,1), 'node 1' (ranks "
        "2,3), 'node 2' (rank 4), 'a' (ranks 0,1), 'b' (ranks 2,3), 'c' (rank 4), 'a/cuda:0' (rank 0), 'a/cuda:1' "
        "(rank 1), 'b/cuda:0' (ranks 2,3)"
    )
