"""What SparseLoCo saves, and what goes on from it: with as many ranks, with fewer, and with another strategy."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from mpi4py import MPI

from mpitrain import LocalSGD, SparseLoCo, Sync, World
from mpitrain.job.worlds import make_world
from mpitrain.state.resume import add_up

from .common import first_ranks, skip_alone
from .walks import EVERY, SAMPLES, Walk, kept, shares


def resumed(world: World, strategy: SparseLoCo, walk: Walk, total: Any, state: Any, saved: Any) -> None:
    strategy.begin(world, walk.model)
    strategy.restore(state)
    walk.model.restore(saved)
    strategy.restore_own(total)


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_resume_has_the_same_bits(world: World, steps: int) -> None:
    """At the end of a round, in its middle, and with what was kept in two rounds."""

    def train(strategy: SparseLoCo, walk: Walk, numbers: range) -> None:
        for number in numbers:
            distance = numpy.random.default_rng((world.rank, number)).standard_normal(300)
            walk.step(strategy, 1 + world.rank, w=distance)

    whole, its = SparseLoCo(EVERY), Walk(w=300)
    whole.begin(world, its.model)
    train(whole, its, range(steps))
    again, other = SparseLoCo(EVERY), Walk(w=300)
    own, state, saved = whole.own_state(), whole.state(), its.model.state()
    resumed(world, again, other, own, state, saved)
    for strategy, walk in ((whole, its), (again, other)):
        train(strategy, walk, range(steps, 7))
        strategy.end_run()
    assert its["w"].tobytes() == other["w"].tobytes()
    if world.size > 1:
        assert kept(whole).tobytes() == kept(again).tobytes()
        assert kept(whole).any()
    whole.close()
    again.close()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("is_middle", [False, True])
def test_what_was_kept_goes_on_with_fewer_ranks(world: World, size: int, is_middle: bool) -> None:
    """The first rank takes it over undecayed: on one rank all of it goes into the next outer step, and none is left."""
    skip_alone(world)
    strategy, walk = SparseLoCo(EVERY, density=0.01, decay=1), Walk(w=500)
    strategy.begin(world, walk.model)
    distance = numpy.random.default_rng(world.rank).integers(-64, 64, 500) / 16
    walk.round(strategy, SAMPLES[world.rank], w=distance)
    mean = sum(part * one for part, one in zip(shares(world.size), world.allgather(distance), strict=True))
    gone = mean * (1.5 if is_middle else 1)
    if is_middle:
        walk.step(strategy, SAMPLES[world.rank], w=distance)
    total: dict[str, Any] = {}
    for part in world.allgather(strategy.own_state()):
        add_up(total, part)
    state, saved = world.broadcast_object((strategy.state(), walk.model.state()))
    strategy.close()
    there = first_ranks(world, size)
    if there is not None:
        again, other = SparseLoCo(EVERY, density=0.01, decay=1), Walk(w=500)
        resumed(there, again, other, total if there.is_root else {"carried": {}}, state, saved)
        while True:
            other.step(again, 2, w=numpy.zeros(500))
            if again.replicas_are_equal:
                break
        left = 0.0 if there.size == 1 else sum(there.allgather(kept(again).astype(numpy.float64)))
        # In the middle of a round, the steps since the last outer step count by the samples of both parts.
        if is_middle:
            count, more = sum(SAMPLES[: world.size]), 2 * there.size
            gone = mean + mean / 2 * count / (count + more)
        numpy.testing.assert_allclose(left - other["w"], gone, rtol=0, atol=1e-4)
        if there.size == 1:
            assert again.own_state() == {}
        again.close()
        there.free()
    world.barrier()


def test_one_rank_sends_what_a_codec_has_left_out(world: World) -> None:
    """In a round of its own, also for LocalSGD. Then it trains plainly again."""
    alone = make_world(MPI.COMM_SELF)
    strategy, walk = LocalSGD(EVERY), Walk(w=3)
    strategy.begin(alone, walk.model)
    owed = numpy.array([1, -2, 4], numpy.float32)
    strategy.restore_own({"carried": {"round/0/left out/w": owed}})
    walk.step(strategy, 2, w=[16, 16, 16])
    assert walk["w"].tolist() == [-8, -8, -8]
    walk.step(strategy, 2, w=[16, 16, 16])
    assert walk["w"].tolist() == [-17, -14, -20]
    assert strategy.own_state() == {}
    walk.step(strategy, 2, w=[16, 16, 16])
    assert walk["w"].tolist() == [-25, -22, -28]
    assert strategy.own_state() == {}
    strategy.close()
    alone.free()
    world.barrier()


def test_sync_goes_on_from_the_end_of_a_round(world: World) -> None:
    """It leaves out what was kept, which only an outer step could use."""
    strategy, walk = SparseLoCo(EVERY, density=0.5), Walk(w=2)
    strategy.begin(world, walk.model)
    walk.round(strategy, 1, w=[1, 2 + world.rank])
    own, state, saved = strategy.own_state(), strategy.state(), walk.model.state()
    strategy.close()
    sync, other = Sync(), Walk(w=2)
    sync.begin(world, other.model)
    sync.restore(state)
    other.model.restore(saved)
    sync.restore_own(own)
    assert other["w"].tobytes() == walk["w"].tobytes()
    other.step(sync, 1, w=[2, 2])
    assert other["w"].tolist() == (walk["w"] - numpy.float32(1)).tolist()
    sync.close()
