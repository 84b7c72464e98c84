"""Records as mt.writers.JsonLines writes them, without a training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpitrain.training.run_document import RunDocument

DOCUMENT = RunDocument(
    job="1a2b3c4d",
    script="train.py",
    arguments=["--lr", "0.1"],
    folder="/home/a",
    hosts={"a": [0, 1], "b": [2]},
    strategy="Sync",
    settings={},
    python="3.11.7",
    packages={"numpy": "2.0.0"},
    commit="0123abcd",
    is_changed=False,
    process="nowhere 1 2",
    after_step=0,
    first_started=1000.0,
    started=1000.0,
    ended=1060.0,
    end="done",
)


def rows_made(first: int, last: int) -> list[dict[str, Any]]:
    """Rows for the steps from first to last; every third has a metric more."""
    return [
        {"step": step, "loss": 1.0 / step, "samples_per_second": 100.0 + step}
        | ({"test loss": 2.0 / step} if step % 3 == 0 else {})
        for step in range(first, last + 1)
    ]


def lines(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as the file has them."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_record(folder: Path, rows: Iterable[dict[str, Any]] = (), **changes: Any) -> Path:
    """Write a record. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(dataclasses.replace(DOCUMENT, **changes).text())
    (folder / "metrics.jsonl").write_text(lines(rows))
    return folder
