"""A host joins a loop of `hvd.elastic` over the nodes of a cluster, and the loop goes on after its last commit."""

from __future__ import annotations

import pytest
from launching import PYTHONS, SHARE, Job, as_user, write
from test_joining import COPIES, change

from testbed import Bed

pytestmark = [pytest.mark.timeout(2400), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

# Once the file `enough` exists, the training makes 20 more steps.
SCRIPT = """
import pathlib, time
import mpitrain as mt
from mpitrain.horovod import elastic

@elastic.run
def train(state):
    world = mt.init()
    while state.step != state.last:
        time.sleep(0.05)
        state.sum += world.mean(1.0 + state.step)
        state.step += 1
        world.print("step", state.step, world.size)
        if state.step == 20:
            world.print("has begun")
        if world.broadcast_object(state.last == -1 and pathlib.Path("enough").exists()):
            state.last = state.step + 20
        state.commit()

state = elastic.ObjectState(step=0, last=-1, sum=0.0)
state.register_reset_callbacks([lambda: mt.init().print("reset to", mt.init().size)])
train(state)
assert state.sum == sum(range(1, state.step + 1))
mt.init().print("trained")
"""


def test_a_host_joins(bed: Bed) -> None:
    """No step is left out or made twice, and the callback is called once, in the new ranks."""
    write(bed, "node1", f"{SHARE}/moves.py", SCRIPT)
    as_user(bed, "node1", "rm -f enough")
    job = Job(bed, "--hosts node1,node2 --ppn 1 --restarts 1 moves.py", python=PYTHONS["mpich"], setting=COPIES)
    job.wait_for("has begun")
    change(bed, PYTHONS["mpich"], "join node3")
    job.wait_for("resumed from memory at step ")
    write(bed, "node1", f"{SHARE}/enough", "")
    end = job.end()
    assert end.code == 0, end.output
    lines = [line.removeprefix("[0] ").split() for line in end.output.splitlines()]
    steps = [(int(line[1]), int(line[2])) for line in lines if line[:1] == ["step"]]
    assert [step for step, _ in steps] == list(range(1, len(steps) + 1))
    assert {size for _, size in steps} == {2, 3}
    assert end.output.count("reset to 3") == 1
    assert "trained" in end.output
