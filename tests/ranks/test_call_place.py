"""Calls at two lines of a program are two calls, unless it says that they are one; worlds that were interrupted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

from mpitrain import World, collectives
from mpitrain.errors import MismatchError, MpitrainError, TreeError
from mpitrain.job.worlds import make_world
from mpitrain.waiting import agreement
from mpitrain.waiting.agreement import Agreement

from .common import error_on_all, skip_alone

CALLS: dict[str, Callable[[World], Any]] = {
    "sum": lambda world: world.sum,
    "mean": lambda world: world.mean,
    "allgather": lambda world: world.allgather,
    "where": lambda world: world.where,
    "partial": lambda world: functools.partial(world.mean, weight=2),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_branch_on_the_rank_is_an_error_with_both_lines(world: World, name: str) -> None:
    skip_alone(world)
    call = CALLS[name](world)

    def branch() -> None:
        if world.rank == 0:
            call(1.0)
        else:
            call(2.0)

    first = branch.__code__.co_firstlineno
    text = error_on_all(world, MismatchError, branch)
    assert f"test_call_place.py:{first + 4}; rank 0" in text
    assert f"test_call_place.py:{first + 2}; do all ranks" in text
    assert 'world.same_call("name")' in text


def test_two_calls_on_one_line_differ_by_their_columns(world: World) -> None:
    skip_alone(world)
    text = error_on_all(world, MismatchError, lambda: world.sum(1) if world.rank else world.sum(2))
    assert len({part.split(";")[0] for part in text.split("test_call_place.py:")[1:]}) == 2


def test_calls_of_one_name_are_one_call(world: World) -> None:
    skip_alone(world)
    if world.rank == 0:
        with world.same_call("total"):
            total = world.sum(1)
    else:
        with world.same_call("total"):
            total = world.sum(1)
    assert total == world.size

    def other_names() -> None:
        with world.same_call("odd" if world.rank == 1 else "even"):
            world.sum(1)

    assert "same_call('odd')" in error_on_all(world, MismatchError, other_names)
    assert world.sum(1) == world.size


def test_a_root_may_call_elsewhere(world: World) -> None:
    if world.rank == 0:
        sent = world.broadcast_object("news")
        synced = world.broadcast(numpy.ones(2))
        handed = collectives.broadcast(world, numpy.ones(2)).wait()
        gathered = world.gather(0)
    else:
        sent = world.broadcast_object()
        synced = world.broadcast(numpy.zeros(2))
        handed = collectives.broadcast(world, numpy.zeros(2)).wait()
        gathered = world.gather(world.rank)
    assert sent == "news"
    assert synced.tolist() == handed.tolist() == [1, 1]
    assert gathered == (list(range(world.size)) if world.rank == 0 else None)


def test_other_ranks_than_the_root_call_at_one_line(world: World) -> None:
    if world.size < 3:
        pytest.skip("needs three ranks")

    def program() -> None:
        if world.rank == 2:
            world.broadcast_object()
        else:
            world.broadcast_object("news")

    assert "broadcast_object from rank 0 at" in error_on_all(world, MismatchError, program)


def test_healthy_programs(world: World) -> None:
    """One line, however a rank comes to it."""
    for step in range(3):
        if world.rank == 0:
            print("step", step)
        assert list(map(world.sum, [1, 2])) == [world.size, 2 * world.size]
    # A process has its own numbers in such names.
    space = {"world": world}
    exec(compile("total = world.sum(1)", f"<ipython-input-{world.rank}>", "exec"), space)
    assert space["total"] == world.size
    exec(compile("total = world.sum(1)", f"/tmp/checkout{world.rank}/train.py", "exec"), space)
    assert space["total"] == world.size
    for _ in range(2):
        with world.together("look"):  # a block may be left in several ways
            if world.rank == 0:
                continue


def test_many_functions_made_as_the_program_runs_are_not_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MOST_PLACES", 2)
    for _ in range(9):
        exec("world.barrier()", {"world": world})
        assert len(agreement._places) <= 2


def test_what_one_rank_cannot_send_is_an_error_on_all(world: World) -> None:
    skip_alone(world)
    odd = world.size - 1
    bad: dict[str, Callable[[bool], Any]] = {
        "broadcast_object": lambda is_odd: world.broadcast_object((lambda: 0) if is_odd else 0, root=odd),
        "gather": lambda is_odd: world.gather((lambda: 0) if is_odd else 0),
        "allgather": lambda is_odd: world.allgather((lambda: 0) if is_odd else 0),
        "sum": lambda is_odd: world.sum("text" if is_odd else 1),
        "broadcast": lambda is_odd: world.broadcast({"a": "text" if is_odd else 1}),
        "where": lambda is_odd: world.where("text" if is_odd else 1),
        "collectives.allgather": lambda is_odd: collectives.allgather(
            world, "text" if is_odd else numpy.ones(1)
        ).wait(),
    }
    for name, call in bad.items():
        with pytest.raises(TreeError) as caught:
            call(world.rank == odd)
        assert caught.value.known_everywhere
        if world.rank != odd:
            assert str(caught.value).startswith(f"{world.name(odd)}: {name}")
        assert world.sum(1) == world.size  # the ranks continue, in step


def interrupted() -> Iterator[None]:
    yield
    raise KeyboardInterrupt


def test_an_interrupted_wait_breaks_the_world(world: World) -> None:
    own = make_world(world.comm)
    with pytest.raises(KeyboardInterrupt):
        own.control.wait(interrupted(), "a test")
    for call in (own.barrier, lambda: own.sum(1), lambda: own.mean(numpy.ones(3)), lambda: own.broadcast_object(1)):
        with pytest.raises(MpitrainError, match=r"a test ended by KeyboardInterrupt.*can no longer communicate"):
            call()
    assert world.sum(1) == world.size  # another world is not touched


def test_a_mismatch_stays_one(world: World) -> None:
    skip_alone(world)
    agreement: Agreement = world.begin_agreement(f"call {world.rank}")
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"rank 1 on .*: call 1; rank 0 on .*: call 0"):
            agreement.wait()
    assert world.sum(1) == world.size


def test_ranks_that_disagree_twice_hear_of_both(world: World) -> None:
    """Whichever they wait for first: the one begun first is explained first, and neither is mixed up with the other."""
    skip_alone(world)
    agreements = [world.begin_agreement(name, [f"{name} {world.rank}"]) for name in ("first", "second")]
    told = []
    for one in (*agreements[:: -1 if world.rank % 2 else 1], agreements[1]):
        with pytest.raises(MismatchError) as caught:
            one.wait()
        told.append(str(caught.value))
    name = world.control.name
    first, second = (
        f"{name(1)}: {call} 1; {name(0)}: {call} 0; they must be equal in: {call}" for call in ("first", "second")
    )
    # A wait for the second one ends with the first one's error too: that may be why it waits.
    assert told == [first, first if world.rank % 2 else second, second]
    assert world.sum(1) == world.size
