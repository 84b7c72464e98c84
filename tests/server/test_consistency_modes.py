"""Jobs and modes, without sockets: who gets a job, which gradients make an update, and each sample once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.server.work_units import Asynchronous, BoundedStaleness, ConsistencyMode, Synchronous, WorkQueue, WorkUnit

NUM_SAMPLES, BATCH, STALENESS = 23, 6, 2

PACES: dict[str, Callable[[WorkQueue], ConsistencyMode]] = {
    "sync": lambda queue: Synchronous(queue, BATCH, None, 0),
    "sync, small jobs": lambda queue: Synchronous(queue, BATCH, 2, 0),
    "sync, one backup": lambda queue: Synchronous(queue, BATCH, None, 1),
    "sync, two backups": lambda queue: Synchronous(queue, BATCH, None, 2),
    "async": lambda queue: Asynchronous(queue, 4),
    "bounded": lambda queue: BoundedStaleness(queue, 4, STALENESS),
}

EVENTS = st.lists(st.tuples(st.sampled_from(["join", "leave", "ask", "answer", "refuse"]), st.integers(0, 4)))


class Play:
    """Plays the server. Counts what is used."""

    def __init__(self, name: str) -> None:
        self.queue = WorkQueue(NUM_SAMPLES)
        self.mode = PACES[name](self.queue)
        self.here: set[int] = set()
        self.clocks: dict[int, int] = {}
        self.updates: list[list[WorkUnit]] = []

    def event(self, kind: str, worker: int) -> None:
        if kind == "join" and worker not in self.here:
            self.here.add(worker)
            self.mode.join(worker)
            self.clocks[worker] = min(self.clocks.values(), default=0)
        elif worker not in self.here:
            return
        elif kind == "leave":
            self.here.remove(worker)
            self.mode.leave(worker)
            del self.clocks[worker]
            assert not self.queue.at(worker)
        elif kind == "ask" and not self.queue.at(worker):
            job = self.mode.next_unit(worker)
            assert [job] == (self.queue.at(worker) or [None])
        elif kind in ("answer", "refuse") and (out := self.queue.at(worker)):
            job = self.queue.answer(out[0].number, worker)
            assert job is not None
            if kind == "refuse":
                self.mode.refuse(job)
                return
            self.clocks[worker] += 1
            if jobs := self.mode.answer(job):
                self.updates.append(list(jobs))
                for one in jobs:
                    self.queue.use(one.number)

    def round(self) -> None:
        """Every worker asks, and then every worker answers."""
        for kind in ("ask", "answer"):
            for worker in sorted(self.here):
                self.event(kind, worker)


@pytest.mark.parametrize("name", PACES)
@given(events=EVENTS)
@settings(max_examples=60, deadline=None)
def test_every_sample_counts_once_and_none_waits_for_ever(name: str, events: list[Any]) -> None:
    play = Play(name)
    for kind, worker in events:
        play.event(kind, worker)
        if name == "bounded" and play.clocks:
            assert max(play.clocks.values()) - min(play.clocks.values()) <= STALENESS + 1
    play.event("join", 9)
    for _ in range(2 * STALENESS + 4):  # in so many rounds, whoever was held up catches up
        before = len(play.updates)
        for _ in range(STALENESS + 3):
            play.round()
        assert len(play.updates) > before
    position = play.queue.position()
    counted = Counter(
        (job.epoch, place) for jobs in play.updates for job in jobs for place in range(job.begin, job.end)
    )
    counted.update((epoch, place) for epoch, begin, end in position["left"] for place in range(begin, end))
    epochs = range(position["epoch"] + 1)
    ends = [position["cursor"] if epoch == position["epoch"] else NUM_SAMPLES for epoch in epochs]
    assert counted == Counter((epoch, place) for epoch in epochs for place in range(ends[epoch]))


@pytest.mark.parametrize("name", ["sync", "sync, small jobs"])
@given(events=EVENTS)
@settings(max_examples=60, deadline=None)
def test_the_steps_of_sync_are_those_of_one_process(name: str, events: list[Any]) -> None:
    play = Play(name)
    for kind, worker in [*events, ("join", 9)]:
        play.event(kind, worker)
    for _ in range(5):
        play.round()
        play.round()
    steps = [[(e, b, min(b + BATCH, NUM_SAMPLES)) for b in range(0, NUM_SAMPLES, BATCH)] for e in range(9)]
    for jobs, (epoch, begin, end) in zip(play.updates, [step for of_epoch in steps for step in of_epoch], strict=False):
        assert [job.epoch for job in jobs] == [epoch] * len(jobs)
        bounds = [job.begin for job in jobs] + [jobs[-1].end]
        assert bounds[0] == begin
        assert bounds[-1] == end
        assert all(job.end == after for job, after in zip(jobs, bounds[1:], strict=True))
    assert play.updates


def test_backup_workers_are_not_waited_for() -> None:
    """3 workers and one backup: two answers of three samples each make the step; the third job goes out again."""
    play = Play("sync, one backup")
    for worker in (1, 2, 3):
        play.event("join", worker)
    for worker in (1, 2, 3):
        play.event("ask", worker)
    slow = play.queue.at(1)[0]
    play.event("answer", 3)
    assert play.updates == []
    play.event("answer", 2)
    assert [[job.places for job in jobs] for jobs in play.updates] == [[(0, 3, 6), (0, 6, 9)]]
    assert play.queue.answer(slow.number, 1) is None
    play.event("ask", 2)
    assert play.queue.at(2)[0].places == slow.places


def test_a_worker_that_has_answered_computes_no_second_job_that_the_step_does_not_need() -> None:
    """It would be late for the next step. If another worker of the step goes, it gets a second job."""
    play = Play("sync, one backup")
    for worker in (1, 2, 3):
        play.event("join", worker)
    for kind, worker in [("ask", 1), ("ask", 2), ("ask", 3), ("answer", 1), ("answer", 2)]:
        play.event(kind, worker)
    assert len(play.updates) == 1  # worker 3 still computes for this step, so a job of the next one stays free
    for kind, worker in [("ask", 1), ("ask", 2), ("answer", 1), ("ask", 1)]:
        play.event(kind, worker)
    assert play.queue.at(1) == []
    play.event("leave", 2)
    play.event("ask", 1)
    assert len(play.queue.at(1)) == 1
    play.event("answer", 1)
    assert len(play.updates) == 2


@pytest.mark.parametrize(
    ("batch", "num_workers", "backup"), [(100, 4, 1), (100, 5, 2), (7, 5, 2), (2, 5, 1), (1, 2, 1)]
)
def test_no_update_with_backup_has_more_samples_than_the_batch(batch: int, num_workers: int, backup: int) -> None:
    """Also where the number of answers does not divide the batch. No job is a small rest of one that came back."""
    needed = min(num_workers - backup, batch)
    queue = WorkQueue(10**6)
    mode = Synchronous(queue, batch, None, backup)
    for worker in range(num_workers):
        mode.join(worker)
    for step in range(20):
        made = None
        for worker in range(step, step + num_workers):  # other workers are slow in each step
            job = mode.next_unit(worker % num_workers)
            if job is not None:
                assert batch // needed <= job.samples <= -(-batch // needed)
        for worker in range(step, step + num_workers):
            if made is None and (out := queue.at(worker % num_workers)):
                job = queue.answer(out[0].number, worker % num_workers)
                assert job is not None
                made = mode.answer(job)
        assert made is not None
        assert batch - needed < sum(job.samples for job in made) <= batch
        for job in made:
            queue.use(job.number)


def test_a_joiner_of_bounded_begins_at_the_slowest_clock_and_who_is_gone_holds_nobody_up() -> None:
    play = Play("bounded")
    play.event("join", 1)
    play.event("join", 2)
    play.event("ask", 2)
    for _ in range(9):
        play.event("ask", 1)
        play.event("answer", 1)
    assert play.clocks == {1: STALENESS + 1, 2: 0}
    assert play.mode.next_unit(1) is None
    play.event("join", 3)
    assert play.mode.next_unit(1) is None
    play.event("leave", 2)
    assert play.mode.next_unit(1) is None
    play.event("leave", 3)
    assert play.mode.next_unit(1) is not None


def test_a_worker_that_joins_takes_what_another_has_left() -> None:
    play = Play("sync")
    for worker in (1, 2):
        play.event("join", worker)
        play.event("ask", worker)  # the step has one job, of worker 1: it began before worker 2 joined
    assert [job.places for job in play.queue.at(1)] == [(0, 0, 6)]
    assert play.queue.at(2) == []
    play.event("leave", 1)
    play.event("ask", 2)
    assert [job.places for job in play.queue.at(2)] == [(0, 0, 6)]


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
        if turn in stops:  # the server is killed, and another continues from its state
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
