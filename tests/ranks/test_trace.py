"""Clocks of ranks, and what a step leaves in a trace."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from mpitrain import Parts, StopAtStep, StreamingDiLoCo, Trainer, World
from mpitrain.job.trace import compare_clocks
from mpitrain.watching.activity import Spans

from .test_hooks import build


def test_clocks_of_one_machine_are_one_clock(world: World) -> None:
    """All processes of a machine have the same perf_counter: the true offset is 0, and the error says no less."""
    clock = compare_clocks(world)
    assert abs(clock.offset) <= clock.error
    assert (clock.error > 0) == (world.rank > 0)
    assert clock.error < 1.0


def test_the_spans_of_a_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(build, [StopAtStep(3)])
    monkeypatch.setattr(world.control, "spans", Spans())
    trainer.run()
    kept = world.control.spans.kept
    assert all(span.begin <= span.end for span in kept)
    for step in (1, 2, 3):
        compute = [span for span in kept if span.lane == "compute" and span.about["step"] == step]
        assert [span.name for span in compute] == ["data", "forward and backward", "update"]
        assert [span.end <= after.begin for span, after in pairwise(compute)] == [True, True]
        (bucket,) = [span for span in kept if span.lane == "wire" and span.about["step"] == step]
        assert bucket.about == {"step": step, "bucket": 0, "bytes": 8}
        # The bucket starts when the gradient is there or later, and arrives before the update.
        assert compute[1].begin <= bucket.begin <= bucket.end <= compute[2].begin
    # The name of a wait may end with the bucket that is on its way, in parentheses.
    waits = [span.name.partition(" (")[0] for span in kept if span.lane == "wait"]
    assert waits == ["compare the tunable values", *["begin a step", "end a step", "exchange gradients"] * 3]


def test_outer_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each fragment of each round, after the gradients of its last step. The last one ends the run."""

    def build_rounds(its: World) -> Parts:
        return replace(build(its), strategy=StreamingDiLoCo(2, fragments=1, delay=0, alpha=0.0))

    trainer = Trainer(build_rounds, [StopAtStep(5)])
    monkeypatch.setattr(world.control, "spans", Spans())
    trainer.run()
    kept = world.control.spans.kept
    outer = [span for span in kept if span.name == "outer step"]
    w = {"first": "w", "last": "w"}
    assert [span.about for span in outer] == [{**w, "samples": number} for number in (10, 8, 5)]
    assert {span.lane for span in outer} == {"wire"}
    computed = [span for span in kept if span.name == "forward and backward"]
    assert [span.about["step"] for span in computed] == [1, 2, 3, 4, 5]
    for span, step in zip(outer, (2, 4, 5), strict=True):
        assert computed[step - 1].end <= span.begin <= span.end
        assert all(span.end <= later.begin for later in computed[step:])
