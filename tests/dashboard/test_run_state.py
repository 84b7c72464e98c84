"""What the pages and Prometheus are told: states of runs, who waits for whom, curves for so many pixels."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from records_made import DOCUMENT

from jobs import REPOSITORY
from mpitrain.dashboard.index import IndexedRun
from mpitrain.dashboard.prometheus import FAMILIES, exposition
from mpitrain.dashboard.series import Curve, curve
from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.dashboard.summary import differences, ids_of, state_of, summary_of_job, summary_of_run
from mpitrain.dashboard.waits import who_waits

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
        (
            dataclasses.replace(DOCUMENT, end="left"),
            None,
            False,
            9.0,
            "lost",
            "another attempt was to continue with it",
        ),
        (OPEN, None, True, 1e6, "trains", "rank 0 is alive on nowhere"),
        (OPEN, None, False, 59.0, "trains", "the last row is 59 s old"),
        (OPEN, None, False, 7300.0, "lost", "the last row is 2 h old"),
        (None, None, False, 3.0, "trains", "the last row is 3 s old"),
        (None, None, False, 600.0, "unknown", "no run.json; the last row is 10 min old"),
        (OPEN, look(), False, 1e6, "trains", ""),
        (OPEN, look("restarts"), True, 0.0, "restarts", ""),
        (OPEN, look("waits"), True, 0.0, "waits", ""),
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
    ("step", "steps", "event", "why"),
    [
        (2932, 9000, STOP, "it was stopped by ada on a after step 2,932 of 9,000"),
        (2932, 9000, None, "it ended after step 2,932 of 9,000"),
        (2940, 9000, STOP, "it ended after step 2,940 of 9,000"),
        (9000, 9000, STOP, "all steps were made"),
        (2932, 0, STOP, "it was stopped by ada on a after step 2,932"),
        (2932, 0, None, "it ended after step 2,932"),
    ],
)
def test_a_run_that_was_stopped_has_not_made_all_steps(step: float, steps: int, event: Any, why: str) -> None:
    document = dataclasses.replace(DOCUMENT, steps=steps)
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


def test_the_grid_shows_waits_that_are_short() -> None:
    """A rank publishes a wait after 0.1 s. In a step of 0.1 s, only the sum of all waits tells who waits for whom."""

    def at(seconds: float, waited: tuple[float, ...], phases: tuple[str, ...]) -> dict[str, Any]:
        both = enumerate(zip(phases, waited, strict=True))
        ranks = [{"rank": number, "phase": phase, "waited": sum_, "step": 7} for number, (phase, sum_) in both]
        return {"at": seconds, "job": "1a2b3c4d", "ids": ["1a2b3c4d"], "ranks": ranks}

    job = ShownJob(at(100.0, (0.0, 0.0, 0.0), ("computes",) * 3), 0.0)
    job.take(at(101.0, (0.0, 0.0, 0.0), ("computes",) * 3))
    job.take(at(102.0, (0.83, 0.02, 0.6), ("computes", "computes", "stopped")))
    job.take(at(103.0, (1.2, 0.02, 0.6), ("computes", "wire", "stopped")))
    assert [phases for _, phases in job.history] == [
        ["computes", "computes", "computes"],
        ["waits", "computes", "stopped"],
        ["computes", "wire", "stopped"],
    ]
    assert job.look["column"] == job.history[-1][1]


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
        {"name": "--lr", "values": ["0.1", "0.2"]},
        {"name": "commit", "values": ["0123abcd", "0123abcd and changes"]},
        {"name": "ranks", "values": ["3", "2"]},
        {"name": "hosts", "values": ["a: 2, b: 1", "a: 2"]},
        {"name": "setting algorithm", "values": [None, "ring"]},
        {"name": "package torch", "values": [None, "2.13"]},
    ]
    assert differences([DOCUMENT, DOCUMENT]) == differences([]) == differences([None]) == []
    assert {"name": "script", "values": ["train.py", None]} in differences([DOCUMENT, None])
    # Where each run writes says nothing, and hosts with a rank each need no numbers.
    here, there = (
        dataclasses.replace(DOCUMENT, arguments=["--run", f"runs/{name}"], hosts={name: [0], "c": [1]}, strategy=name)
        for name in ("a", "b")
    )
    places = {"name": "--run", "values": ["runs/a", "runs/b"]}
    assert places in differences([here, there])
    others = differences([here, there], ["/x/a", "/x/y"])
    assert places in others and {"name": "hosts", "values": ["a, c", "b, c"]} in others
    assert places not in differences([here, there], ["/x/a", "/x/b"])


def rank(number: int, phase: str, calls: int, call: str = "", since: float = 5.0, still: float = 5.0) -> dict[str, Any]:
    return {
        "rank": number,
        "host": "ab"[number // 2],
        "phase": phase,
        "calls": calls,
        "call": call,
        "since": since,
        "still": still,
    }


def test_a_rank_that_has_not_entered_the_call() -> None:
    ranks = [rank(number, "waits", 7, "allreduce of w", since=10.0 + number) for number in (0, 1, 3)]
    found = who_waits({"ranks": [*ranks, rank(2, "computes", 6, since=30.0, still=0.0)]})
    assert found == {
        "text": "Ranks 0,1,3 wait in allreduce of w (call 7), for 13 s. Rank 2 has not entered it.",
        "rows": [
            {"ranks": "2", "hosts": ["b"], "does": "computes, after call 6", "seconds": 30.0, "is_awaited": True},
            {
                "ranks": "0,1,3",
                "hosts": ["a", "b"],
                "does": "waits in allreduce of w (call 7)",
                "seconds": 13.0,
                "is_awaited": False,
            },
        ],
    }


@pytest.mark.parametrize(
    ("others", "text", "does"),
    [
        ([rank(1, "waits", 7, "sum")], "All ranks have entered it.", ["waits in sum (call 7)"]),
        ([rank(1, "computes", 7)], "All ranks have entered it.", ["waits in sum (call 7)"]),
        (
            [rank(1, "stopped", 7, "sum"), rank(2, "disk", 7)],
            "Ranks 1,2 have entered it, but do not continue.",
            ["stopped, after call 7: sum", "disk, after call 7", "waits in sum (call 7)"],
        ),
        (
            [rank(1, "starts", 0), rank(2, "starts", 0), rank(3, "done", 6)],
            "Ranks 1-3 have not entered it.",
            ["starts", "done, after call 6", "waits in sum (call 7)"],
        ),
        (
            [rank(1, "waits", 6, "broadcast"), rank(2, "waits", 6, "broadcast", still=0.5)],
            "Ranks 1,2 wait in an earlier call.",
            ["waits in broadcast (call 6)", "waits in sum (call 7)"],
        ),
        (
            [rank(1, "waits", 6, "sum", since=0.5, still=0.5)],  # it has just begun to wait
            "Rank 1 waits in an earlier call.",
            ["waits in sum (call 6)", "waits in sum (call 7)"],
        ),
        (
            [rank(1, "lost", 3), rank(2, "busy", 7, "a checkpoint")],
            "Rank 2 has entered it, but does not continue.",
            ["busy, after call 7: a checkpoint", "waits in sum (call 7)"],
        ),
    ],
)
def test_what_the_others_do(others: list[dict[str, Any]], text: str, does: list[str]) -> None:
    found = who_waits({"ranks": [rank(0, "waits", 7, "sum"), *others]})
    assert found is not None
    assert found["text"].endswith(f" wait in sum (call 7), for 5 s. {text}") or found["text"] == (
        f"Rank 0 waits in sum (call 7), for 5 s. {text}"
    )
    assert [row["does"] for row in found["rows"]] == does


def test_nobody_waits_for_long() -> None:
    assert who_waits({"ranks": []}) is None
    assert who_waits({"ranks": [rank(0, "waits", 7, "sum", still=0.9), rank(1, "computes", 6)]}) is None
    assert who_waits({"ranks": [rank(0, "wire", 7, "sum"), rank(1, "computes", 6)]}) is None
    older = [{key: value for key, value in rank(0, "waits", 7, "sum").items() if key != "calls"}]
    assert who_waits({"ranks": older}) is None, "a launcher that does not tell the calls"


def curve_of(steps: numpy.ndarray, values: numpy.ndarray, first: float, last: float, pixels: int) -> Curve:
    """The curve of points in pieces, which must not depend on the pieces."""
    curves = []
    for size in (max(1, len(steps)), 64, 7):
        pieces = [(steps[i : i + size], values[i : i + size]) for i in range(0, len(steps), size)]
        curves.append(curve(lambda pieces=pieces: pieces, first, last, pixels))  # type: ignore[misc]
    for other in curves[1:]:
        assert (other.steps.tolist(), str(other.values.tolist())) == (
            curves[0].steps.tolist(),
            str(curves[0].values.tolist()),
        )
        assert (other.num_points, other.is_exact) == (curves[0].num_points, curves[0].is_exact)
        assert (other.num_not_finite, other.first_not_finite) == (curves[0].num_not_finite, curves[0].first_not_finite)
    return curves[0]


def test_memory_is_taken_for_a_piece_at_a_time() -> None:
    """A page asks for its curves again and again, and a long run has a million rows: 16 MB of each metric."""

    def pieces() -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
        for number in range(100):
            steps = numpy.arange(4096.0) + 4096 * number
            yield steps, numpy.sqrt(steps)

    tracemalloc.start()
    try:
        shown = curve(pieces, -math.inf, math.inf, 500)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000  # all points have 6.5 MB
    finally:
        tracemalloc.stop()
    assert shown.num_points == 409_600


def columns_of(steps: numpy.ndarray, first: float, last: float, pixels: int) -> list[int]:
    """The column of each step in exact integer arithmetic; steps are whole numbers here."""
    low, high = int(first), int(last)
    return [(int(step) - low) * pixels // (high - low) for step in steps]


@pytest.mark.parametrize("pixels", [1, 7, 100])
@pytest.mark.parametrize("odd", [0, 1, 50])
def test_extremes_are_exact(pixels: int, odd: int) -> None:
    rng = numpy.random.default_rng(pixels + odd)
    steps = numpy.cumsum(rng.integers(1, 5, 3000)).astype(float)
    values = rng.standard_normal(3000)
    values[rng.choice(3000, odd, replace=False)] = rng.choice([math.nan, math.inf, -math.inf], odd)
    shown = curve_of(steps, values, -math.inf, math.inf, pixels)
    assert not shown.is_exact
    assert (shown.num_points, shown.num_not_finite) == (3000, odd)
    odd_steps = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    assert shown.first_not_finite == (odd_steps[0] if odd_steps else None)
    assert len(shown.steps) <= 3 * (pixels + 1) + 2
    assert (numpy.diff(shown.steps) > 0).all()
    assert (shown.steps[0], shown.steps[-1]) == (steps[0], steps[-1])
    of_step = dict(zip(steps, values, strict=True))
    for step, value in zip(shown.steps, shown.values, strict=True):
        assert value == of_step[step] or (math.isnan(value) and math.isnan(of_step[step]))
    expected: dict[int, list[float]] = {}
    columns = columns_of(steps, steps[0], steps[-1], pixels)
    for column, value in zip(columns, values, strict=True):
        expected.setdefault(column, []).append(value)
    found: dict[int, list[float]] = {}
    for column, value in zip(columns_of(shown.steps, steps[0], steps[-1], pixels), shown.values, strict=True):
        found.setdefault(column, []).append(value)
    assert found.keys() == expected.keys()
    for column, all_values in expected.items():
        finite, shown_finite = ([v for v in some if math.isfinite(v)] for some in (all_values, found[column]))
        assert (min(shown_finite, default=None), max(shown_finite, default=None)) == (
            min(finite, default=None),
            max(finite, default=None),
        )
        assert any(not math.isfinite(v) for v in found[column]) == any(not math.isfinite(v) for v in all_values)


@pytest.mark.parametrize(
    ("first", "last"), [(-5, 2000), (100, 150), (100, 100), (101.5, 101.7), (990, 5000), (5000, 6000)]
)
def test_a_zoom_is_exact_and_the_line_goes_on(first: float, last: float) -> None:
    steps, values = numpy.arange(1.0, 1001.0), numpy.sqrt(numpy.arange(1.0, 1001.0))
    shown = curve_of(steps, values, first, last, 600)
    inside = [step for step in range(1, 1001) if first <= step <= last]
    before = [max((step for step in range(1, 1001) if step < first), default=0)]
    behind = [min((step for step in range(1, 1001) if step > last), default=0)]
    assert shown.is_exact
    assert shown.num_points == len(inside)
    assert shown.steps.tolist() == [step for step in (*before, *inside, *behind) if step]
    assert shown.values.tolist() == [math.sqrt(step) for step in shown.steps]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_points(count: int) -> None:
    steps = numpy.arange(1.0, count + 1.0)
    shown = curve_of(steps, steps, -math.inf, math.inf, 1)
    assert (shown.steps.tolist(), shown.is_exact, shown.first_not_finite) == (steps.tolist(), True, None)


RANK: dict[str, Any] = {"rank": 0, "host": "lab1", "phase": "computes", "since": 0.5, "step": 7}

LOOK: dict[str, Any] = {
    "ids": ["1a2b", "3c4d"],
    "job": "3c4d",
    "script": 'a "quoted"\\name\nof two lines.py',
    "state": "trains",
    "since": 1.5e9,
    "tries": 2,
    "hosts": {"lab1": {"silence": 0.25, "ranks": [0, 1]}},
    "ranks": [RANK, {**RANK, "rank": 1, "phase": "waits", "step": 6, "since": 3}],
    "metrics": {"loss": 0.125, "samples/s": "Infinity", "odd": "NaN"},
}

# A sample, by the grammar of the text format 0.0.4.
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)')
UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def samples_of(text: str) -> list[tuple[str, dict[str, str], float]]:
    """What a reader makes of the text, with its own rules of escaping."""
    samples = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2])
        labels = {name: re.sub(r"\\.", lambda part: UNESCAPED[part[0]], value) for name, value in pairs}
        samples.append((match[1], labels, float(match[3].replace("Inf", "inf"))))
    return samples


def test_what_is_told_of_a_job() -> None:
    text = exposition([ShownJob(LOOK, time.monotonic())])
    found = {(name, *labels.values()): value for name, labels, value in samples_of(text)}
    assert str(found.pop(("mpitrain_job_metric", "1a2b", "odd"))) == "nan"
    assert found == {
        ("mpitrain_job_info", "1a2b", LOOK["script"], "trains"): 1,
        ("mpitrain_job_start_time_seconds", "1a2b"): 1.5e9,
        ("mpitrain_job_tries", "1a2b"): 2,
        ("mpitrain_job_ranks", "1a2b", "computes"): 1,
        ("mpitrain_job_ranks", "1a2b", "waits"): 1,
        ("mpitrain_job_step", "1a2b"): 7,
        ("mpitrain_job_metric", "1a2b", "loss"): 0.125,
        ("mpitrain_job_metric", "1a2b", "samples/s"): float("inf"),
        ("mpitrain_host_silence_seconds", "1a2b", "lab1"): 0.25,
        ("mpitrain_rank_step", "1a2b", "0", "lab1"): 7,
        ("mpitrain_rank_step", "1a2b", "1", "lab1"): 6,
        ("mpitrain_rank_phase_seconds", "1a2b", "0", "lab1", "computes"): 0.5,
        ("mpitrain_rank_phase_seconds", "1a2b", "1", "lab1", "waits"): 3,
    }


def test_each_family_is_together_and_described_once() -> None:
    jobs = [ShownJob({**LOOK, "ids": [token]}, time.monotonic()) for token in ("a", "b")]
    lines = exposition(jobs).splitlines()
    described = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert described == list(FAMILIES) == [line.split()[2] for line in lines if line.startswith("# HELP")]
    order = list(
        dict.fromkeys(re.split(r"[ {]", line.removeprefix("# TYPE "))[0] for line in lines if "# HELP" not in line)
    )
    assert order == described
    assert exposition([]) == ""


def test_grafana_asks_for_what_there_is() -> None:
    document = json.loads((REPOSITORY / "docs/grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    expressions += [one["query"]["query"] for one in document["templating"]["list"] if one["type"] == "query"]
    names = {name for text in expressions for name in re.findall(r"mpitrain_\w+", text)}
    assert names <= FAMILIES.keys() and len(names) >= 6
    labels = {label for text in expressions for label in re.findall(r"(\w+)=~?\"", text)}
    labels |= {
        label
        for panel in document["panels"]
        for target in panel["targets"]
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    }
    assert labels <= {"job_id", "name", "phase", "rank", "host"}
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
