"""The times of steps that each rank makes alone, brought together at the end; clocks of ranks, and spans of a trace."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain import Parts, StopAtStep, StreamingDiLoCo, Trainer, World
from mpitrain.context import PlanTask
from mpitrain.errors import ConfigError
from mpitrain.job import step_times
from mpitrain.job.step_times import SUMS, StepTimes
from mpitrain.job.trace import compare_clocks
from mpitrain.watching.activity import Spans

from .test_hooks import build

LAYOUT = [("first", 4000), ("last", 400)]


def train(world: World, path: str, num_steps: int, **changes: object) -> int:
    """Make steps of a batch of 8 samples until the recorder ends them. Return how many were made."""
    told = replace(world.context, plan=PlanTask(path, 2, ("1", "2", "8", "16")))
    times = StepTimes(world.replaced(context=told, **changes))  # type: ignore[arg-type]
    made = 0
    try:
        for _ in range(num_steps):
            made += 1
            times.begin(LAYOUT, float(-(-8 // times.divisor)))
            time.sleep(0.01 * (1 + world.rank))
            times.ready(1)
            time.sleep(0.01)
            times.ready(0)
            times.end()
        times.write()
    except SystemExit:
        pass
    return made


def test_the_times_of_all_ranks(world: World, shared: Path) -> None:
    path = shared / "times.json"
    # 3 steps and then 2 of the first part; of the two other ones 2 and 2. No rank has a sample of 16 parts.
    assert train(world, str(path), 100) == 3 + 2 + 2 * (2 + 2)
    world.barrier()
    if not world.is_root:
        return
    of_all = json.loads(path.read_text())
    assert [entry["host"] for entry in of_all] == list(world.hosts)
    for rank, entry in enumerate(of_all):
        assert entry["parameters"] == [list(one) for one in LAYOUT]
        assert [(part["ranks"], part["samples"], len(part["steps"])) for part in entry["parts"]] == [
            (1, 8.0, 2), (2, 4.0, 2), (8, 1.0, 2),
        ]  # fmt: skip
        assert not entry["is_fixed"]
        for part in entry["parts"]:
            for step in part["steps"]:
                first, last = step["ready"]
                assert 0.01 * (1 + rank) <= last <= first - 0.01
                assert first <= step["seconds"]


def test_a_sum_over_all_hosts(world: World, shared: Path) -> None:
    """Each rank is taken for a host."""
    path = shared / "times.json"
    assert train(world, str(path), 2, node_ranks=tuple(range(world.size))) == 2
    world.barrier()
    if world.is_root:
        for entry in json.loads(path.read_text()):
            assert (entry["num_steps"], entry["parts"]) == (2, [])
            assert set(entry["sums"]) == (set(SUMS) if world.size > 1 else set())
            assert all(min(taken, worked) > 0 for taken, worked in entry["sums"].values())


def steps_of(times: StepTimes, *weights: float) -> None:
    for weight in weights:
        times.begin(LAYOUT, weight)
        times.ready(1)
        times.ready(0)
        times.end()


def measuring(world: World, path: Path, *ranks: str) -> StepTimes:
    return StepTimes(world.replaced(context=replace(world.context, plan=PlanTask(str(path), 2, ranks))))


def test_batches_of_other_sizes(world: World, shared: Path) -> None:
    """Short ones, weights that are no numbers of samples, and a script that does not divide its batch."""

    def recorded(name: str) -> list[dict[str, Any]]:
        world.barrier()
        found: list[dict[str, Any]] = json.loads((shared / name).read_text())
        assert len(found) == world.size
        return found

    times = measuring(world, shared / "short", "1", "2")
    steps_of(times, 8, 8, 8, 4, 8, 8)
    assert times.divisor == 2
    steps_of(times, 4, 4, 4)  # the first two are skipped
    with pytest.raises(SystemExit):
        steps_of(times, 4)
    for entry in recorded("short"):
        assert [(part["samples"], len(part["steps"])) for part in entry["parts"]] == [(8.0, 2), (4.0, 2)]
    times = measuring(world, shared / "weighted", "1", "2")
    steps_of(times, *[2.5] * 5)
    assert times.divisor == 2
    times = measuring(world, shared / "undivided", "1", "2")
    steps_of(times, *[8] * 5)
    with pytest.raises(SystemExit):  # its last step of an epoch may be the last one that is seen
        steps_of(times, *[8, 8, 3] * 15)
    assert all(entry["is_fixed"] for entry in recorded("undivided"))
    for weights in ([float(number) for number in range(1, 100)], [0.0] * 4):
        times = measuring(world, shared / "none", "1", "2")
        with pytest.raises(ConfigError, match=f"{world.name()}: mpitrain plan found no typical number of samples"):
            steps_of(times, *weights)


def test_busy_cores_are_those_of_the_measured_steps(
    world: World, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, worked=0.0)
    fake = SimpleNamespace(perf_counter=lambda: clock.now, process_time=lambda: clock.worked)
    monkeypatch.setattr(step_times, "time", fake)
    times = measuring(world, shared / "times.json", "1", "2")
    for _ in range(5):
        clock.now, clock.worked = clock.now + 1, clock.worked + 0.5
        steps_of(times, 8)
    clock.now += 100  # it waits for slower hosts
    times.write()
    world.barrier()
    if world.is_root:
        assert [entry["busy_cores"] for entry in json.loads((shared / "times.json").read_text())] == [0.5] * world.size


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

    def in_rounds(its: World) -> Parts:
        return replace(build(its), strategy=StreamingDiLoCo(2, fragments=1, delay=0, alpha=0.0))

    trainer = Trainer(in_rounds, [StopAtStep(5)])
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
