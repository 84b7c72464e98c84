"""`mpitrain plot`: a picture of what was recorded."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mpitrain import RunEvent
from mpitrain.cli import main

ROWS = [
    {
        "step": step,
        "loss": 2.0 / step,
        "samples_per_second": 1000.0 + step,
        "communication_share": 0.25,
        **({"validation loss": 2.5 / step, "accuracy": 0.5} if step % 40 == 0 else {}),
    }
    for step in range(10, 200, 10)
]


def record(directory: Path, rows: list[dict[str, Any]], end: str = "") -> Path:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return directory


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Draws the rows, and returns the panels of the picture; `file`: it is written, which takes a second."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig

    def draw(rows: list[dict[str, Any]], end: str = "", *, file: bool = False) -> list[Any]:
        def saved(figure: Any, *arguments: Any, **options: Any) -> None:
            figures.append(figure)
            if file:
                save(figure, *arguments, **options)

        monkeypatch.setattr(Figure, "savefig", saved)
        assert main(["plot", str(record(tmp_path, rows, end))]) == 0
        return list(figures[-1].axes)

    return draw


def rows_of(count: int, **fields: Any) -> list[dict[str, Any]]:
    usual = {"loss": 1.0, "samples_per_second": 5.0, "communication_share": 0.5}
    return [{"step": step, **usual, **fields} for step in range(1, count + 1)]


def at(axes: Any, begin: int = 1) -> list[list[float]]:
    """Where the lines of a panel are, without the first ones, which are curves."""
    return [list(line.get_xdata()) for line in axes.lines[begin:]]


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_picture(drawn: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses, speeds, shares, accuracies = drawn(ROWS, '{"step": 200, "lo', file=True)
    picture = tmp_path / "metrics.png"
    assert capsys.readouterr().out == f"{picture}: 19 rows, steps 10 to 190\n"
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (990, 1320)
    lines = {line.get_label(): [list(its) for its in line.get_data()] for line in losses.lines}
    steps = [row["step"] for row in ROWS]
    assert lines["loss"] == [steps, [row["loss"] for row in ROWS]]
    assert lines["validation loss"] == [[40, 80, 120, 160], [2.5 / step for step in (40, 80, 120, 160)]]
    assert list(lines) == ["loss", "validation loss"]
    assert list(speeds.lines[0].get_ydata()) == [1000.0 + step for step in steps]
    assert accuracies.get_ylabel() == "accuracy"
    assert [list(line.get_ydata()) for line in accuracies.lines] == [[0.5] * 4]
    legend = losses.get_legend()
    assert legend.get_window_extent().y0 >= losses.get_window_extent().y1  # no curve is there
    assert (speeds.get_ylabel(), list(shares.lines[0].get_ydata())) == ("samples/s", [0.25] * 19)


def test_other_records(drawn: Any) -> None:
    """One row; tokens; without the exchange; losses that are no numbers. And of a run with a server."""
    losses, speeds, shares = drawn([{"step": 1, "loss": "NaN", "tokens_per_second": 5.0}])
    assert (len(losses.lines), speeds.get_ylabel(), len(shares.lines)) == (1, "tokens/s", 0)
    assert texts(shares) == ["not recorded"]
    rows = rows_of(8, waiting_share=0.25, workers=3.0, staleness=1.5)
    for row in rows:
        del row["communication_share"]
    panels = {axes.get_ylabel(): axes for axes in drawn(rows)}
    assert panels.keys() == {"loss", "samples/s", "waiting for a job", "workers", "staleness"}
    waits = panels["waiting for a job"]
    assert (list(waits.lines[0].get_ydata()), waits.get_ylim()) == ([0.25] * 8, (0, 1))


def test_every_metric_and_where_it_resumed(drawn: Any) -> None:
    """Metrics of one kind share a panel; more than four panels are in two columns."""
    rows = [
        {"step": step, "epoch": 1, "samples": 2 * step, "seconds": 0.1, "loss": 1.0, "test loss": 2.0}
        | {"learning_rate": 0.1, "accuracy": 0.5, "test accuracy": 0.25, "test bleu": 7.0}
        | ({"resumed_after": step - 1} if step in (2, 5) else {})
        for step in range(1, 7)
    ]
    panels = {axes.get_ylabel(): axes for axes in drawn(rows)}
    assert set(panels) == {"loss", "samples/s", "waiting for the exchange", "learning rate", "accuracy", "test bleu"}
    assert all(at(axes, -2) == [[1, 1], [4, 4]] for axes in panels.values())
    assert texts(panels["samples/s"]) == ["not recorded"]
    labels = [line.get_label() for line in panels["accuracy"].lines[:-1]]
    assert labels == ["accuracy", "test accuracy", "resumed"]


def test_where_it_went_on_after_faults(drawn: Any) -> None:
    rows = rows_of(8)
    faults = [(3, "ranks", "rank 2 was lost"), (4, "ranks", "rank 0 was lost"), (5, "memory", "b fell silent")]
    for step, source, text in faults:
        rows[step]["events"] = [RunEvent(step, text, source, (), 2, seconds=0.25).plain()]  # type: ignore[arg-type]
    losses, speeds, _ = drawn(rows)
    assert at(losses) == at(speeds) == [[3, 3], [4, 4], [5, 5]]
    labels = [text.get_text() for text in losses.get_legend().get_texts()]
    assert labels == ["loss", "continued, from ranks: 2", "continued, from memory: 1"]
    assert texts(losses) == [f" {text}, 0.25 s" for _, _, text in faults]
    assert not speeds.texts


@pytest.mark.parametrize(
    ("counts", "expected", "labels"),
    [([0, 1, 1, 3, 0, 0, 2], [[2, 2], [4, 4], [7, 7]], ["outer steps: 3"]), (range(60), [], [])],
)
def test_outer_steps_of_rounds(counts: Sequence[int], expected: list[list[int]], labels: list[str], drawn: Any) -> None:
    """A line where the number has changed; a run that resumed counts anew. Too many lines are left out."""
    rows = rows_of(len(counts))
    for row, count in zip(rows, counts, strict=True):
        row["outer_steps"] = count
    panels = drawn(rows)
    assert [at(axes) for axes in panels] == [expected] * 3
    assert [line.get_label() for line in panels[0].lines[1:2]] == labels


def test_every_event_and_records_of_other_versions(drawn: Any) -> None:
    sources = ("ranks", "memory", "disk", "told", "auto", "of a newer one", 7)
    rows: list[dict[str, Any]] = [
        {"step": number, "loss": 1e300 * number, "a $x_{ $": 1.0, "\ud800": "NaN", "_hidden": 1, "newer": {"a": [1]}}
        for number in range(1, 9)
    ]
    for row, source in zip(rows, sources, strict=False):
        event = {"after_step": row["step"], "text": "$x_{ $ \ud800", "source": source, "lost_ranks": [], "newer": 1}
        row["events"] = [{**event, "num_ranks": 1, "seconds": 1.0, **({"teller": "ada"} if source == "told" else {})}]
    rows[-1]["loss"] = None
    panels = drawn(rows, '{"step": 9, "events": [{"after', file=True)
    labels = [str(line.get_label()) for line in panels[0].lines]
    assert {"told: 1", "changed by itself: 1", "continued, from disk: 1", "event 'of a newer one': 1"} <= set(labels)
    assert len(panels[0].texts) == len(sources)
    assert "a \\$x { \\$" in [axes.get_ylabel() for axes in panels]


def test_many_events(drawn: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is a line in the picture; the last eight have their texts there, and all of them on stdout."""
    told = [RunEvent(step, f"order {step}", "told", (), 2, 0.0, teller="ada on a", at=1.0) for step in range(1, 13)]
    losses = drawn([{"step": event.after_step + 1, "loss": 1.0, "events": [event.plain()]} for event in told])[0]
    assert at(losses) == [[step, step] for step in range(1, 13)]
    assert texts(losses) == [f" order {step}" for step in range(5, 13)]
    assert losses.get_legend().get_texts()[1].get_text() == "told: 12"
    printed = capsys.readouterr().out
    assert all(f"after step {step}: order {step} (ada on a)\n" in printed for step in range(1, 13))


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compares runs of these folders, which lie in one, and returns the figure, which is a file too."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig

    def saved(figure: Any, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    def compare(rows: dict[str, list[dict[str, Any]]], *options: str) -> Any:
        for name, its in rows.items():
            (tmp_path / name).mkdir(parents=True)
            record(tmp_path / name, its)
        monkeypatch.setattr(Figure, "savefig", saved)
        monkeypatch.chdir(tmp_path)
        assert main(["plot", *rows, *options]) == 0
        return figures[-1]

    return compare


def test_several_runs(compared: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run has one colour in all panels, and a metric one style of line in its panel."""
    figure = compared({"runs/a": ROWS, "runs/b/1": ROWS[:5], "runs/b/2": rows_of(3)})
    assert capsys.readouterr().out == "compare.png: 3 runs, steps 1 to 190\n"
    assert (tmp_path / "compare.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    losses, speeds, _, accuracies = figure.axes
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b/1", "b/2"]
    colors = [line.get_color() for line in legend.get_lines()]
    assert len(set(colors)) == 3
    curves = [(line.get_color(), line.get_linestyle(), len(line.get_xdata())) for line in losses.lines[:5]]
    a, first, second = colors
    assert curves == [(a, "-", 19), (a, "--", 4), (first, "-", 5), (first, "--", 1), (second, "-", 3)]
    assert [text.get_text() for text in losses.get_legend().get_texts()] == ["loss", "validation loss"]
    assert [line.get_color() for line in speeds.lines] == colors
    assert [line.get_color() for line in accuracies.lines] == [a, first]
    assert accuracies.get_legend() is None


def test_twenty_runs_have_twenty_colours(compared: Any) -> None:
    figure = compared({f"run{number}": rows_of(2) for number in range(20)}, "--metric", "loss")
    assert len(figure.axes) == 1
    assert len({tuple(line.get_color()) for line in figure.axes[0].lines}) == 20


def test_an_evaluation_has_one_colour_in_all_panels(compared: Any) -> None:
    rows = [{"step": step, "loss": 1.0, "test loss": 2.0, "test accuracy": 0.5, "speed": 3.0} for step in (1, 2)]
    figure = compared({"a": rows})
    colors = {line.get_label(): line.get_color() for axes in figure.axes for line in axes.lines}
    assert colors["test loss"] == colors["test accuracy"] != colors["loss"] == colors["speed"]


def test_some_metrics_of_a_run_in_a_file_of_its_own(compared: Any, tmp_path: Path) -> None:
    options = ("--metric", "validation loss", "--metric", "accuracy", "-o", "chosen.svg")
    figure = compared({"a": ROWS}, *options)
    assert [axes.get_ylabel() for axes in figure.axes] == ["validation loss", "accuracy"]
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[2.5 / step for step in (40, 80, 120, 160)]]
    assert "<svg" in (tmp_path / "chosen.svg").read_text()
    assert not list(tmp_path.rglob("*.png"))


def test_what_cannot_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert f"there is no {tmp_path / 'metrics.jsonl'}; name the directory" in capsys.readouterr().err
    assert main(["plot", str(record(tmp_path, []))]) == 1
    assert "has no row yet" in capsys.readouterr().err
    assert main(["plot", str(record(tmp_path, [], "hello\n"))]) == 1
    assert "line 1 is not a row of a record" in capsys.readouterr().err
    record(tmp_path, ROWS)
    assert main(["plot", str(tmp_path), "--metric", "bleu"]) == 2
    assert "--metric 'bleu' is in no row; recorded are loss, samples_per_second, " in capsys.readouterr().err
    assert main(["plot", str(tmp_path), "-o", "a.bmp"]) == 2
    assert "-o a.bmp: allowed are files that end in .png, .svg, .pdf" in capsys.readouterr().err
    (tmp_path / "metrics.png").mkdir()
    assert main(["plot", str(tmp_path)]) == 1
    assert "cannot write" in capsys.readouterr().err
