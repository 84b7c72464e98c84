"""A trace of a whole job: one file in the Trace Event Format, on one time axis."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from jobs import NO_STALLS, REPOSITORY, mpiexec, run_command, run_job
from mpitrain.job.trace import Clock, document, moved
from mpitrain.watching.activity import Span, Spans

# Three buckets a step.
TRAINING = """
import numpy
import mpitrain as mt

world = mt.init()
sizes = {"a": 40000, "b": 30000, "c": 20000}
reducer = mt.GradientReducer(
    world, [mt.Parameter(name, (size,), numpy.dtype("float32")) for name, size in sizes.items()], bucket_bytes=80000
)
for step in range(20):
    reducer.begin(1)
    for index in (2, 1, 0):
        reducer.ready(index, numpy.full_like(reducer.gradients[index], index))
    reducer.finish()
world.mean(1.0)
"""


@pytest.mark.parametrize("ranks", [pytest.param(None, marks=pytest.mark.nightly), 3])
def test_a_trace_of_a_job(tmp_path: Path, ranks: int | None) -> None:
    job = run_job(ranks, TRAINING, env=NO_STALLS | {"MPITRAIN_TRACE": str(tmp_path / "new")})
    assert (job.code, job.stderr, job.left) == (0, "", []), job.output
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["trace.json"]
    trace = json.loads((tmp_path / "new/trace.json").read_text())
    check_format(trace)
    size = ranks or 1
    assert trace["otherData"]["spans_left_out_of_rank"] == [0] * size
    sums = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "wire":
            about = event["args"]
            sums[about["step"], about["bucket"], about["bytes"]].append(event)
    bucket_bytes = {number: size for _, number, size in sums}
    assert sum(bucket_bytes.values()) == 360000
    assert len(bucket_bytes) > 1
    assert set(sums) == {(step, *item) for step in range(1, 21) for item in bucket_bytes.items()}
    # No rank has a sum before every rank has begun it. (The clocks may be off by the error that the file tells.)
    error = 2 * max(trace["otherData"]["clock_error_us_of_rank"])
    for of_ranks in sums.values():
        assert sorted(event["pid"] for event in of_ranks) == list(range(size))
        assert max(event["ts"] for event in of_ranks) <= min(event["ts"] + event["dur"] for event in of_ranks) + error
    assert {event["name"] for event in trace["traceEvents"] if event.get("cat") == "wait"} >= {"exchange gradients"}


def check_format(trace: dict[str, Any]) -> None:
    """What the format asks of complete events ("X") and of names ("M"); and nothing overlaps within a row."""
    assert trace["displayTimeUnit"] == "ms"
    ends: dict[tuple[int, int], float] = defaultdict(float)
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X" and event["name"] and event["cat"] in ("compute", "wait", "wire")
        assert event["ts"] >= 0 and event["dur"] >= 0
    for event in sorted((event for event in trace["traceEvents"] if event["ph"] == "X"), key=lambda its: its["ts"]):
        row = event["pid"], event["tid"]
        assert ("thread_name", *row) in named
        assert event["ts"] >= ends[row] - 1e-3  # to a nanosecond: they are floats
        ends[row] = event["ts"] + event["dur"]


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text("import mpitrain as mt\nworld = mt.init()\nprint(world.sum(1))\n")
    command = [str(Path(mpiexec(1)[0]).with_name("python")), "-m", "mpitrain", "run", "-n", "2", "--trace", "here"]
    job = run_command([*command, str(script)], cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)})
    assert (job.code, job.left) == (0, []), job.output
    assert {event["pid"] for event in json.loads((tmp_path / "here/trace.json").read_text())["traceEvents"]} == {0, 1}


def test_a_directory_that_cannot_be() -> None:
    job = run_job(2, TRAINING, env={"MPITRAIN_TRACE": "/dev/null/trace"})
    assert job.code != 0
    assert "write a trace into /dev/null/trace: NotADirectoryError" in job.stderr


@pytest.mark.parametrize("ranks", [None, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_file_that_cannot_be_written_at_the_end_fails_the_job(tmp_path: Path, ranks: int | None) -> None:
    source = f"{TRAINING}\nimport shutil\nworld.is_root and shutil.rmtree({str(tmp_path / 'gone')!r})\n"
    job = run_job(ranks, source, env={"MPITRAIN_TRACE": str(tmp_path / "gone")})
    assert job.code != 0
    assert "FileNotFoundError" in job.stderr
    assert not job.left


def test_a_clock_that_runs_at_another_rate() -> None:
    """10 s behind at first, 10.5 s after 100 of its seconds: in the middle 10.25 s."""
    begin, end = Clock(1000.0, 10.0, 0.1), Clock(1100.0, 10.5, 0.1)
    span = moved(Span("wire", "x", 1050.0, 1100.0, {"step": 1}), begin, end)
    assert span == Span("wire", "x", 1060.25, 1110.5, {"step": 1})
    assert moved(span, begin, begin) == span._replace(begin=1070.25, end=1120.5)


def test_what_overlaps_gets_rows_of_its_own() -> None:
    times = [(0.0, 3.0), (1.0, 2.0), (2.0, 4.0), (3.0, 5.0)]
    spans = [Span("wire", str(number), begin, end, {}) for number, (begin, end) in enumerate(times)]
    trace = document(["lab1"], [(spans, 0, 0.0)])
    check_format(trace)
    assert {event["name"]: event["tid"] for event in trace["traceEvents"] if event["ph"] == "X"} == {
        "0": 200,
        "1": 201,
        "2": 201,
        "3": 200,
    }
    assert document(["lab1"], [([], 0, 0.0)])["traceEvents"]  # a rank that has done nothing


def test_spans_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.watching.activity.MOST_SPANS", 2)
    spans = Spans()
    for number in range(5):
        spans.add("wait", str(number), 0.0, 1.0)
    assert [span.name for span in spans.kept] == ["0", "1"]
    assert spans.num_left_out == 3
