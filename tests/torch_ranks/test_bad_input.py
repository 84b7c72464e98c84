"""Calls that cannot work: an error on every rank that says who did what, and a group that works on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from mpitrain import World
from mpitrain.errors import MismatchError, MpitrainError, ProcessGroupError
from mpitrain.torch import monitored_barrier
from mpitrain.torch.channel import COMPARED_AT_ONCE, COMPARED_CALLS
from mpitrain.watching.activity import own_activity
from tests.ranks.common import named_ranks, skip_alone

from .common import all_gather_single, reduce_scatter_single

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(autouse=True)
def works_on(world: World) -> Iterator[None]:
    """After each of these errors."""
    yield
    value = torch.ones(3)
    dist.all_reduce(value)
    assert (value == world.size).all()


@pytest.fixture
def fresh(world: World) -> Iterator[dist.ProcessGroup]:
    """A group at its beginning: its first calls are compared."""
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


def ones(count: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def summed(group: Any) -> None:
    dist.all_reduce(ones(), group=group)


# What the last rank does, what the others do, and a word of each that the message has.
DISAGREEMENTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str, str]] = {
    "another call": (lambda g: dist.broadcast(ones(), 0, group=g), summed, "broadcast", "all_reduce"),
    "a barrier": (lambda g: dist.barrier(group=g), summed, "barrier", "all_reduce"),
    "length": (lambda g: dist.all_reduce(ones(4), group=g), summed, "4 float32", "3 float32"),
    "dtype": (lambda g: dist.all_reduce(ones(3, torch.int32), group=g), summed, "3 int32", "3 float32"),
    "operation": (lambda g: dist.all_reduce(ones(), ReduceOp.MAX, group=g), summed, "MAX", "SUM"),
    "root": (
        lambda g: dist.broadcast(ones(), 1, group=g),
        lambda g: dist.broadcast(ones(), 0, group=g),
        "root 1",
        "root 0",
    ),
    "length of a broadcast": (
        lambda g: dist.broadcast(ones(2), 0, group=g),
        lambda g: dist.broadcast(ones(3), 0, group=g),
        "2 float32",
        "3 float32",
    ),
    "length that is gathered": (
        lambda g: all_gather_single(ones(4 * g.size()), ones(4), group=g),
        lambda g: all_gather_single(ones(3 * g.size()), ones(3), group=g),
        "4 float32",
        "3 float32",
    ),
    "a refused list": (
        lambda g: dist.all_gather([ones()] * (g.size() + 1), ones(), group=g),
        lambda g: dist.all_gather([ones() for _ in range(g.size())], ones(), group=g),
        "tensors in a list",
        "all_gather in process group",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree(world: World, fresh: dist.ProcessGroup, name: str) -> None:
    skip_alone(world)
    odd, others, its, theirs = DISAGREEMENTS[name]
    is_odd = world.rank == world.size - 1
    # The one that is refused knows its own reason.
    kind = ValueError if name == "a refused list" and is_odd else MismatchError
    with pytest.raises(kind) as caught:
        (odd if is_odd else others)(fresh)
    texts = world.allgather(str(caught.value))
    if name == "a refused list":
        assert its in texts.pop()
    assert len(set(texts)) == 1, texts
    for part in (its, theirs, *named_ranks(world, world.size - 1)):
        assert part in texts[0], texts[0]
    value = ones()
    dist.all_reduce(value, group=fresh)
    assert (value == world.size).all()


def test_works_of_ranks_that_disagree(world: World, fresh: dist.ProcessGroup) -> None:
    """The error comes where the work, or its future, is waited for; what was begun after it continues."""
    skip_alone(world)
    bad = dist.all_reduce(ones(3 + (world.rank == 0)), group=fresh, async_op=True)
    value = ones()
    good = dist.all_reduce(value, group=fresh, async_op=True)
    good.wait()
    assert (value == world.size).all()
    with pytest.raises(MismatchError):
        bad.wait()
    assert bad.is_completed()
    assert not bad.is_success()
    assert isinstance(bad.exception(), MismatchError)
    with pytest.raises(MismatchError):
        bad.get_future().wait()


# MPI itself refuses lengths of a broadcast, on one rank alone.
LATER = ["another call", "length", "dtype", "operation", "root", "length of a broadcast", "length that is gathered"]


@pytest.fixture
def later(world: World, fresh: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> dist.ProcessGroup:
    """A group whose calls are no more compared before they begin."""
    skip_alone(world)
    for _ in range(COMPARED_CALLS + COMPARED_AT_ONCE + 3):
        dist.all_reduce(ones(), group=fresh)
    monkeypatch.setattr(type(own_activity()), "stall_seconds", 0.5)
    world.barrier()
    return fresh


@pytest.mark.parametrize("name", LATER)
def test_ranks_that_disagree_later(world: World, later: dist.ProcessGroup, name: str) -> None:
    """A call that waits is an error soon; one that ends is compared with the next barrier, at the latest."""
    of_last, of_others, word, other_word = DISAGREEMENTS[name]
    with pytest.raises(MismatchError) as caught:
        (of_last if world.rank == world.size - 1 else of_others)(later)
        dist.barrier(group=later)
    assert word in str(caught.value)
    assert other_word in str(caught.value)


def test_a_call_that_one_rank_refuses_later(world: World, later: dist.ProcessGroup) -> None:
    """The others are told at once, and none continues with a call that is another one's."""
    skip_alone(world)
    too_many = [ones() for _ in range(world.size + (world.rank == 1))]
    with pytest.raises(ValueError if world.rank == 1 else MismatchError, match="tensors in a list"):
        dist.all_gather(too_many, ones(), group=later)
    with pytest.raises(MpitrainError, match=f"{world.name(1)}: all_gather .refused: .* tensors in a list"):
        dist.all_gather(too_many[: world.size], ones(), group=later)


