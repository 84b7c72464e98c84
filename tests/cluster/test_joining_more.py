"""Hosts join: with warm interpreters, where logins are few, and in a loop of Horovod."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from launching import PYTHONS, SHARE, as_user, interpreters, training, write
from test_joining import COPIES, change, kill, moving, steps_of

from jobs import until
from testbed import Bed

pytestmark = [pytest.mark.timeout(2400), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

_OURS = "/etc/ssh/sshd_config.d/10-mpitrain.conf"


def restart(bed: Bed, node: str, command: str) -> None:
    done = bed.node_run(node, ["bash", "-c", f"{command} && systemctl restart ssh"])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def one_login(bed: Bed) -> Iterator[None]:
    """sshd drops a login on node2 and node3 while another one is being made there."""
    for node in ("node2", "node3"):
        restart(
            bed, node, f"sed -i.before 's/^MaxStartups.*/MaxStartups 1/' {_OURS} && grep -q '^MaxStartups 1$' {_OURS}"
        )
    yield
    for node in ("node2", "node3"):
        restart(bed, node, f"mv {_OURS}.before {_OURS}")


def all_warm(bed: Bed, *nodes: str) -> dict[str, set[int]]:
    """Wait until there is a warm interpreter on each of these nodes; return them."""
    until(lambda: all(interpreters(bed, node) for node in nodes), "no warm interpreter is ready")
    return {node: interpreters(bed, node) for node in nodes}


def parent_of_rank(bed: Bed, node: str) -> int:
    """The parent of the rank on a node that mpiexec has started last."""
    line = "ps -o ppid= -p $(pgrep -n -u cluster -f '^[^ ]+ moves.py 4000')"
    return int(as_user(bed, node, line).stdout)


def test_one_login_at_a_time(bed: Bed, one_login: None, python: str) -> None:
    """An sshd lets one login at a time begin, as that of a host that all logins pass does."""
    job = moving(bed, "--hosts node1,node2 --max-restarts 2", python=python)
    all_warm(bed, "node1", "node2")
    change(bed, python, "+node3")
    job.wait_for("node3 joins after step ")
    all_warm(bed, "node1", "node2", "node3")
    write(bed, "node1", f"{SHARE}/enough", "")
    end = job.end()
    assert end.code == 0, end.output
    for word in ("no keeper", "start cold", "cannot start beside", "as before"):
        assert word not in end.output, end.output


def test_a_host_leaves_and_others_join_with_forks(bed: Bed, python: str) -> None:
    """The next attempt begins beside the present one. One interpreter forks the ranks of all attempts."""
    job = moving(bed, "--hosts node1,node2,node3 --max-restarts 1", python=python)
    first = all_warm(bed, "node1", "node3")
    for words, number in (("-node2", 2), ("+node2,node4", 4)):
        change(bed, python, words)
        job.wait_for(f" with {number} ranks\n")
        assert {parent_of_rank(bed, "node1")} == first["node1"], job.output()
    all_warm(bed, "node1", "node2", "node3", "node4")
    assert first == {node: interpreters(bed, node) for node in first}
    write(bed, "node1", f"{SHARE}/enough", "")
    end = job.end()
    assert end.code == 0, end.output
    assert "cold" not in end.output
    assert {size for size, _, _ in steps_of(end.output).values()} == {2, 3, 4}
    begun = [float(at) for at in re.findall(r"begins at (\S+)\n", end.output)]
    ends = {int(step): float(at) for at, step in re.findall(r"\] at (\S+) step (\d+)\n", end.output)}
    left = re.findall(r" after step (\d+); continuing", end.output)
    assert len(left) == 2
    for next_begun, step in zip(begun[1:], left, strict=True):
        assert next_begun < ends[int(step) - 1]


def test_a_host_that_joins_fails(bed: Bed) -> None:
    """The forks that were to train with it end. The job continues as before, and a later failure has forks again."""
    job = moving(bed, "--hosts node1,node2,node3 --max-restarts 2")
    first = all_warm(bed, "node1", "node2", "node3")
    write(bed, "node1", "hold", "joins")
    change(bed, PYTHONS["mpich"], "+node4")
    kill(bed, "node4", follows=True, once="held-joins-3")
    job.wait_for("mpitrain: the job continues as before, without node4: rank 3 on node4 was killed by signal 9\n")
    as_user(bed, "node1", "rm hold")
    kill(bed, "node2", follows=False, once="moves.py")
    job.wait_for("starting again on node1, node2, node3")
    job.wait_for("resumed from memory at step ")
    assert {parent_of_rank(bed, "node1")} == first["node1"], job.output()
    write(bed, "node1", f"{SHARE}/enough", "")
    end = job.end()
    assert end.code == 0, end.output
    assert "cold" not in end.output


# Once the file `enough` exists, the training makes 20 more steps.
HOROVOD = """
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


def test_a_host_joins_a_loop_of_horovod_elastic(bed: Bed) -> None:
    """No step is left out or made twice, and the callback is called once, in the new ranks."""
    job = training(bed, "moves.py", HOROVOD, "--hosts node1,node2 --ppn 1 --max-restarts 1 moves.py", setting=COPIES)
    change(bed, PYTHONS["mpich"], "+node3")
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
