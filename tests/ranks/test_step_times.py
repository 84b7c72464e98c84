"""The times of steps that each rank makes alone: brought together at the end, with a sum over all hosts at once."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpitrain.context import PlanTask
from mpitrain.errors import ConfigError
from mpitrain.job import step_times
from mpitrain.job.step_times import SUMS, StepTimes
from mpitrain.world.world import World

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
    return StepTimes(
        world.replaced(context=replace(world.context, plan=PlanTask(str(path), 2, ranks)))
    )


def test_a_short_batch_is_not_the_whole_one(world: World, shared: Path) -> None:
    times = measuring(world, shared / "times.json", "1", "2")
    steps_of(times, 8, 8, 8, 4, 8, 8)
    assert times.divisor == 2
    steps_of(times, 4, 4, 4)  # the first two are skipped
    with pytest.raises(SystemExit):
        steps_of(times, 4)
    weighted = measuring(world, shared / "other.json", "1", "2")
    steps_of(weighted, *[2.5] * 5)
    assert weighted.divisor == 2
    world.barrier()
    if world.is_root:
        for entry in json.loads((shared / "times.json").read_text()):
            assert [(part["samples"], len(part["steps"])) for part in entry["parts"]] == [(8.0, 2), (4.0, 2)]


def test_a_script_that_does_not_divide_its_batch(world: World, shared: Path) -> None:
    """Its last step of an epoch has fewer samples, and may be the last one that is seen."""
    times = measuring(world, shared / "times.json", "1", "2")
    steps_of(times, *[8] * 5)
    with pytest.raises(SystemExit):
        steps_of(times, *[8, 8, 3] * 15)
    world.barrier()
    if world.is_root:
        assert [entry["is_fixed"] for entry in json.loads((shared / "times.json").read_text())] == [True] * world.size


def test_no_typical_number_of_samples(world: World, shared: Path) -> None:
    for weights in ([float(number) for number in range(1, 100)], [0.0] * 4):
        times = measuring(world, shared / "times.json", "1", "2")
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
