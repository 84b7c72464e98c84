"""After a communication that was left in the middle a world says no, instead of meeting what is still on its way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest

from mpitrain import World
from mpitrain.errors import MismatchError, MpitrainError
from mpitrain.job.worlds import make_world
from mpitrain.waiting.agreement import Agreement

from .common import skip_alone


def interrupted() -> Iterator[None]:
    yield
    raise KeyboardInterrupt


def test_an_interrupted_wait_breaks_the_world(world: World) -> None:
    own = make_world(world.comm)
    with pytest.raises(KeyboardInterrupt):
        own.control.wait(interrupted(), "a test")
    for call in (own.barrier, lambda: own.sum(1), lambda: own.mean(numpy.ones(3)), lambda: own.broadcast(1)):
        with pytest.raises(MpitrainError, match=r"a test ended by KeyboardInterrupt.*cannot communicate any more"):
            call()
    assert world.sum(1) == world.size  # another world is not touched


def test_an_error_that_all_ranks_share_breaks_nothing(world: World) -> None:
    skip_alone(world)
    with pytest.raises(MismatchError):
        world.sum(numpy.zeros(world.rank))
    assert world.sum(1) == world.size


def test_a_mismatch_stays_one(world: World) -> None:
    skip_alone(world)
    agreement: Agreement = world.begin_agreement(f"call {world.rank}")
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"rank 1 on .*: call 1; rank 0 on .*: call 0"):
            agreement.wait()
    assert world.sum(1) == world.size