def test_calls_that_all_refuse_later(world: World, later: dist.ProcessGroup) -> None:
    for _ in range(COMPARED_AT_ONCE):
        with pytest.raises(ValueError, match="tensors in a list"):
            dist.all_gather([ones()] * (world.size + 1), ones(), group=later)
        with pytest.raises(ProcessGroupError, match="integers"):
            dist.all_reduce(ones(), ReduceOp.BAND, group=later)
        dist.all_reduce(ones(), group=later)
    dist.barrier(group=later)


def test_a_rank_that_comes_late_is_no_error(world: World, later: dist.ProcessGroup) -> None:
    if world.is_root:
        time.sleep(1.5)
    for _ in range(COMPARED_AT_ONCE + 2):
        dist.all_reduce(ones(), group=later)
    dist.barrier(group=later)


def test_split_sizes_that_disagree(world: World, fresh: dist.ProcessGroup) -> None:
    skip_alone(world)
    sends = [1] * world.size
    receives = [1] * world.size
    if world.rank == 1:
        sends[0] = 2  # rank 0 expects 1
    with pytest.raises(MismatchError, match="split sizes") as caught:
        dist.all_to_all_single(ones(sum(receives)), ones(sum(sends)), receives, sends, group=fresh)
    assert world.name(1) in str(caught.value)
    assert world.name(0) in str(caught.value)
    world.barrier()


# The same on every rank, so each knows by itself; the kind of error and words of its text.
REFUSED: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "too many in a list": (lambda n: dist.all_gather([ones()] * (n + 1), ones()), ValueError, "give one for each rank"),
    "lists by input, not by rank": (
        lambda n: dist.group.WORLD.allgather_coalesced([[ones()] * n] * (n + 1), [ones()] * (n + 1)),
        ValueError,
        "allowed: . lists, one per rank, each with . tensors, one per input",
    ),
    "dtypes in a list": (
        lambda n: dist.group.WORLD.allgather([[ones(3, torch.int32)] * n], [ones()]),
        TypeError,
        "all must be of one dtype",
    ),
    "lengths in a list": (lambda n: dist.all_gather([ones(4) for _ in range(n)], ones()), ValueError, "4"),
    "too many to scatter": (
        lambda n: dist.group.WORLD.scatter([ones()], [[ones()] * (n + 1)], of_root()),
        ValueError,
        "give one for each rank",
    ),
    "parts of reduce_scatter": (lambda n: dist.reduce_scatter(ones(), [ones()] * (n + 1)), ValueError, "for each rank"),
    "alltoall": (lambda n: dist.all_to_all([ones()] * (n + 1), [ones()] * n), ValueError, "give one for each rank"),
    "a whole of another length": (lambda n: all_gather_single(ones(3 * n + 1), ones()), ValueError, "needs"),
    "a part of another length": (lambda n: reduce_scatter_single(ones(), ones(3 * n + 1)), ValueError, "needs"),
    "split sizes": (lambda n: dist.all_to_all_single(ones(n), ones(n), [2] * n, [1] * n), ValueError, "split sizes"),
    "no equal shares": (lambda n: dist.all_to_all_single(ones(n + 1), ones(n)), ValueError, "split sizes"),
    "a sparse tensor": (lambda n: dist.broadcast(ones().to_sparse(), 0), TypeError, "to_dense"),
    "nowhere": (lambda n: dist.group.WORLD.allreduce([ones().to("meta")]), TypeError, "can be on cpu or cuda"),
    "devices in a list": (
        lambda n: dist.group.WORLD.allgather([[ones()] * n], [ones().to("meta")]),
        TypeError,
        "can be on cpu or cuda",
    ),
    "bits of floats": (lambda n: dist.all_reduce(ones(), ReduceOp.BAND), ProcessGroupError, "integers"),
    "a mean of truths": (lambda n: dist.all_reduce(ones(3, torch.bool), ReduceOp.AVG), ProcessGroupError, "no mean"),
    "a factor": (
        lambda n: dist.all_reduce(ones(), dist._make_nccl_premul_sum(2.0)),
        ProcessGroupError,
        "PREMUL_SUM does not exist",
    ),
    "8 bits": (lambda n: dist.all_reduce(ones().to(torch.float8_e4m3fn)), ProcessGroupError, "cannot be reduced"),
}


