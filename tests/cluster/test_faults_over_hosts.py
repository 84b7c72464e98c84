"""`mpitrain run` over the nodes of a cluster while hosts, ranks, the launcher or the network fail.

Every fault is real. After each, nothing of the job is left on any node.
"""

from __future__ import annotations

import re
import signal
import uuid

import pytest
import scripts_over_hosts
from launching import MOSTLY_MPICH, PYTHONS, Job, left, run

from testbed import Bed

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("healed")]
# A fixture: pytest finds it by this name.
scripts = scripts_over_hosts.scripts


@MOSTLY_MPICH
def test_power_cut(bed: Bed, python: str) -> None:
    job = Job(bed, "-n 4 hello.py 600", python=python)
    job.wait_for("of 4 on", 4)
    bed.kill("node3")
    end = job.end()
    assert end.code == 1, end.output
    assert "node3: no message from this host since " in end.output
    bed.start("node3")
    assert left(bed) == []


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["freeze", "cut"])
def test_a_node_that_falls_silent(bed: Bed, fault: str) -> None:
    job = Job(bed, "-n 4 hello.py 600")
    job.wait_for("of 4 on", 4)
    getattr(bed, fault)("node2")
    end = job.end()
    assert end.code == 1, end.output
    assert "node2: no message from this host since " in end.output
    if fault == "cut":  # the node ends its part of the job itself
        assert left(bed) == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param("stop", r"is stopped \(SIGSTOP\?\): kill -CONT \d+", marks=pytest.mark.nightly),
        ("loop", r"runs? in hangs\.py:\d+ \(load\), after call \d+"),
        pytest.param("sleep", r"sleeps? in hangs\.py:\d+ \(load\), after call \d+", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_stands_still(bed: Bed, kind: str, expected: str) -> None:
    job = run(bed, f"-n 8 hangs.py {kind}", setting="MPITRAIN_STALL_SECONDS=5 MPITRAIN_HANG_SECONDS=20")
    waits = r"ranks 0-3,6,7 on node1,node2,node4 wait in barrier \(call \d+\)"
    assert job.code == 1, job.output
    ended = r"nothing has moved for 20 s \(hang_seconds\), and the job is ended"
    for head in (r"no progress for ([5-9]|1\d) s", ended):
        # Two ranks of a host that stand in the same place have a line each, or one line together.
        assert re.search(rf"mpitrain: {head}: {waits}; ranks? 4(,5)? on node3 {expected}", job.output), job.output


@pytest.mark.nightly
def test_silent_hosts_are_named_before_they_are_given_up(bed: Bed) -> None:
    """The launcher's own cable is cut. It waits longer for all other hosts together than for one."""
    job = Job(bed, "-n 4 hangs.py no", setting="MPITRAIN_STALL_SECONDS=8")
    job.wait_for("stands still now")
    bed.cut("node1")
    done = job.end()
    assert done.code == 1, done.output
    report = re.search(r"no progress for \d+ s: .*", done.output)
    assert report, done.output
    for rank in (1, 2, 3):
        assert f"rank {rank} on node{rank + 1}: no message from this host for " in report[0]
    assert "node2, node3, node4: no message from these hosts since " in done.output


@MOSTLY_MPICH
def test_a_killed_launcher_leaves_nothing(bed: Bed, python: str) -> None:
    job = Job(bed, "-n 4 hello.py 600", python=python)
    job.wait_for("of 4 on", 4)
    job.signal("KILL")
    assert job.end().code == 137
    assert left(bed) == []


@pytest.mark.nightly
def test_a_launcher_that_is_killed_while_a_host_is_cut_off(bed: Bed) -> None:
    """Nobody can tell that host: what runs there ends because its launcher is silent, without a cable too."""
    job = Job(bed, "-n 4 hello.py 600")
    job.wait_for("of 4 on", 4)
    bed.cut("node3")
    job.signal("KILL")
    assert job.end().code == 137
    assert left(bed, patience_seconds=150.0) == []


@MOSTLY_MPICH
def test_a_killed_rank(bed: Bed, python: str) -> None:
    """MPICH's mpiexec then ends with 255, because its proxies on the other hosts fail as well."""
    end = run(bed, "-n 4 hangs.py die", python=python)
    if python == PYTHONS["mpich"]:
        assert "mpitrain: rank 2 on node3 was killed by signal 9; mpiexec ended the others" in end.output
        assert end.code == 128 + signal.SIGKILL, end.output
    else:  # the line depends on the order in which the processes of Open MPI end
        assert "mpitrain: rank 2 on node3 " in end.output and end.code != 0, end.output
    assert left(bed) == []


def test_a_killed_rank_whose_guard_is_late(bed: Bed, python: str) -> None:
    """The kernel gives the time of each end. By the times at which guards see ends, another node's rank is first."""
    end = run(bed, f"-n 4 hangs.py 'die unseen' /tmp/stopped-{uuid.uuid4().hex}", python=python)
    assert end.code != 0
    blamed = re.findall(r"^mpitrain: (ranks? \S+ on \S+) (?:was killed|ended|left)", end.output, re.M)
    assert blamed == ["rank 2 on node3"], end.output
    assert left(bed) == []


@MOSTLY_MPICH
def test_interrupted(bed: Bed, python: str) -> None:
    job = Job(bed, "-n 4 hello.py 600", python=python)
    job.wait_for("of 4 on", 4)
    job.signal("INT")
    end = job.end()
    assert end.code == 130, end.output
    assert left(bed) == []


def test_suspension_is_refused(bed: Bed) -> None:
    """A stopped launcher would be silent, and the guards would end the job."""
    job = Job(bed, "-n 2 hello.py 5")
    job.wait_for("of 2 on", 2)
    job.signal("TSTP")
    assert job.end().code == 0


def test_python_fails_before_mpi_on_three_of_four(bed: Bed, python: str) -> None:
    end = run(bed, "-n 4 --start-seconds 30 fails_before_mpi.py", python=python)
    assert end.code != 0
    assert "ImportError: no such library here" in end.output
    if python == PYTHONS["mpich"]:  # Open MPI's mpiexec ends such a job itself
        assert "rank 1 on node2, rank 2 on node3, rank 3 on node4 ended early" in end.output


@MOSTLY_MPICH
def test_a_rank_that_leaves_before_init(bed: Bed, python: str) -> None:
    end = run(bed, "-n 4 leaves_before_init.py", python=python)
    assert end.code == 3, end.output
    assert "rank 2 on node3 left with exit code 3 (leaves_before_init.py:5) before it called init()" in end.output


@MOSTLY_MPICH
def test_a_rank_that_is_late(bed: Bed, python: str) -> None:
    end = run(bed, "-n 4 --start-seconds 20 late.py", python=python)
    assert end.code == 1, end.output
    assert "rank 2 on node3: did not call init() within 20 s after rank " in end.output
    assert "node3: rank 2 runs, before init()" in end.output


@MOSTLY_MPICH
@pytest.mark.parametrize("script", [pytest.param("hello.py", marks=pytest.mark.nightly), "plain.py"])
def test_a_firewall_that_drops_what_mpi_sends(bed: Bed, python: str, script: str) -> None:
    bed.drop("node3", "1024-65535")
    end = run(bed, f"-n 4 --start-seconds 30 {script}", python=python)
    assert end.code == 1, end.output
    assert "rank 2 on node3 did not start within 30 s" in end.output.replace("rank 3 on node4 ", "rank 2 on node3 ")
    assert "look at node3 first: `ssh node3 sudo nft list ruleset`" in end.output


def test_what_a_rank_leaves_is_ended_and_named(bed: Bed) -> None:
    end = run(bed, "-n 2 leaves_a_process.py")
    assert end.code == 1, end.output
    assert "node2: " in end.output
    assert "sleep 1234" in end.output
    assert left(bed) == []
