"""The record of a run with a server: its workers, their waits, staleness and bytes. Workers by hand."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
from counting import JOB, NUM_SAMPLES, parts
from hands import Served, hands, mean

import mpitrain as mt
from jobs import until
from mpitrain.server.registry import ServerRules

BYTES = 8 * NUM_SAMPLES  # of the parameters, and of the gradients


class Kept:
    """A writer that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def open(self, after_step: int) -> None:
        pass

    def write(self, row: dict[str, float], events: Any = ()) -> None:
        self.rows.append(row)

    def close(self) -> None:
        pass


def test_the_record_of_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    """The second of two workers answers a job after two updates of the first one."""
    kept, other = Kept(), Kept()
    hooks = [mt.Record([kept], steps=2), mt.Record([other], meters=[mt.meters.Communication()], steps=4)]
    served = Served(4, mt.ParameterServer("async", unit_samples=JOB), hooks=hooks)
    with hands(served, 2) as (first, second):
        slow = second.pull()
        for _ in range(2):
            job = first.pull()
            first.push(job, mean(job))
        job = first.hear("unit")
        second.push(slow, mean(slow))
        second.hear("unit")
        first.push(job, mean(job))
        for worker in (first, second):
            worker.end()
    served.end()
    assert [row["step"] for row in kept.rows] == [2, 4]
    named = ("workers", "staleness", "largest_staleness", "pulled_bytes", "pushed_bytes")
    # The jobs of both workers and the second of the first one went out before update 2, then three others.
    assert [tuple(row[name] for name in named) for row in kept.rows] == [
        (2, 0, 0, 3 / 2 * BYTES, BYTES),
        (2, 1.5, 2, 2 / 2 * BYTES, BYTES),
    ]
    assert all(0 <= row["waiting_share"] <= 1 for row in kept.rows)
    assert all("communication_share" not in row for row in [*kept.rows, *other.rows])
    assert "Communication is not recorded on this rank" in capfd.readouterr().err


def test_workers_of_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    kept = Kept()
    trainer = mt.Trainer(
        parts(mt.Sync()), [mt.StopAtStep(2), mt.Record([kept], meters=[mt.meters.Workers(), mt.meters.Loss()])]
    )
    trainer.run()
    trainer.close()
    assert list(kept.rows[0]) == ["step", "epoch", "samples", "seconds", "loss"]
    assert "Workers is not recorded on this rank. " in capfd.readouterr().err


def test_the_time_of_a_hook_counts() -> None:
    """An answer comes while a hook works, so the next update is made at once. Its time is also that of the hook."""
    has_come, seconds = threading.Event(), 1.0

    class Works(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: Any) -> None:
            steps.append(step.seconds)
            if step.number == 1:
                assert has_come.wait(60)
                time.sleep(seconds)

    steps: list[float] = []
    served = Served(2, mt.ParameterServer("async", unit_samples=JOB), hooks=[Works()])
    with hands(served, 2) as (first, second):
        jobs = [worker.pull() for worker in (first, second)]
        first.push(jobs[0], mean(jobs[0]))
        until(lambda: steps)
        second.push(jobs[1], mean(jobs[1]))
        has_come.set()
        for worker in (first, second):
            worker.end()
    served.end()
    assert steps[1] >= seconds


def test_the_share_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker computes for 3 s, waits 2 s for a hook, and computes for 1 s, by a clock that this test moves."""
    clock = [1000.0]
    monkeypatch.setattr("mpitrain.server.participant.ServerRules", partial(ServerRules, now=lambda: clock[0]))

    class Works(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: Any) -> None:
            clock[0] += 2.0

    kept = Kept()
    served = Served(2, mt.ParameterServer("async"), hooks=[mt.Record([kept], steps=1), Works()])
    with hands(served, 1) as (worker,):
        job = worker.pull()
        clock[0] += 3.0
        worker.push(job, mean(job))
        job = worker.hear("unit")
        clock[0] += 1.0
        worker.push(job, mean(job))
        worker.end()
    served.end()
    assert [row["waiting_share"] for row in kept.rows] == [0.0, 2 / 3]
    (stats,) = served.strategy.stats.workers
    assert (stats.seconds, stats.waited_seconds) == (4.0, 2.0)
