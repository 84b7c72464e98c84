"""Hosts join: with spares, where logins are few, and in a loop of Horovod."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from launching import PYTHONS, SHARE, as_user, training, write
from test_joining import COPIES, change, kill, moving, steps_of

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


def test_one_login_at_a_time(bed: Bed, one_login: None, python: str) -> None:
    """An sshd lets one login at a time begin, as that of a host that all logins pass does."""
    job = moving(bed, "--hosts node1,node2 --max-restarts 2 --spares", python=python)
    job.wait_for("mpitrain: 2 spares are ready\n")
    change(bed, python, "+node3")
    job.wait_for("node3 joins after step ")
    job.wait_for("mpitrain: 3 spares are ready\n")
    write(bed, "node1", f"{SHARE}/enough", "")
    end = job.end()
    assert end.code == 0, end.output
    for word in ("no keeper", "no spares", "cannot start beside", "as before"):
        assert word not in end.output, end.output


def test_with_spares_a_host_leaves_and_others_join(bed: Bed, python: str) -> None:
    """The next attempt begins beside the present one. Each attempt gets new spares, also on a host that joins."""
    job = moving(
        bed,
        "--hosts node1,node2,node3 --max-restarts 1 --spares",
        begun="mpitrain: 3 spares are ready\n",
        python=python,
    )
    for words, number in (("-node2", 2), ("+node2,node4", 4)):
        waits = pids(bed, "node1", are_ranks=False)
        assert len(waits) == 1
        change(bed, python, words)
        job.wait_for(f" with {number} ranks\n")
        job.wait_for(f"mpitrain: {number} spares are ready\n")
        assert waits == pids(bed, "node1", are_ranks=True), job.output()
    write(bed, "node1", f"{SHARE}/enough", "")
    end = job.end()
    assert end.code == 0, end.output
    assert "a spare" not in end.output
    assert {size for size, _, _ in steps_of(end.output).values()} == {2, 3, 4}
    begun = [float(at) for at in re.findall(r"begins at (\S+)\n", end.output)]
    ends = {int(step): float(at) for at, step in re.findall(r"\] at (\S+) step (\d+)\n", end.output)}
    left = re.findall(r" after step (\d+); continuing", end.output)
    assert len(left) == 2
    for next_begun, step in zip(begun[1:], left, strict=True):
        assert next_begun < ends[int(step) - 1]


def test_a_host_that_joins_fails_with_spares(bed: Bed) -> None:
    """The spares were lent to the ranks that have ended with it. The job continues as before, and gets new spares."""
    job = moving(bed, "--hosts node1,node2,node3 --max-restarts 2 --spares", begun="mpitrain: 3 spares are ready\n")
    lent = pids(bed, "node1", are_ranks=False)
    write(bed, "node1", "hold", "joins")
    change(bed, PYTHONS["mpich"], "+node4")
    kill(bed, "node4", follows=True, once="held-joins-3")
    job.wait_for("mpitrain: the job continues as before, without node4: rank 3 on node4 was killed by signal 9\n")
    job.wait_for("mpitrain: 3 spares are ready\n", 2)
    waits = pids(bed, "node1", are_ranks=False)
    assert len(waits) == 1 and not waits & lent, job.output()
    as_user(bed, "node1", "rm hold")
    kill(bed, "node2", follows=False, once="moves.py")
    job.wait_for("starting again on node1, node2, node3")
    job.wait_for("resumed from memory at step ")
    assert waits == pids(bed, "node1", are_ranks=True), job.output()
    write(bed, "node1", f"{SHARE}/enough", "")
    end = job.end()
    assert end.code == 0, end.output
    assert "a spare" not in end.output


def pids(bed: Bed, node: str, *, are_ranks: bool) -> set[int]:
    """The processes on a node that run the script: ranks or spares."""
    is_one = f"{'' if are_ranks else '! '}grep -qszE '^(PMI|OMPI_COMM_WORLD)_RANK=' /proc/$p/environ"
    found = as_user(
        bed, node, f"for p in $(pgrep -u cluster -f '^[^ ]+ moves.py 4000'); do {is_one} && echo $p; done; true"
    )
    return {int(line) for line in found.stdout.split()}


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
