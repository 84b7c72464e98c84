"""The times of steps that each rank makes alone: brought together at the end, with a sum over all hosts at once."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from mpitrain.job.step_times import SUMS, StepTimes
from mpitrain.world import World

LAYOUT = [("first", 4000), ("last", 400)]


def train(world: World, path: str, num_steps: int, **changes: object) -> int:
    """Make steps of a batch of 8 samples until the recorder ends them. Return how many were made."""
    told = replace(world.context, plan_record=path, plan_steps=2, plan_ranks=("1", "2", "8", "16"))
    times = StepTimes(replace(world, context=told, **changes))  # type: ignore[arg-type]
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
