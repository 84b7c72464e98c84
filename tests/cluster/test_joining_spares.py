"""Hosts leave and join a job with `--spares`. The spares of the hosts that stay become the ranks of the next try."""

from __future__ import annotations

import re

import pytest
from launching import PYTHONS, SHARE, Job, as_user, write
from test_joining import COPIES, SCRIPT, change, kill, steps_of

from testbed import Bed

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("healed"), pytest.mark.nightly]


@pytest.fixture(autouse=True)
def script(bed: Bed, healed: None) -> None:
    write(bed, "node1", f"{SHARE}/moves.py", SCRIPT)
    as_user(bed, "node1", "rm -rf enough hold held-* record; mkdir record")


def test_a_host_leaves_and_others_join(bed: Bed, python: str) -> None:
    """The next try begins beside the present one. Each try gets new spares, also on a host that joins."""
    arguments = "--hosts node1,node2,node3 --ppn 1 --restarts 1 --spares moves.py 4000"
    job = Job(bed, arguments, python=python, setting=COPIES)
    job.wait_for("mpitrain: 3 spares are ready\n")
    for words, number in (("leave node2", 2), ("join node2,node4", 4)):
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
    left = re.findall(r" after step (\d+); going on", end.output)
    assert len(left) == 2
    for next_begun, step in zip(begun[1:], left, strict=True):
        assert next_begun < ends[int(step) - 1]


def test_spares_when_one_host_is_left_and_when_another_joins(bed: Bed, python: str) -> None:
    """The launcher sets other variables for a job on one host than for one on several. The spares fit both."""
    arguments = "--hosts node1,node2 --ppn 1 --restarts 2 --spares moves.py 4000"
    job = Job(bed, arguments, python=python, setting=COPIES)
    job.wait_for("mpitrain: 2 spares are ready\n")
    waits = pids(bed, "node1", are_ranks=False)
    bed.kill("node2")
    job.wait_for("starting again on node1 with 1 ranks, without node2\n")
    job.wait_for("mpitrain: 1 spare is ready\n")
    assert waits == pids(bed, "node1", are_ranks=True), job.output()
    waits = pids(bed, "node1", are_ranks=False)
    bed.heal("node2")
    change(bed, python, "join node2")
    job.wait_for("going on on node1, node2 with 2 ranks\n")
    job.wait_for("mpitrain: 2 spares are ready\n", 2)
    assert waits == pids(bed, "node1", are_ranks=True), job.output()
    write(bed, "node1", f"{SHARE}/enough", "")
    end = job.end()
    assert end.code == 0, end.output
    assert "a spare" not in end.output


def test_a_host_that_joins_fails_with_spares(bed: Bed) -> None:
    """The spares were lent to the ranks that have ended with it. The job goes on as before, and gets new spares."""
    python, arguments = PYTHONS["mpich"], "--hosts node1,node2,node3 --ppn 1 --restarts 2 --spares moves.py 4000"
    job = Job(bed, arguments, python=python, setting=COPIES)
    job.wait_for("mpitrain: 3 spares are ready\n")
    lent = pids(bed, "node1", are_ranks=False)
    write(bed, "node1", "hold", "joins")
    change(bed, python, "join node4")
    kill(bed, "node4", follows=True, once="held-joins-3")
    job.wait_for("mpitrain: the job goes on as before, without node4: rank 3 on node4 was killed by signal 9\n")
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
