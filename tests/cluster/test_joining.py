"""`mpitrain scale` over the nodes of a cluster: no step and no sample comes twice."""

from __future__ import annotations

import ast
import json
import re
import signal
import time

import pytest
from launching import Job, as_user, run, training, write

from testbed import Bed

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("healed")]

# Samples are multiples of 12, so the mean of 2, 3, 4, 6 or 12 of them is a whole number. No sum over ranks is rounded,
# and every number of ranks gives the same bits. Once the file `enough` exists, the training makes 20 more steps. While
# the file `hold` exists, ranks that begin wait after init(), and say so by a file that has the word in `hold`.
SCRIPT = """
import pathlib, sys, time
import numpy
import mpitrain as mt

world, used = mt.init(), []
world.print("begins at", time.time())

def is_held():
    try:
        pathlib.Path(f"held-{pathlib.Path('hold').read_text()}-{world.rank}").touch()
    except FileNotFoundError:
        return False
    return True

while is_held():
    time.sleep(0.1)

def adds(parameters, batch, on_gradient):
    x, number = batch
    used.append(number.tolist())
    on_gradient("w", x.mean(axis=0) if len(x) else numpy.zeros(5))
    return float(x.mean()) if len(x) else 0.0

class Show(mt.Hook):
    def after_step(self, trainer, step):
        time.sleep(0.05)
        world.print("at", time.time(), "step", step.number)
        samples = sum(world.allgather(used[-1]), [])
        world.print("step", step.number, world.size, samples, trainer.adapter.parameters()["w"].tobytes().hex())
        if step.number == 20:
            world.print("has begun")
        if world.broadcast_object(trainer.last_step == 4000 and pathlib.Path("enough").exists()):
            trainer.last_step = step.number + 20

def build(world):
    random = numpy.random.default_rng(0)
    arrays = 12.0 * random.integers(-9, 9, (60, 5)), numpy.arange(60)
    data = mt.data.ArrayData(world, arrays, global_batch=12)
    return mt.Parts(mt.ArrayFunction(adds, {"w": numpy.zeros(5)}, mt.optim.SGD(0.1, momentum=0.9)), mt.Sync(), data)

hooks = [mt.StopAtStep(int(sys.argv[1])), mt.Record([mt.writers.JsonLines("record")], steps=1), Show()]
mt.Trainer(build, hooks).run()
world.print("done")
"""
# On a busy machine copies are made so seldom that a change may wait for minutes. The interval is still several steps:
# if a change did not wait for a copy, some of them would be made twice.
COPIES = "MPITRAIN_MEMORY_STEPS=5"
JOB = "$({python} -m mpitrain ps | awk '/moves.py/ {{ print $1 }}')"


def moving(bed: Bed, arguments: str, *, script: str = SCRIPT, **more: str) -> Job:
    """A training of one rank a host, which has begun."""
    return training(bed, "moves.py", script, f"--ppn 1 {arguments} moves.py 4000", setting=COPIES, **more)


def change(bed: Bed, python: str, words: str) -> str:
    job = JOB.format(python=python)
    done = as_user(bed, "node1", f"{python} -m mpitrain scale {job} {words} 2>&1")
    assert done.returncode == 0, done.stdout
    return done.stdout


def steps_of(output: str) -> dict[int, tuple[int, list[int], str]]:
    """The number of ranks, the samples and the parameters of each step. No step may have been made twice."""
    steps: dict[int, tuple[int, list[int], str]] = {}
    for step, size, samples, bits in re.findall(r"\] step (\d+) (\d+) (\[.*\]) ([0-9a-f]+)\n", output):
        assert int(step) not in steps, output
        steps[int(step)] = int(size), ast.literal_eval(samples), bits
    assert sorted(steps) == list(range(1, len(steps) + 1)), output
    return steps


