"""`mpitrain verify` of training loops that use no Trainer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from verified import BEGIN, differs, verify

LOOP = """
w = world.broadcast(numpy.zeros(4))
for epoch in range(100):
    for part_x, part_y in world.shard([(x[begin : begin + 11], y[begin : begin + 11]) for begin in range(0, 50, 11)]):
        error = part_x @ w - part_y
        w = w - 0.05 * mean(2 * part_x.T @ error / max(len(part_x), 1), len(part_x))
raise AssertionError("verify must end the script before")
"""


@pytest.mark.nightly
def test_a_loop_without_a_trainer(tmp_path: Path) -> None:
    right = "mean = lambda tree, weight: world.mean(tree, weight=weight)\n"
    job = verify(tmp_path, BEGIN + right + LOOP, options=("--steps", "7"))
    assert job.code == 0, job.output
    assert "1 rank and 3, 7 calls of world.mean or world.sum; allowed relative difference 1.1e-08" in job.stdout
    assert "  samples        72 values, the same" in job.stdout  # 4 x 11 + 6 + 2 x 11
    assert "  results        7 values, " in job.stdout


@pytest.mark.nightly
def test_a_loop_that_means_by_ranks(tmp_path: Path) -> None:
    wrong = "mean = lambda tree, weight: world.mean(tree)\n"
    job = verify(tmp_path, BEGIN + wrong + LOOP)
    differs(job, "call 1, results: the result: norm ", "weight=len(x) gives the mean over samples")


# The loop changes its parameters in place, in the array that world.broadcast returned.
IN_PLACE = """
w = world.broadcast({"w": numpy.zeros(4)})["w"]
for epoch in range(100):
    for part_x, part_y in world.shard([(x[begin : begin + 11], y[begin : begin + 11]) for begin in range(0, 44, 11)]):
        gradient = 2 * part_x.T @ (part_x @ w - part_y) / max(len(part_x), 1)
        w -= rate * mean(gradient, len(part_x))
raise AssertionError("verify must end the script before")
"""
REDUCER = """
reducer = mt.GradientReducer(world, [mt.Parameter("w", (4,), numpy.dtype("float64"))])
def mean(gradient, weight):
    reducer.begin(weight)
    reducer.ready(0, gradient)
    reducer.finish()
    return reducer.gradients[0]
"""
CALLS = "mean = lambda tree, weight: world.mean(tree, weight=weight)\n"


@pytest.mark.parametrize(("means", "unit"), [(CALLS, "call"), (REDUCER, "step")], ids=["calls", "reducer"])
def test_a_loop_of_its_own_whose_update_knows_the_number_of_ranks(tmp_path: Path, means: str, unit: str) -> None:
    """The update is the last one that is compared, and nothing that follows from it is seen."""
    wrong = "rate = 1e-9 * world.size\n"  # too small to change the next gradient visibly
    job = verify(tmp_path, BEGIN + wrong + means + IN_PLACE, options=("--steps", "2", "--tolerance", "1e-4"))
    where = f"{unit} 1, parameters: ['w']: changed before {unit} 2 began by "
    differs(job, where, "; multiplied by 3, the number of ranks: is world.size in the update?")
    (said,) = re.findall(r"^mpitrain verify: (comparing .*)$", job.stdout, re.M)
    assert said.endswith(
        f", weights, the samples of world.shard, and ['w'] as each {unit} finds them. Losses, learning rates and "
        "metrics are not seen"
    )


def test_a_loop_of_its_own_that_is_right(tmp_path: Path) -> None:
    """Verify compares the first values, and the values after each of two updates."""
    job = verify(tmp_path, BEGIN + "rate = 0.05\n" + CALLS + IN_PLACE, options=("--steps", "3"))
    assert job.code == 0, job.output
    assert "  parameters     3 values, largest relative difference " in job.stdout


def test_what_is_not_seen_of_a_loop_is_said_at_once(tmp_path: Path) -> None:
    """The script runs `w = w - ...`, so the second call finds no array. Without world.broadcast there is none."""
    job = verify(tmp_path, BEGIN + CALLS + LOOP, options=("--steps", "2"))
    assert job.code == 0, job.output
    first, second = job.stdout.split("verify: the run on several ranks\n")
    assert "and the array as each call finds them. Losses" in first
    assert "mpitrain verify: the array: not seen from call 2 on. The script has replaced the array that " in first
    assert "mpitrain verify" not in second
    job = verify(tmp_path, BEGIN + CALLS + LOOP.replace("world.broadcast", ""), options=("--steps", "2"))
    assert job.code == 0, job.output
    assert "Losses, learning rates, parameters and metrics are not seen. Parameters are seen if " in job.stdout
    unchanged = "kept = world.broadcast(numpy.zeros(2))\n"
    job = verify(tmp_path, BEGIN + unchanged + CALLS + LOOP.replace("world.broadcast", ""), options=("--steps", "2"))
    assert "mpitrain verify: no parameter changed between the 2 calls, so updates are not compared" in job.stdout
