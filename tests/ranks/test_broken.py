"""A world whose communication was interrupted refuses further calls, which could meet messages still on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    for call in (own.barrier, lambda: own.sum(1), lambda: own.mean(numpy.ones(3)), lambda: own.broadcast_object(1)):
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


def test_ranks_that_disagree_twice_hear_of_both(world: World) -> None:
    """Whichever they wait for first: the one begun first is explained first, and neither is mixed up with the other."""
    agreements = [world.begin_agreement(name, [f"{name} {world.rank}"]) for name in ("first", "second")]
    order = agreements if world.rank % 2 == 0 else agreements[::-1]
    told = [str(raised(agreement.wait)) for agreement in order]
    if world.size == 1:
        assert told == ["None", "None"]
        return
    first, second = (
        f"{world.control.name(1)}: {name} 1; {world.control.name(0)}: {name} 0; they must be equal in: {name}"
        for name in ("first", "second")
    )
    # A wait for the second one ends with the first one's error too: that may be why it waits.
    assert told == ([first, second] if world.rank % 2 == 0 else [first, first])
    assert str(raised(agreements[1].wait)) == second
    assert world.sum(1) == world.size


def raised(call: Callable[[], object]) -> MpitrainError | None:
    try:
        call()
    except MpitrainError as error:
        return error
    return None