def test_a_host_leaves_and_joins_again(bed: Bed, python: str) -> None:
    job = moving(bed, "--hosts node1,node2,node3 --max-restarts 1", python=python)
    assert "node2 leaves after the next copy" in change(bed, python, "-node2")
    job.wait_for("continuing on node1, node3 with 2 ranks\n")
    job.wait_for("resumed from memory at step ")
    assert "node2,node4 join" in change(bed, python, "+node2,node4").replace(", ", ",")
    job.wait_for("continuing on node1, node3, node2, node4 with 4 ranks\n")
    job.wait_for("resumed from memory at step ", 2)
    write(bed, "node1", "enough", "")
    end = job.end()
    assert end.code == 0, end.output
    steps = steps_of(end.output)
    assert {size for size, _, _ in steps.values()} == {2, 3, 4}
    for first in range(1, len(steps) - 4, 5):  # an epoch
        read = [number for step in range(first, first + 5) for number in steps[step][1]]
        assert sorted(read) == list(range(60)), first
    assert "cannot start beside" not in end.output
    begun = [float(at) for at in re.findall(r"begins at (\S+)\n", end.output)]
    ends = {int(step): float(at) for at, step in re.findall(r"\] at (\S+) step (\d+)\n", end.output)}
    told = re.findall(r"mpitrain: (.*) after step (\d+); continuing", end.output)
    for next_begun, (_, step) in zip(begun[1:], told, strict=True):
        assert next_begun < ends[int(step) - 1], "the next attempt begins beside the one before"
    assert [text for text, _ in told] == ["node2 leaves", "node2, node4 join"]
    lines = as_user(bed, "node1", "cat record/metrics.jsonl").stdout.splitlines()
    events = [event for line in lines for event in json.loads(line).get("events", [])]
    assert [(event["text"], event["after_step"], event["repeated_steps"]) for event in events] == [
        (text, int(step), 0) for text, step in told
    ]
    # An undisturbed run, always with 3 ranks.
    as_user(bed, "node1", "rm -rf record; mkdir record")
    whole = run(bed, f"--hosts node1,node2,node3 --ppn 1 moves.py {len(steps)}", python=python)
    assert whole.code == 0, whole.output
    expected = steps_of(whole.output)
    assert [bits for _, _, bits in steps.values()] == [bits for _, _, bits in expected.values()]


@pytest.mark.nightly
def test_ranks_are_killed_while_the_next_try_is_prepared(bed: Bed, python: str) -> None:
    """If a new rank is killed, the job notices nothing. If a training rank is killed, the job resumes from memory."""
    job = moving(bed, "--hosts node1,node2,node3 --max-restarts 2", python=python)
    write(bed, "node1", "hold", "joins")
    change(bed, python, "+node4")
    kill(bed, "node4", follows=True, once="held-joins-3")
    job.wait_for("mpitrain: the job continues as before, without node4: rank 3 on node4 was killed by signal 9\n")

    write(bed, "node1", "hold", "leaves")
    change(bed, python, "-node3")
    kill(bed, "node1", follows=True, once="held-leaves-0")
    job.wait_for("mpitrain: the next attempt cannot start beside this one: ")
    as_user(bed, "node1", "rm hold")
    job.wait_for("continuing on node1, node2 with 2 ranks\n")
    job.wait_for("resumed from memory at step ")

    write(bed, "node1", "hold", "returns")
    change(bed, python, "+node3")
    kill(bed, "node1", follows=False, once="held-returns-0")
    job.wait_for("starting again on node1, node2, node3")
    as_user(bed, "node1", "rm hold")
    job.wait_for("resumed from memory at step ", 2)
    write(bed, "node1", "enough", "")
    end = job.end()
    assert end.code == 0, end.output
    left = "pgrep -u cluster -f '[m]oves.py 4000' || true"
    assert [bed.node_run(node, ["bash", "-c", left]).stdout for node in bed.names] == [""] * len(bed.names)


def kill(bed: Bed, node: str, *, follows: bool, once: str) -> None:
    """Wait for the file `once`. Then kill the ranks on a node: those of the next attempt, or those that train."""
    is_rank, is_next = (f"grep -qsz ^{name}= /proc/$p/environ" for name in ("PM.*_RANK", "_MPITRAIN_FOLLOWS"))
    is_one = f"{is_rank} && {is_next}" if follows else f"{is_rank} && ! {is_next}"
    killing = f"for p in $(pgrep -u cluster -f '[m]oves.py 4000'); do {is_one} && kill -9 $p; done"
    done = as_user(bed, node, f"until [ -e {once} ]; do sleep 0.1; done; {killing}; true")
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_sigterm_to_a_rank_lets_its_host_leave(bed: Bed, python: str) -> None:
    """Then one of the two remaining hosts is told. The MIN of --nnodes is 2, so the job saves and ends."""
    saves = SCRIPT.replace("Show()]", "Show(), mt.Checkpoint('saved', steps=100000)]")
    job = moving(bed, "--hosts node1,node2,node3 --max-restarts 1 --nnodes 2:3", script=saves, python=python)
    tell = (
        "for p in $(pgrep -u cluster -f '[m]oves.py 4000'); do grep -qsz ^PM.*_RANK= /proc/$p/environ && kill $p; done"
    )
    bed.node_run("node2", ["bash", "-c", tell])
    job.wait_for("continuing on node1, node3 with 2 ranks\n")
    job.wait_for("resumed from memory at step ")
    time.sleep(2.0)
    bed.node_run("node3", ["bash", "-c", tell])
    end = job.end()
    assert end.code == 128 + signal.SIGTERM, end.output
    steps = steps_of(end.output)
    assert "node2 leaves (SIGTERM told rank 1 to end) after step " in end.output
    assert f"SIGTERM told rank 1 to end on node3: the job has ended after step {len(steps)}\n" in end.output
    assert f"saved/step-{len(steps):08d} is saved" in end.output
    assert "failed" not in end.output
