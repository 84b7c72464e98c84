"""What a server publishes of its workers, and the table of it: workers by hand, so that every number is known."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from counting import JOB, NUM_SAMPLES
from hands import Served, hands, mean, trained

import mpitrain as mt
from jobs import HANG_SECONDS, until
from mpitrain.cli.workers_table import histogram, lines_of
from mpitrain.launch.jobs import RunningJob
from mpitrain.launch.roster import served as read
from mpitrain.server import status
from mpitrain.server.registry import WorkerRegistry
from mpitrain.server.shards import Shards
from mpitrain.server.status import WorkerStats
from mpitrain.server.work_units import Asynchronous, WorkQueue
from mpitrain.watching import activity
from mpitrain.watching.served_record import ServedPage, read_served

BYTES = 8 * NUM_SAMPLES  # of the parameters, and of the gradients


@pytest.fixture(scope="module", autouse=True)
def record() -> Iterator[None]:
    """A record of this process, as a launched one has it."""
    before, activity._activity = activity._activity, activity.Activity(0, 0)
    yield
    activity._activity = before


def published(holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Wait until the server publishes what `holds`. Return it, as `mpitrain ps` gets it."""
    last: dict[str, Any] = {}

    def look() -> bool:
        last.update(read(os.getpid()))
        return "queue" in last and bool(holds(last))

    until(look)
    return last


def test_a_hundred_workers() -> None:
    """90 answer once, one badly, one twice, one goes, and all others compute. Each gradient is older than the last."""
    served = Served(91, mt.ParameterServer("async", unit_samples=JOB))
    with trained(served, 100) as workers:
        jobs = [worker.pull() for worker in workers]
        for worker, job in zip(workers[:90], jobs, strict=False):
            worker.push(job, mean(job))
            worker.hear("unit")
        workers[90].push(jobs[90], numpy.full(NUM_SAMPLES, numpy.nan))
        workers[90].hear("unit")
        workers[0].push(jobs[0], mean(jobs[0]))
        workers[91].say("bye")
        facts = published(lambda facts: facts["here"] == 99 and facts["all"]["dropped"])
        lines = lines_of(facts)
        workers[99].push(jobs[99], mean(jobs[99]))  # the last update
    titles = ["WORKER", "HOST", "STATE", "UNITS", "SAMPLES", "SAMPLES/S", "PULLED", "PUSHED", "REFUSED", "LATE"]
    assert lines[0].split() == titles
    rows = [re.split(r"  +", line) for line in lines[1:101]]
    assert [row[0] for row in rows] == [f"worker {1 + number}" for number in (*range(91), *range(92, 100), 91)]
    assert {row[1] for row in rows} == {"hand"}
    assert all(re.fullmatch(r"computes, \d+\.\d s", row[2]) for row in rows[:99]), rows
    assert rows[99][2] == "gone"
    once = ["1", "4", f"{2 * BYTES} B", f"{BYTES} B", "0", "0"]
    speeds = [row.pop(5) for row in rows]
    assert all(int(speed.replace(",", "")) >= 0 for speed in speeds)
    assert speeds[90:] == ["0"] * 10
    assert rows[0][3:] == ["1", "4", f"{2 * BYTES} B", f"{2 * BYTES} B", "0", "1"]
    assert all(row[3:] == once for row in rows[1:90])
    assert rows[90][3:] == ["0", "0", f"{2 * BYTES} B", f"{BYTES} B", "1", "0"]
    assert all(row[3:] == ["0", "0", f"{BYTES} B", "0 B", "0", "0"] for row in rows[91:])
    everyone = re.split(r"  +", lines[101])
    assert everyone[:4] == ["all", "99 here, 1 gone", "90", "360"]
    assert everyone[5:] == [f"{191 * BYTES / 1e3:.1f} kB", f"{92 * BYTES / 1e3:.1f} kB", "1", "1"]
    # 191 jobs were cut, which are 31 epochs and 20 samples. Those of the bad answer and of the worker that is gone came
    # back, and nobody has asked since.
    assert lines[103] == (
        "queue: 99 work units out, 0 answered and not used yet; 12 samples up to the end of epoch 32 have not gone out"
    )
    assert lines[105] == "staleness: mean 44.5, largest 89, of 90 gradients"
    bar = "#" * 50
    assert lines[106:] == [f"  {f'{ten}-{ten + 9}':>5}  10  {bar}" for ten in range(0, 90, 10)]


def test_what_workers_do() -> None:
    """In a step of three jobs, two are answered. A fourth worker does not ask, and the third is silent for long."""
    served = Served(1, mt.ParameterServer("sync", unit_samples=3), hang_seconds=2.0)
    with trained(served, 4) as workers:
        jobs = [worker.pull() for worker in workers[:3]]
        for worker, job in zip(workers[:2], jobs, strict=False):
            worker.push(job, mean(job))
        published(lambda facts: [one["state"] for one in facts["workers"]] == ["waits", "waits", "computes", "joins"])
        facts = published(lambda facts: facts["workers"][2]["state"] in ("overdue", "gone"))
        # A worker that waits has got the samples of the one that is silent, and computes them.
        assert sorted(one["state"] for one in facts["workers"]) == ["computes", "joins", "overdue", "waits"]
        assert facts["queue"] == {"epoch": 0, "samples": 24, "left": 16, "out": 1, "answered": 2}
        assert (facts["joined"], facts["here"], facts["expected"]) == (4, 4, 0)
        taker = next(
            worker for worker, one in zip(workers, facts["workers"], strict=True) if one["state"] == "computes"
        )
        job = taker.hear("unit")
        taker.push(job, mean(job))


