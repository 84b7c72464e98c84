"""In which state a run is, from what its record and its launcher say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from records_made import DOCUMENT

from mpitrain.dashboard.index import IndexedRun
from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.dashboard.summary import differences, ids_of, state_of, summary_of_job, summary_of_run

OPEN = dataclasses.replace(DOCUMENT, end="", ended=None)


def look(
    state: str = "trains", phases: tuple[str, ...] = ("computes", "waits"), still: float = 0.0, **more: Any
) -> dict[str, Any]:
    ranks = [{"rank": rank, "phase": phase, "still": still} for rank, phase in enumerate(phases)]
    return {"state": state, "ranks": ranks, "stall": None, **more}


@pytest.mark.parametrize(
    ("document", "live", "is_alive", "age", "state", "why"),
    [
        (DOCUMENT, None, False, 1e6, "done", "all steps were made"),
        (dataclasses.replace(DOCUMENT, end="DataError: no"), None, False, 1e6, "failed", "DataError: no"),
        (dataclasses.replace(DOCUMENT, end="left"), None, False, 9.0, "lost", "another try was to go on with it"),
        (OPEN, None, True, 1e6, "trains", "rank 0 is alive on nowhere"),
        (OPEN, None, False, 59.0, "trains", "the last row is 59 s old"),
        (OPEN, None, False, 7300.0, "lost", "the last row is 2 h old"),
        (None, None, False, 3.0, "trains", "the last row is 3 s old"),
        (None, None, False, 600.0, "unknown", "no run.json; the last row is 10 min old"),
        (OPEN, look(), False, 1e6, "trains", ""),
        (OPEN, look("restarts"), True, 0.0, "restarts", ""),
        (OPEN, look(phases=("waits", "stopped")), True, 0.0, "stalled", "rank 1 stopped"),
        (OPEN, look(stall="ranks 0-1 wait", still=10.0), True, 0.0, "stalled", "ranks 0-1 wait"),
        (OPEN, look(stall="ranks 0-1 wait", still=9.9), True, 0.0, "trains", ""),
        (OPEN, look("ends", ended={"code": 0, "text": "it has ended"}), True, 0.0, "done", "it has ended"),
        (OPEN, look("ends", ended={"code": 1, "text": "exit code 1"}), True, 0.0, "failed", "exit code 1"),
        (OPEN, look("ends", ended={"code": None, "text": "interrupted"}), True, 0.0, "failed", "interrupted"),
        (OPEN, look(paused="paused by ada on a"), True, 0.0, "paused", "by ada on a"),
        (OPEN, look("starts", paused="paused by ada on a"), True, 0.0, "paused", "by ada on a"),
        (OPEN, look("ends", paused="paused by ada on a"), True, 0.0, "ends", ""),
        (OPEN, look(phases=("busy", "stopped"), paused="paused by ada"), True, 0.0, "stalled", "rank 1 stopped"),
        (OPEN, look(paused=""), True, 0.0, "trains", ""),
        (OPEN, look("a new state"), True, 0.0, "a new state", ""),
    ],
)
def test_states(document: Any, live: Any, is_alive: bool, age: float, state: str, why: str) -> None:
    found = state_of(document, live, is_alive=is_alive, age_seconds=age)
    assert found[0] == state
    assert why in found[1] and bool(why) == bool(found[1])


STOP = {"source": "told", "after_step": 2932, "teller": "ada on a", "text": "the run ends, and is saved"}


@pytest.mark.parametrize(
    ("step", "event", "why"),
    [
        (2932, STOP, "it was stopped by ada on a after step 2,932 of 9,000"),
        (2932, None, "it ended after step 2,932 of 9,000"),
        (2940, STOP, "it ended after step 2,940 of 9,000"),
        (9000, STOP, "all steps were made"),
    ],
)
def test_a_run_that_was_stopped_has_not_made_all_steps(step: float, event: Any, why: str) -> None:
    document = dataclasses.replace(DOCUMENT, steps=9000)
    found = state_of(document, None, is_alive=False, age_seconds=1e6, step=step, event=event)
    assert found == ("done", why)


def test_the_speed_is_the_mean_over_the_run() -> None:
    """The last row may be of a slow moment, which would reverse the order of two runs."""
    last = {"step": 9.0, "samples": 1000.0, "seconds": 10.0, "samples_per_second": 7.0}
    run = IndexedRun("0a", "/runs/a", None, last, 9, [], [], [], 0.0)
    assert summary_of_run(run, None)["speed"] == 100.0
    for change, speed in (({"seconds": 0.0}, 7.0), ({"samples": float("nan")}, 7.0)):
        assert summary_of_run(dataclasses.replace(run, last=last | change), None)["speed"] == speed
    assert summary_of_run(dataclasses.replace(run, last={}), None)["speed"] is None


def job_at(launcher: str, *ids: str) -> ShownJob:
    return ShownJob({"ids": list(ids), "state": "starts", "ranks": [], "hosts": {}}, 0.0, launcher)


def test_two_jobs_that_begin_have_two_ids() -> None:
    """And a page that was opened then finds its job when it has an id."""
    first, second = job_at("a 1 2"), job_at("a 3 4")
    ids = [summary_of_job(job)["id"] for job in (first, second)]
    assert len(set(ids)) == 2 and all(len(one) > len("job-") for one in ids)
    later = job_at("a 1 2", "1a2b3c4d", "5a6b7c8d")
    assert summary_of_job(later)["id"] == "job-1a2b3c4d"
    assert {ids[0], "job-1a2b3c4d", "job-5a6b7c8d"} == set(ids_of(later))


def test_what_differs() -> None:
    other = dataclasses.replace(
        DOCUMENT,
        arguments=["--lr", "0.2"],
        settings={"algorithm": "ring"},
        packages={"numpy": "2.0.0", "torch": "2.13"},
        is_changed=True,
        hosts={"a": [0, 1]},
        started=5.0,
    )
    assert differences([DOCUMENT, other]) == [
        {"name": "arguments", "values": ["--lr 0.1", "--lr 0.2"]},
        {"name": "commit", "values": ["0123abcd", "0123abcd and changes"]},
        {"name": "ranks", "values": ["3", "2"]},
        {"name": "hosts", "values": ["a: 2, b: 1", "a: 2"]},
        {"name": "setting algorithm", "values": [None, "ring"]},
        {"name": "package torch", "values": [None, "2.13"]},
    ]
    assert differences([DOCUMENT, DOCUMENT]) == differences([]) == differences([None]) == []
    assert {"name": "script", "values": ["train.py", None]} in differences([DOCUMENT, None])
