"""How many frames of mpitrain lie between a call of Horovod's interface and the MPI calls that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import mpitrain.horovod.torch as hvd
from mpitrain import World
from mpitrain.horovod import process_sets
from tests.ranks.test_frames import Watch, watched

MOST_FRAMES = 12


@pytest.fixture
def watch(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Horovod's interface, whose MPI calls are noted."""
    watch, make = Watch(), process_sets.world_of

    def world_of(ranks: Sequence[int], name: str, seconds: float) -> Any:
        engine, made = make(ranks, name, seconds)
        made.background.comm = watched(made.background.comm, watch)
        made.background.mover = type(made.background.mover)(made.background.comm, 1)
        return engine, made.replaced(comm=watched(made.comm, watch), objects=watched(made.objects, watch))

    monkeypatch.setattr(process_sets, "world_of", world_of)
    hvd.init()
    yield watch
    hvd.shutdown()


@pytest.mark.parametrize("count", [10, 300_000])
@pytest.mark.parametrize(
    ("call", "options"),
    [
        (hvd.allreduce, {}),
        (hvd.allreduce, {"op": hvd.Max}),
        (hvd.allreduce, {"op": hvd.Adasum}),
        (hvd.allreduce_, {}),
        (hvd.broadcast, {"root_rank": 0}),
        (hvd.allgather, {}),
        (hvd.alltoall, {}),
        (hvd.reducescatter, {}),
    ],
)
def test_from_a_call_to_mpi(
    world: World, watch: Watch, count: int, call: Callable[..., torch.Tensor], options: dict[str, Any]
) -> None:
    watch.function = call.__code__
    for number in range(4):
        if number == 1:  # memory that the ranks share is made in the first call
            watch.chains.clear()
        found = call(torch.full((world.size * count,), float(world.rank + number)), **options)
        assert len(found)
    assert bool(watch.chains) == (world.size > 1)
    for chain in watch.chains:
        assert len(chain) <= MOST_FRAMES, " > ".join(chain)
