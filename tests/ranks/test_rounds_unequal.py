"""Rounds on unequal ranks: `Balance` gives each rank samples by its speed, and the outer mean counts samples."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy

from mpitrain import Balance, Parts, StopAtStep, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.job.worlds import make_world
from mpitrain.state.resume import add_up

from .common import assert_same_bits, skip_alone
from .rounds_by_hand import EVERY, KINDS, Expected, assert_close, flat, kinds
from .test_data_balance import Pretend
from .test_strategies import WIDTH, adapter, quadratic

SAMPLES, BATCH, STEPS = 171, 64, 8  # the last batch of an epoch has 43
X = numpy.random.default_rng(8).standard_normal((SAMPLES, WIDTH))


def parts_of(size: int, length: int, speeds: list[float]) -> list[slice]:
    """The share of each rank. Written anew: the slowest rank ends as early as possible, and has a sample."""
    counts = [1] * size
    for _ in range(length - size):
        counts[min(range(size), key=lambda rank: ((counts[rank] + 1) / speeds[rank], rank))] += 1
    ends = numpy.cumsum(counts)
    return [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]


class Read:
    """The model, and the samples that this rank has read in the present epoch."""

    def __init__(self) -> None:
        self.seen: Counter[bytes] = Counter()

    def __call__(self, parameters: Any, batch: Any, on_gradient: Any) -> float:
        self.seen.update(row.tobytes() for row in batch[0])
        return quadratic(parameters, batch[0], on_gradient)


@kinds
def test_shares_by_speed(world: World, kind: str) -> None:
    """Speeds 1, 1/2, 1/4 and so on. Each sample of an epoch is used once; the outer mean weighs the samples."""
    read, hook = Read(), Pretend(Balance(2), 0.01 * 2**world.rank)

    def build(its: World) -> Parts:
        return Parts(adapter(read), KINDS[kind][0](), ArrayData(its, (X,), global_batch=BATCH, shuffle=False))

    trainer, expected = Trainer(build, [StopAtStep(STEPS), hook]), Expected(world.size, kind)
    trainer.run()
    speeds = [100 / 2**rank for rank in range(world.size)]
    for step in range(STEPS):
        batch = X[BATCH * (step % 3) :][:BATCH]
        if expected.delay:
            expected.send((step - 1) % EVERY + 1)
        parts = parts_of(world.size, len(batch), speeds if step >= 2 else [1.0] * world.size)
        for rank, part in enumerate(parts):
            expected.inner(rank, batch[part])
        expected.step_ends()
        assert hook.parts[step] == parts[world.rank].stop - parts[world.rank].start
    expected.end()
    assert_close(flat(trainer.adapter), expected.common)
    assert_same_bits(world, *trainer.adapter.parameters().values())
    total = sum(world.allgather(read.seen), Counter())
    assert total == Counter(row.tobytes() for row in [*X, *X, *X[: 2 * BATCH]])
    trainer.close()


def test_another_number_of_ranks_goes_on_within_a_round(world: World) -> None:
    """One rank goes on from all, with the samples that are left of the epoch, and with what each rank has learned."""
    from mpi4py import MPI

    skip_alone(world)
    hook = Pretend(Balance(2), 0.01 * 2**world.rank)

    def build(its: World) -> Parts:
        return Parts(adapter(Read()), KINDS["local_sgd"][0](), ArrayData(its, (X,), global_batch=BATCH, shuffle=False))

    trainer, expected = Trainer(build, [hook]), Expected(world.size, "local_sgd")
    hook.before_run(trainer)
    speeds = [100 / 2**rank for rank in range(world.size)]
    for step in range(5):
        hook.after_step(trainer, replace(trainer.step(), own_seconds=1e-9))
        batch = X[BATCH * (step % 3) :][:BATCH]
        for rank, part in enumerate(parts_of(world.size, len(batch), speeds if step >= 2 else [1.0] * world.size)):
            expected.inner(rank, batch[part])
        expected.step_ends()
    total: dict[str, Any] = {}
    for own in world.allgather(trainer.strategy.own_state()):
        add_up(total, own)
    state = world.broadcast_object(trainer.state())
    trainer.close()
    again = Trainer(build, [], make_world(MPI.COMM_SELF))
    again.restore(state)
    again.strategy.restore_own(total)
    expected.add_rank()
    expected.inner(-1, X[2 * BATCH :])  # the rest of the second epoch, and the last step of the round
    expected.step_ends()
    again.step()
    assert_close(flat(again.adapter), expected.own[-1])
    assert_close(flat(again.adapter), expected.common)
    again.close()