def test_the_run_is_over() -> None:
    """`mpitrain ps` says so while a worker still computes, and when the script continues."""
    served = Served(1, mt.ParameterServer("async"), hang_seconds=HANG_SECONDS)
    with trained(served, 2) as (slow, fast):
        late, job = slow.pull(), fast.pull()
        assert state_of(published(lambda facts: facts["here"] == 2)) == "trains"
        fast.push(job, mean(job))
        assert (
            state_of(published(lambda facts: facts["stage"] == "leaves")) == "its run is over; workers still hear of it"
        )
        fast.end()
        slow.push(late, mean(late))
    assert state_of({**read(os.getpid()), "seconds": 1000.0}) == "its run is over"


def test_the_run_is_not_over_while_servers_are_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails until then is one that the run needed; see launch.serving."""
    stages: list[str] = []
    monkeypatch.setattr(Shards, "gather_late", lambda *_: stages.append(read(os.getpid())["stage"]))
    served = Served(1, mt.ParameterServer("async"))
    with trained(served, 1) as (worker,):
        worker.push(job := worker.pull(), mean(job))
    assert stages == ["runs"]
    assert read(os.getpid())["stage"] == "over"


def state_of(facts: dict[str, Any]) -> str:
    return RunningJob("1", is_launched=True, is_served=True, served=facts).state([])


@pytest.mark.parametrize(
    ("joined", "here", "seconds", "state"),
    [
        (2, 2, 0.0, "waits for 1 of 3 workers"),
        (3, 2, 0.0, "trains"),
        (3, 0, 0.0, "waits for workers"),
        (3, 2, 60.0, "server in a hook or an update, since 60 s"),
    ],
)
def test_states(joined: int, here: int, seconds: float, state: str) -> None:
    facts = {"joined": joined, "here": here, "expected": 3, "seconds": seconds, "stage": "runs"}
    assert state_of(facts) == state


def test_most_workers_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_MOST_GONE", 1)
    served = Served(1, mt.ParameterServer("async", unit_samples=JOB))
    with hands(served, 3) as workers:
        job = workers[0].pull()
        for worker in workers[1:]:
            worker.say("bye")
        lines = lines_of(published(lambda facts: facts["here"] == 1 and facts["joined"] == 3))
        workers[0].push(job, mean(job))
        workers[0].end()
    served.end()
    assert [line.split()[0] for line in lines[1:4]] == ["worker", "worker", "all"]
    assert re.match(r"worker 1 .* computes, ", lines[1])
    assert re.match(r"worker 3 .* gone ", lines[2])
    assert re.match("all .* 1 here, 2 gone ", lines[3])
    assert lines[4] == "(1 more that are gone are only in the sum)"


def test_the_speed_is_that_of_the_last_looks() -> None:
    """Looks in between do not count, nor does the time before the first answer."""
    clock = 0.0
    link: Any = None
    rules: Any = SimpleNamespace(now=lambda: clock)
    registry = WorkerRegistry(link, WorkQueue(10), Asynchronous(WorkQueue(10), 1), rules)
    stats = WorkerStats("worker 1 on a", "a")
    registry.stats.workers.append(stats)
    shown = status.ServerStatus(registry, list)
    speeds = []
    for clock, samples in ((100.0, 0), (101.0, 30), (101.5, 40), (103.0, 60), (103.9, 600), (105.0, 600), (106.0, 600)):
        stats.samples = samples
        speeds.append(shown._speed(clock))
    assert speeds == [0, 30, 30, 20, 20, 120, 120]
    for clock in range(107, 127):
        stats.samples += 5
        speed = shown._speed(clock)
    assert speed == 5
    # Answers that come every five seconds have a speed. It falls when they end, to 0.
    for clock in range(127, 252):
        stats.samples += 25 * (clock % 5 == 2)
        speed = shown._speed(clock)
        assert clock < 227 or speed == 5
    speeds = [shown._speed(clock) for clock in range(252, 360)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[:2] == [5, 225 / 51]
    assert speeds[-1] == 0


def test_a_text_is_whole_or_damaged() -> None:
    """A reader never sees a part of a text, however often the server writes. What others have written is named."""
    page = ServedPage()
    path = f"/proc/self/fd/{page._file}"
    assert read_served(path) is None
    texts = [{"a": letter * length} for letter, length in (("x", 200_000), ("y", 5), ("z", 70_000))]
    page.write(texts[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                page.write(text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all(read_served(path) in texts for _ in range(300))
    finally:
        stop.set()
        writer.join()
    page.write(texts[2])
    os.pwrite(page._file, b"?", 50_000)
    with pytest.raises(ValueError, match="its text does not match its checksum"):
        read_served(path)
    assert read_served("/proc/self/fd/0") is None
    os.close(page._file)


@pytest.mark.parametrize(
    ("counts", "lines"),
    [
        ({}, ["staleness: no gradient has made an update yet"]),
        ({0: 7}, ["staleness: mean 0.0, largest 0, of 7 gradients", f"  0  7  {'#' * 50}"]),
        (
            {0: 1, 2: 1000, 11: 0},
            [
                "staleness: mean 2.0, largest 11, of 1,001 gradients",
                "   0      1  #",
                "   1      0",
                f"   2  1,000  {'#' * 50}",
                *(f"  {value:2}      0" for value in range(3, 12)),
            ],
        ),
        # One value that is far out has no range of its own.
        (
            {**dict.fromkeys(range(200), 5), 5_000: 3},
            [
                "staleness: mean 114.2, largest 5000, of 1,003 gradients",
                *(f"  {f'{begin}-{begin + 19}':>12}  100  {'#' * 50}" for begin in range(0, 200, 20)),
                "  200 and more    3  ##",
            ],
        ),
    ],
)
def test_a_histogram(counts: dict[int, int], lines: list[str]) -> None:
    assert histogram(counts) == lines
