"""The record of a loop without a Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import run_job
from mpitrain.training.run_document import DONE, read_document
from mpitrain.training.writers.json_lines import read_rows

LOOP = """
import sys, numpy
import mpitrain as mt
record = mt.record_loop(sys.argv[3], after_step=int(sys.argv[1]))
for step in range(int(sys.argv[1]) + 1, 6):
    loss = mt.init().mean(numpy.float64(step + mt.init().rank))
    record(step, loss=loss, accuracy=numpy.array(0.5))
from mpitrain.watching import activity, rank_record
shown = rank_record.read_record(f"/proc/self/fd/{activity.own_activity().descriptor}", mt.init().rank)
assert shown.step == 5, shown  # on all ranks, for ps and top
if sys.argv[2]:
    record(6, **{"no number": "x"})
"""


@pytest.mark.parametrize("fault", ["", "x"])
def test_rows_of_a_loop(tmp_path: Path, fault: str) -> None:
    for after_step in (0, 3):
        job = run_job(2, LOOP, str(after_step), fault, str(tmp_path / "first"))
        assert (job.code == 0) == (not fault), job.output
        rows = read_rows(tmp_path / "first/metrics.jsonl")
        assert [(row["step"], row["loss"], row["accuracy"]) for row in rows] == [
            (step, step + 0.5, 0.5) for step in range(1, 6)
        ]
        document = read_document(tmp_path / "first/run.json")
        assert document.after_step == after_step
        assert document.end == (DONE if not fault else "")
    if fault:
        assert "the metric 'no number' of step 6 is 'x'; it is no number" in job.stderr
