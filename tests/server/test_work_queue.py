"""The queue of jobs: whatever workers do, each sample of an epoch is used once, also across a resume."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.server.work_units import WorkQueue, WorkUnit

ACTIONS = ("cut", "split", "assign", "answer", "renew", "give back", "use")


def samples_before(epoch: int, cursor: int, num_samples: int) -> Counter[tuple[int, int]]:
    return Counter((e, place) for e in range(epoch + 1) for place in range(cursor if e == epoch else num_samples))


def samples_of(places: list[Any]) -> Counter[tuple[int, int]]:
    return Counter((epoch, place) for epoch, begin, end in places for place in range(begin, end))


def resumed(queue: WorkQueue, num_samples: int) -> WorkQueue:
    position = queue.position()
    return WorkQueue(num_samples, position["epoch"], position["cursor"], position["left"])


def check(queue: WorkQueue, used: list[tuple[int, int, int]], num_samples: int) -> None:
    """What is used and what is left are all samples before the cursor, each of them once."""
    position = queue.position()
    there = samples_of(used) + samples_of(position["left"])
    assert there == samples_before(position["epoch"], position["cursor"], num_samples)


@given(
    num_samples=st.integers(1, 12),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.integers(1, 7)), max_size=60),
    stops=st.sets(st.integers(0, 60), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_each_sample_is_used_once(num_samples: int, actions: list[Any], stops: set[int]) -> None:
    queue, jobs, used = WorkQueue(num_samples), dict[int, WorkUnit](), list[tuple[int, int, int]]()
    for turn, (action, which, number) in enumerate(actions):
        if turn in stops:  # the server is killed, and another goes on from its state
            queue, jobs = resumed(queue, num_samples), {}
        chosen = list(jobs.values())[which % len(jobs)] if jobs else None
        if action == "cut":
            job = queue.cut(number)
            assert 1 <= job.samples <= number
            jobs[job.number] = job
        elif chosen is None:
            continue
        elif action == "split":
            del jobs[chosen.number]
            parts = queue.split(chosen.number, number)
            assert len(parts) == min(number, chosen.samples)
            assert max(one.samples for one in parts) - min(one.samples for one in parts) <= 1
            jobs.update((one.number, one) for one in parts)
        elif action == "assign":
            jobs[chosen.number] = queue.assign(chosen.number, which)
        elif action == "answer":
            answered = queue.answer(chosen.number, chosen.worker)
            assert (answered is None) == chosen.is_answered
            jobs[chosen.number] = answered or chosen
        elif action == "renew":
            renewed = queue.renew(jobs.pop(chosen.number).number)
            assert renewed.places == chosen.places
            assert renewed.worker is None
            jobs[renewed.number] = renewed
        elif action == "give back":
            queue.give_back(jobs.pop(chosen.number).number)
        else:
            queue.use(jobs.pop(chosen.number).number)
            used.append(chosen.places)
        check(queue, used, num_samples)
    queue = resumed(queue, num_samples)
    last = queue.epoch
    while queue.position()["left"] or queue.cursor < num_samples or queue.epoch < last:
        job = queue.cut(5)
        queue.use(job.number)
        used.append(job.places)
    assert samples_of(used) == samples_before(last, num_samples, num_samples)


def test_samples_that_come_back_go_out_first() -> None:
    queue = WorkQueue(10)
    first, second = queue.cut(3), queue.cut(3)
    queue.give_back(second.number)
    queue.give_back(first.number)
    assert [queue.cut(4).places for _ in range(4)] == [(0, 0, 3), (0, 3, 6), (0, 6, 10), (1, 0, 4)]


def test_an_answer_of_another_worker_is_no_answer() -> None:
    queue = WorkQueue(10)
    job = queue.assign(queue.cut(3).number, "a")
    assert queue.answer(job.number, "b") is None
    assert queue.answer(99, "a") is None
    again = queue.assign(queue.renew(job.number).number, "b")
    assert queue.answer(job.number, "a") is None
    answered = queue.answer(again.number, "b")
    assert answered is not None
    assert answered.places == (0, 0, 3)
    assert queue.answer(again.number, "b") is None


@pytest.mark.parametrize("most", [1, 3, 7])
def test_the_position_without_jobs_out_is_that_of_one_process(most: int) -> None:
    queue = WorkQueue(7)
    out = [queue.cut(most) for _ in range(9)]
    for job in reversed(out[3:]):  # the others are used
        queue.give_back(job.number)
    for job in out[:3]:
        queue.use(job.number)
    done = sum(job.samples for job in out[:3])
    epoch, cursor = (done - 1) // 7, (done - 1) % 7 + 1
    assert queue.position() == {"epoch": epoch, "cursor": cursor, "left": []}
