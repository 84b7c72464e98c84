"""Is it going well: the best value, the time left, the machines of a step, and the run before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from records_made import make_record

from mpitrain.dashboard.index import RunIndex
from mpitrain.dashboard.machines import machines_of
from mpitrain.dashboard.record_reader import run_id
from mpitrain.dashboard.run_notes import read_notes
from mpitrain.dashboard.series import means
from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.dashboard.summary import arguments_of, summary_of_job, summary_of_run
from mpitrain.dashboard.versus import is_higher_better, main_metric
from serving import Dashboard, dashboard


def test_arguments_become_a_table() -> None:
    words = ["data", "--lr", "-0.5", "--fast", "--name=a=b", "-v", "x", "y", "--lr", "2"]
    found = {"argument 1": "data", "--lr": "2", "--fast": "on", "--name": "a=b", "-v": "x y"}
    assert arguments_of(words) == found
    assert arguments_of([]) == {}


@pytest.mark.parametrize(
    ("names", "main"),
    [
        (["loss", "samples_per_second", "test loss", "test accuracy"], "test accuracy"),
        (["loss", "val_loss", "accuracy"], "val_loss"),
        (["loss", "accuracy"], "accuracy"),
        (["loss", "learning_rate"], "loss"),
        (["test samples_per_second", "latest"], ""),
    ],
)
def test_by_which_metric_a_run_is_judged(names: list[str], main: str) -> None:
    assert main_metric(names) == main


def test_which_metrics_are_better_when_higher() -> None:
    higher = ("accuracy", "test accuracy", "val_f1", "eval/BLEU", "samples_per_second")
    assert [is_higher_better(name) for name in (*higher, "loss", "accuracy loss", "score_gap")] == [True] * 5 + [
        False
    ] * 3


def test_the_best_value_and_the_time_left(tmp_path: Path) -> None:
    """Rows come by and by; NaN and infinity are never the best. The time left is by the mean of all steps."""
    index = RunIndex(tmp_path / "index.sqlite")
    rows: list[dict[str, Any]] = [
        {"step": 1, "loss": 3.0, "test accuracy": 0.5},
        {"step": 2, "loss": "NaN", "test accuracy": 0.75},
        {"step": 3, "loss": 1.0, "test accuracy": "Infinity"},
    ]
    folder = make_record(tmp_path / "run", rows, end="", ended=None, steps=9, after_step=0, started=1000.0)
    index.update(folder)
    run = index.run(run_id(folder))
    assert run is not None and run.extremes == {"loss": [1.0, 3.0, 3.0, 1.0], "test accuracy": [0.5, 1.0, 0.75, 2.0]}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss": 0.5, "test accuracy": 0.75}) + "\n")
    index.update(folder)
    run = index.run(run_id(folder))
    assert run is not None and run.extremes["loss"] == [0.5, 4.0, 3.0, 1.0]
    summary = summary_of_run(run, None)
    assert summary["best"] == {"name": "test accuracy", "value": 0.75, "step": 2.0}
    assert summary["bests"] == {"loss": 0.5, "test accuracy": 0.75}
    assert summary["state"] == "trains" and summary["left"] == pytest.approx((run.changed - 1000.0) / 4 * 5)
    # Of a running job, what its ranks say: they leave pauses out.
    ranks = [{"rank": number, "phase": "computes", "step": 4, "left": left} for number, left in enumerate((None, 7.5))]
    job = ShownJob({"ids": [""], "state": "trains", "ranks": ranks, "hosts": {}, "record": run.folder}, 0.0)
    assert summary_of_run(run, job)["left"] == 7.5
    index.close()


def test_the_curve_of_a_list(tmp_path: Path) -> None:
    """At most 32 means of as many rows each, however the rows come; of the loss, or else the first metric."""
    index = RunIndex(tmp_path / "index.sqlite")
    folder = make_record(tmp_path / "run", [{"step": 1, "speed": 7.0}])

    def thinned() -> list[float]:
        index.update(folder)
        run = index.run(run_id(folder))
        assert run is not None and summary_of_run(run, None)["curve"] == [
            float(f"{value:.3g}") for value in run.thinned
        ]
        return run.thinned

    assert thinned() == [7.0]
    for first, last in ((1, 3), (4, 20), (21, 80)):
        rows = [{"step": 2 * value, "loss": float(value)} for value in range(first, last + 1)]
        with (folder / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 2 * last + 1, "loss": "NaN"}]))
        found = thinned()
    assert found == [4 * group + 2.5 for group in range(20)]
    index.close()


def test_means_of_columns() -> None:
    """Ten points in two columns, over pieces; what is not finite does not count."""
    steps, values = numpy.arange(1.0, 11.0), numpy.array([1.0, 2, 3, numpy.nan, 5, 10, 20, 30, numpy.inf, 50])
    found = means(lambda: [(steps[:7], values[:7]), (steps[7:], values[7:])], 1, 10, 2)
    assert found.steps.tolist() == [11 / 4, 31 / 4] and found.values.tolist() == [11 / 4, 110 / 4]
    assert means(lambda: [(steps, values)], 20, 30, 5).values.tolist() == []
    assert means(lambda: [(steps[:1], values[:1])], 0, 30, 5).values.tolist() == [1.0]


def look(at: float, *ranks: tuple[str, int, float, str]) -> dict[str, Any]:
    """A look at ranks of (host, step, seconds waited, phase)."""
    entries = [
        {"rank": rank, "host": host, "step": step, "waited": waited, "phase": phase}
        for rank, (host, step, waited, phase) in enumerate(ranks)
    ]
    return {"job": "j", "at": at, "hosts": {entry["host"]: {} for entry in entries}, "ranks": entries}


def test_what_machines_do_in_a_step() -> None:
    """In 10 s, 20 steps: of each 0.5 s, rank 2 waits 0.1 s, which is the exchange, and the others 0.4 s."""
    first = look(100, ("a", 10, 5, "waits"), ("a", 10, 5, "waits"), ("b", 10, 1, "computes"), ("c", 10, 3, "waits"))
    last = look(110, ("a", 30, 13, "waits"), ("a", 30, 12, "computes"), ("b", 30, 3, "computes"), ("c", 29, 11, "lost"))
    rows = machines_of([first, last])
    assert [(row["name"], row["step"], row["does"], row["isOdd"]) for row in rows] == [
        ("c", 29, "lost", True),
        ("b", 30, "computes", False),
        ("a", 30, "1 waits, 1 computes", False),
    ]
    times = [(row["computes"], row["waits"], row["exchanges"]) for row in rows]
    assert times[1:] == [pytest.approx((0.4, 0.0, 0.1)), pytest.approx((0.15, 0.25, 0.1))]
    assert [row["computes"] for row in machines_of([last])] == [None] * 3, "one look has no time"
    alone = machines_of(
        [look(0, ("a", 1, 0, "waits"), ("a", 1, 0, "busy")), look(4, ("a", 3, 3, "waits"), ("a", 3, 1, "busy"))]
    )
    assert [row["name"] for row in alone] == ["rank 1", "rank 0"], "one host: its ranks"
    assert machines_of([]) == []
    paused = [look(at, ("a", 3, 1, "paused"), ("b", 3, 1, "busy"), ("c", 3, 1, "disk")) for at in (0, 4)]
    assert [(row["does"], row["isOdd"]) for row in machines_of(paused)] == [
        ("disk", True),
        ("paused", False),
        ("busy", False),
    ]


def test_the_list_names_a_slow_rank() -> None:
    ranks = [[("a", step, waited, "computes"), ("b", step, 0.0, "computes")] for step, waited in ((10, 0.0), (20, 4.0))]
    looks = [{**look(at, *of), "ids": ["j"]} for at, of in zip((100, 105), ranks, strict=True)]
    job = ShownJob(looks[0], 0.0)
    for one in looks:
        job.take(one)
    assert summary_of_job(job)["slow"] == "rank 1 on b is 5.0x slower: rank 0 waits for it, 80% of the time"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    folder = tmp_path_factory.mktemp("runs")
    for place, (name, better) in enumerate([("old", 0.0), ("other", 0.3), ("new", 0.1)]):
        rows = [
            {"step": step, "samples": 10 * step, "seconds": step / (1 + place)}
            | ({"test accuracy": step / 1000 + better} if step % 100 == 0 else {})
            for step in range(50, 550 - 100 * place, 50)
        ]
        script = "other.py" if name == "other" else "train.py"
        make_record(
            folder / name,
            rows,
            script=script,
            arguments=["--lr", f"0.{place}", "--out", name],
            first_started=1000.0 + place,
        )
    with dashboard(tmp_path_factory.mktemp("cache"), str(folder)) as made:
        made.wait_for("/api/runs", lambda answer: len(made.records(answer)) == 3)
        yield made


def path_of(served: Dashboard, name: str) -> str:
    return f"/api/runs/{run_id(served.root / name)}"


def test_a_run_against_the_one_before(served: Dashboard) -> None:
    """That of the same script, at the step that both have reached. Where each of them writes is left out."""
    found = served.get(path_of(served, "new") + "/before")
    assert (found["name"], found["metric"], found["step"], found["isHigherBetter"]) == (
        "old",
        "test accuracy",
        300,
        True,
    )
    assert (found["now"], found["before"]) == pytest.approx((0.4, 0.3))
    assert found["speeds"] == [30.0, 10.0]
    assert found["differences"] == [{"name": "--lr", "values": ["0.0", "0.2"]}]
    assert served.get(path_of(served, "old") + "/before") is None


def test_all_rows_as_csv(served: Dashboard) -> None:
    status, headers, text = served.ask(path_of(served, "new") + "/rows.csv")
    assert status == 200 and headers["content-type"].startswith("text/csv")
    lines = text.splitlines()
    assert lines[0] == "step,samples,seconds,test accuracy" and len(lines) == 7
    assert lines[1:3] == ["50,500.0,16.666666666666668,", "100,1000.0,33.333333333333336,0.2"]


def test_notes_of_a_run(served: Dashboard) -> None:
    """Operators write them beside the record; the list has them at once. What is no note is refused."""
    path = path_of(served, "other") + "/notes"
    body = json.dumps({"name": "the other", "note": "too fast", "tags": ["odd", "lr"], "is_hidden": True})
    assert served.ask(path, method="POST", body=body)[0] == 403
    status, _, text = served.ask(path, served.operator, "POST", body=body)
    assert (status, text) == (200, '{"accepted": "noted"}')
    notes = read_notes(served.root / "other")
    assert (notes.name, notes.note, notes.tags, notes.is_hidden) == ("the other", "too fast", ["odd", "lr"], True)
    (found,) = [run for run in served.records(served.get("/api/runs")) if run["isHidden"]]
    assert (found["name"], found["note"], found["tags"]) == ("the other", "too fast", ["odd", "lr"])
    for wrong in ("{", '{"name": 1}', '{"colour": "red"}', json.dumps({"tags": ["x"] * 21})):
        status, _, text = served.ask(path, served.operator, "POST", body=wrong)
        assert status == 400 and text.startswith("the request"), text
    (served.root / "other/notes.json").write_text("[")
    served.wait_for(
        path.removesuffix("/notes"), lambda answer: any("notes.json" in one for one in answer["run"]["problems"])
    )
    assert served.get(path_of(served, "other"))["run"]["name"] == "other"
