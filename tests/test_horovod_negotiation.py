"""Which names are agreed on, in which order; and how a job ends if a rank never submits one."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from jobs import run_job
from mpitrain.horovod.negotiation import JOIN, Agreed, Negotiation, Submission

BEGIN = """
import torch
import mpitrain.horovod.torch as hvd
hvd.init()
"""


def name(rank: int) -> str:
    return f"rank {rank}"


def one(key: str, *lines: str) -> Submission:
    return Submission(key, lines, (), ("Sum",))


def keys(agreed: list[Agreed]) -> list[str]:
    return [item.key for item in agreed]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_order_of_names_and_ranks(size: int) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        table, found = Negotiation(size, name), []
        orders = {rank: chance.sample("abcdefg", 7) for rank in range(size)}
        while any(orders.values()):
            rank = chance.choice([rank for rank, left in orders.items() if left])
            count = chance.randint(1, len(orders[rank]))
            found += table.submit(rank, [one(key) for key in orders[rank][:count]])
            orders[rank] = orders[rank][count:]
        assert sorted(keys(found)) == list("abcdefg")


def test_who_is_missing() -> None:
    table = Negotiation(4, name)
    table.submit(2, [one("a")])
    table.submit(3, [one(JOIN)])
    assert table.missing("a") == [0, 1]


def test_a_rank_that_has_joined_contributes_zeros() -> None:
    table = Negotiation(3, name)
    assert table.submit(0, [one("a"), one("b")]) == []
    assert table.submit(1, [one("b"), one("a")]) == []
    # The one that joins last has submitted b before.
    assert keys(table.submit(2, [one("b")])) == ["b"]
    (agreed,) = table.submit(2, [one(JOIN)])
    assert agreed.key == "a"
    assert agreed.zeros == ("Sum",)
    assert agreed.details == ((), (), ())


def test_a_rank_that_has_submitted_a_name_and_then_joined_counts_once() -> None:
    table = Negotiation(3, name)
    assert table.submit(1, [one("a"), one(JOIN)]) == []
    assert table.submit(0, [one("a")]) == []  # rank 2 is missing
    (agreed,) = table.submit(2, [one("a")])
    assert (agreed.key, agreed.error, agreed.zeros) == ("a", "", None)


def test_two_joins_in_a_row() -> None:
    table = Negotiation(2, name)
    for first, last in ((0, 1), (1, 0)):
        assert table.submit(first, [one(JOIN)]) == []
        (end,) = table.submit(last, [one(JOIN)])
        assert end.key == JOIN
        assert end.details == ((last,),)
        assert table.submit(first, [one("a")]) == []  # it counts again
        assert keys(table.submit(last, [one("a")])) == ["a"]


def test_the_first_rank_that_differs_is_named() -> None:
    table = Negotiation(3, name)
    table.submit(2, [one("a", "int32 (3,)")])
    table.submit(1, [one("a", "int32 (4,)")])
    (agreed,) = table.submit(0, [one("a", "int32 (4,)")])
    assert agreed.error == "rank 2: int32 (3,); rank 0: int32 (4,); they must be equal in: a"


def test_a_rank_that_ends_without_the_name() -> None:
    """Ranks 1 and 2 wait for different names, and rank 0 has ended. Nobody may hang."""
    job = run_job(3, BEGIN + "if hvd.rank():\n    hvd.allreduce(torch.ones(1), name=f'of rank {hvd.rank()}')")
    assert job.code != 0, job.output
    assert "waits in allreduce.of rank" in job.stderr
    assert "rank 0 on" in job.stderr
    assert "has finished" in job.stderr
    assert job.left == []


@pytest.mark.nightly  # the wait of the test before is reported by the same lines
def test_a_wait_is_reported_with_its_name() -> None:
    script = BEGIN + "hvd.allreduce(torch.ones(1), name='early' if hvd.rank() else 'late')"
    job = run_job(2, script, env={"MPITRAIN_STALL_SECONDS": "1", "MPITRAIN_HANG_SECONDS": "3"})
    assert job.code != 0, job.output
    assert "allreduce.early" in job.stderr
    assert "allreduce.late" in job.stderr
    assert "so far without rank 1 on" in job.stderr
    assert job.left == []
