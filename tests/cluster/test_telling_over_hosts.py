"""`mpitrain tell` over the nodes of a cluster: all ranks obey after the same step, and faults in the middle of that."""

from __future__ import annotations

import threading

import pytest
from launching import MOSTLY_MPICH, Job
from telling_over_hosts import ToldJob, steps_of

from jobs import until
from mpitrain.testbed import Bed

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("healed")]


def test_a_rank_dies_before_its_host_has_copied_what_it_was_told(bed: Bed) -> None:
    """One host has copied a state with the order, and the other one without: all go on with it.

    The orders come from the launcher's node, and from one that is no host of the job.
    """
    told = ToldJob(bed, "--hosts node1,node2 --restarts 1")
    rate = told.applied("node3", "rate 0.5")
    paused = told.applied("node1", "pause")
    told.hold("node2")
    order = threading.Thread(target=told.command, args=("node3", "tell set decay=0.5"))
    order.start()
    told.wait_held("node2")
    told.kill_rank("node2", 1)
    order.join()
    told.resumed(1)
    told.go_on("node3", paused)
    steps = told.stop("node2")
    assert {row[1:] for row in steps[:rate]} == {(2, 0.01, 0.25)}
    assert {row[1:] for row in steps[rate:paused]} <= {(2, 0.005, 0.25)}
    assert {row[1:] for row in steps[paused:]} == {(2, 0.005, 0.5)}


@pytest.mark.slow
@MOSTLY_MPICH
def test_every_word(bed: Bed, python: str) -> None:
    """On four hosts, from all of them, while the clock of one is an hour ahead."""
    bed.clock("node3", 3600.0)
    told = ToldJob(bed, "--hosts node1,node2,node3,node4", python)
    listed = told.tell("node3")
    assert "set decay=0.25\n" in listed
    assert "multiplied by 1 now" in listed
    rate, value = told.applied("node3", "rate 0.5"), told.applied("node4", "set decay=0.5")
    paused = told.applied("node2", "pause")
    assert ", paused by cluster on node2 on " in told.tell("node4")
    assert told.applied("node3", "save") == paused
    stacks = told.tell("node4", "stacks")
    for rank in range(4):
        assert f"rank {rank} on node{rank + 1} is in a pause by cluster on node2" in stacks
    told.go_on("node1", paused)
    steps = told.stop("node3")
    assert rate < value < paused
    assert {row[1:] for row in steps[:rate]} == {(4, 0.01, 0.25)}
    assert {row[1:] for row in steps[rate:value]} == {(4, 0.005, 0.25)}
    assert {row[1:] for row in steps[value:]} == {(4, 0.005, 0.5)}
    told = ToldJob(bed, "--hosts node1,node2", python)
    told.tell("node4", "kill")
    assert told.job.end().code != 0


@pytest.mark.slow
@MOSTLY_MPICH
def test_hosts_leave_and_join_in_a_pause(bed: Bed, python: str) -> None:
    """Each try is paused after the same step, and has what was told to the ones before."""
    told = ToldJob(bed, "--hosts node1,node2,node3 --restarts 1", python)
    paused = told.applied("node2", "pause")
    changes = [("leave", "node3", "node1, node2 with 2 ranks"), ("join", "node4", "node1, node2, node4 with 3 ranks")]
    for number, (word, host, where) in enumerate(changes, 1):
        code, answer = told.command("node1", f"{word} {told.ids()[-1]} --hosts {host}")
        assert code == 0, answer
        told.job.wait_for(f"after step {paused}; going on on {where}")
        told.resumed(number)
        assert f", step {paused}, paused by cluster on node2" in told.tell("node2")
        assert told.applied("node2", "rate 0.5") == paused
    told.go_on("node4", paused)
    steps = told.stop("node1")
    assert {row[1:] for row in steps[:paused]} == {(3, 0.01, 0.25)}
    assert {row[1:] for row in steps[paused:]} == {(3, 0.0025, 0.25)}


@pytest.mark.slow
@MOSTLY_MPICH
def test_a_host_and_then_the_launcher_are_lost_in_a_pause(bed: Bed, python: str) -> None:
    """The cable of a host is cut right after an order. The next launcher is on another host."""
    told = ToldJob(bed, "--hosts node1,node2,node3 --restarts 2", python)
    paused = told.applied("node2", "pause")
    assert told.applied("node2", "rate 0.5") == paused
    bed.cut("node3")
    told.job.wait_for("node3 fell silent; starting again on node1, node2")
    told.resumed(1)
    assert told.applied("node2", "set decay=0.5") == paused
    told.job.signal("KILL")
    output = told.job.end().output
    until(lambda: bool(told.ids("node2", kept=True)), "no keeper holds the job")
    told.job = Job(bed, f"--resume {told.ids('node2', kept=True)[0]}", python=python, node="node2")
    told.resumed(1)
    assert "multiplied by 0.5 now" in told.tell("node1")
    told.go_on("node1", paused)
    last = told.applied("node2", "stop")
    end = told.job.end()
    assert end.code == 0, end.output
    steps = steps_of(output + end.output, last)
    assert {row[1:] for row in steps[:paused]} == {(3, 0.01, 0.25)}
    assert {row[1:] for row in steps[paused:]} == {(2, 0.005, 0.5)}