def of_root() -> dist.ScatterOptions:
    """Treat every rank as the root: each refuses its own list."""
    options = dist.ScatterOptions()
    options.rootRank = dist.get_rank()
    return options


@pytest.mark.parametrize("name", REFUSED)
def test_what_every_rank_refuses(world: World, name: str) -> None:
    if name == "no equal shares" and world.size == 1:
        pytest.skip("one rank shares anything")
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words) as caught:
        call(world.size)
    assert world.name() in str(caught.value), "the message names the rank and host"
    world.barrier()


def test_a_message_of_another_length_and_ranks_and_tags_that_there_are_not(world: World) -> None:
    skip_alone(world)
    if world.rank == 0:
        dist.send(ones(4), 1)
        dist.send(ones(2), 1)
    elif world.rank == 1:
        for _ in range(2):
            with pytest.raises(MismatchError, match="has sent") as caught:
                dist.recv(ones(3), 0)
            assert world.name(0) in str(caught.value)
            assert world.name(1) in str(caught.value)
    with pytest.raises(ValueError, match="tags are 0 to"):
        dist.send(ones(), (world.rank + 1) % world.size, tag=-3)
    with pytest.raises((ValueError, RuntimeError)):
        dist.broadcast(ones(), world.size)
    world.barrier()


def of_the_group(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks)


@pytest.mark.parametrize("name", ["ours", "torch's", "the group's"])
def test_monitored_barrier(world: World, name: str) -> None:
    made = {"ours": monitored_barrier, "torch's": dist.monitored_barrier, "the group's": of_the_group}[name]
    made()
    skip_alone(world)
    late = [0] if world.size == 2 else [0, world.size - 1]
    seconds = 1 if world.size <= 3 else 30  # from 4 ranks on, those that are not late must meet within this time
    if world.rank not in late:
        with pytest.raises(ProcessGroupError, match=f"not arrived within {seconds} s") as caught:
            made(timeout=timedelta(seconds=seconds), wait_all_ranks=True)
        for rank in late:
            assert world.name(rank) in str(caught.value)
        for rank in set(range(world.size)) - set(late):
            assert f"{world.name(rank)}," not in str(caught.value).split(" within")[0].split("monitored_barrier")[1]
    world.barrier()
    if world.rank in late:
        made(timeout=timedelta(seconds=60))
    made()
    some = dist.new_group([0])
    if world.rank == 0:
        made(some)
        dist.destroy_process_group(some)
    world.barrier()


def test_a_later_group_does_not_hear_what_an_earlier_one_has_missed(world: World) -> None:
    """One rank tells the others of itself, and they do not come. MPI gives a later group an earlier one's number."""
    skip_alone(world)
    for turn in range(10):
        some = dist.new_group()
        if world.rank == turn % 2:
            with pytest.raises(ProcessGroupError, match=r"not arrived within 0.5 s"):
                monitored_barrier(some, timeout=timedelta(seconds=0.5))
        world.barrier()
        dist.destroy_process_group(some)
        world.barrier()
