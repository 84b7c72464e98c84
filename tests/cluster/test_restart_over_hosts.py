"""`mpitrain run --max-restarts` over nodes: a rank or the launcher is killed, a node loses power; it resumes."""

from __future__ import annotations

import re
import signal
import time

import pytest
from launching import NODES, PYTHONS, SHARE, Ended, Job, as_user, drop_kept, interpreters, stop_waiting, write
from regression import REGRESSION

from jobs import until
from mpitrain.launch.trouble import SILENCE_SECONDS
from testbed import Bed

pytestmark = pytest.mark.timeout(1800)

# On a busy machine a copy may take more than 1 % of a step. Copies would then come less often.
EVERY_STEP = "MPITRAIN_MEMORY_STEPS=1"
PAUSE_SECONDS = 4.0

# Steps of 0.05 s, with a checkpoint every 20. Each rank writes its process id into a file of its host. From step 75
# on, each waits for a file `go_on`, so even a slow test makes its fault and looks before the end.
SCRIPT = """
import os, pathlib, sys, time
import numpy
import mpitrain as mt

world = mt.init()
pathlib.Path("/tmp/rank").write_text(str(os.getpid()))
pathlib.Path("/tmp/login").write_text(os.environ.get("SSH_CONNECTION", ""))

class Show(mt.Hook):
    def after_step(self, trainer, step):
        time.sleep(0.05)
        if step.number % 10 == 0:
            world.print("made step", step.number, "on", world.size, "ranks")
        while step.number >= 75 and world.rank == 0 and not pathlib.Path("go_on").exists():
            time.sleep(0.05)
"""
SCRIPT += REGRESSION
SCRIPT += """
mt.Trainer(build, [mt.StopAtStep(int(sys.argv[1])), mt.Checkpoint("checkpoints", steps=20), Show()]).run()
world.print("done")
"""


@pytest.fixture(scope="module", autouse=True)
def script(bed: Bed) -> None:
    """Write the script to the shared folder."""
    write(bed, "node1", f"{SHARE}/train.py", SCRIPT)


@pytest.fixture(autouse=True)
def no_checkpoints(bed: Bed, healed: None) -> None:
    """Remove the checkpoints of the preceding test."""
    as_user(bed, "node1", "rm -rf checkpoints go_on")


def went_on_from_memory(end: Ended, failed: int) -> None:
    """The job resumed after the last step of all ranks, or the step before: a rank may die between step and copy.

    If it dies so at a checkpoint, the checkpoint is a step newer than memory and must be used instead.
    """
    resumed = re.findall(r"resumed from (memory|\S+/step-\d+) at step (\d+)\n", end.output)
    assert len(resumed) == 1, end.output
    source, step = resumed[0][0], int(resumed[0][1])
    assert failed - 2 <= step <= failed, end.output
    unused = [] if source == "memory" else [f"mpitrain: memory is not used: its newest copy is of step {step - 1}."]
    assert re.findall(r"mpitrain: memory is not used.*?\.", end.output) == unused, end.output


def rank_of(bed: Bed, node: str) -> int:
    """The process of the rank on a node that was the last to come out of init()."""
    return int(bed.node_run(node, ["cat", "/tmp/rank"]).stdout)


def parent_of_rank(bed: Bed, node: str) -> int:
    return int(bed.node_run(node, ["ps", "-o", "ppid=", "-p", str(rank_of(bed, node))]).stdout)


def programs(bed: Bed, node: str) -> set[int]:
    """The processes on a node that run the script: ranks, and a warm interpreter."""
    found = bed.node_run(node, ["pgrep", "-u", "cluster", "-f", r"^\S+ train\.py"]).stdout
    return {int(line) for line in found.split()}


def sent(bed: Bed, node: str) -> set[int]:
    """The launcher's processes on a node: the agent, and its keeper."""
    found = bed.node_run(node, ["pgrep", "-u", "cluster", "-f", "^[^ ]*python[^ ]* -I -u -c .import json"]).stdout
    return {int(line) for line in found.split()}


def logins(bed: Bed, node: str, of: str = "node1") -> set[str]:
    """The ports of a node from which somebody is logged in on another. The controller's Ansible does not count."""
    from_there = f"sport = :22 and dst {bed.address(of)}"
    found = bed.node_run(node, ["ss", "-Htn", "state", "established", from_there]).stdout
    return {line.split()[-1].rpartition(":")[2] for line in found.splitlines()}


def masters(bed: Bed) -> int:
    """The number of connections that are open on node1 for mpiexec. ssh makes their sockets when it has logged in."""
    sockets = ["find", "/tmp", "-maxdepth", "2", "-type", "s", "-regex", ".*/[0-9a-f]*"]
    found = bed.node_run("node1", sockets).stdout.split()
    return sum(len(path.rpartition("/")[2]) == 40 for path in found)


def test_a_rank_is_killed(bed: Bed, python: str) -> None:
    """The warm interpreter on node2 is killed first. The rank there starts cold; the other interpreters fork theirs.

    The agent of the first attempt is that of the second one. The restart logs in nowhere; but for Open MPI's mpiexec.
    """
    job = Job(bed, "-n 4 --max-restarts 2 train.py 100", python=python, setting=EVERY_STEP)
    job.wait_for("made step 50 ")
    until(lambda: all(interpreters(bed, node) for node in NODES), "no warm interpreter is ready")
    warm = {node: interpreters(bed, node) for node in ("node1", "node3", "node4")}
    killed = bed.node_run("node2", ["bash", "-c", "kill -9 $(pgrep -u cluster -x mpitrain-warm)"])
    assert killed.returncode == 0, killed.stderr
    job.wait_for("mpitrain: node2: the warm interpreter was killed by signal 9. Ranks start cold from now on")
    has_masters = python == PYTHONS["mpich"]
    until(lambda: not has_masters or masters(bed) == 3, "no connection is open for mpiexec")
    before = sent(bed, "node3")
    assert len(before) == 2, "an agent and its keeper"
    open_before = logins(bed, "node3")
    assert len(open_before) == 2 + has_masters, "the agent, mpiexec, and mpiexec of the next attempt"
    bed.node_run("node3", ["bash", "-c", "kill -9 $(cat /tmp/rank)"])
    job.wait_for("resumed from memory")
    assert sent(bed, "node3") == before, job.output()
    parents = {node: {parent_of_rank(bed, node)} for node in warm}
    assert parent_of_rank(bed, "node2") not in sent(bed, "node2")
    login = bed.node_run("node3", ["cut", "-d ", "-f2", "/tmp/login"]).stdout.strip()
    assert (login in open_before) == has_masters
    write(bed, "node1", "go_on", "")
    end = job.end()
    assert end.code == 0, end.output
    found = re.search(
        r"mpitrain: attempt 1 of 3 failed at step (\d+): rank 2 on node3 (?:was killed|ended)(.*); (.*)\n", end.output
    )
    assert found, end.output
    assert 50 <= int(found[1]) <= 76  # other ranks may be a step ahead of rank 0
    assert found[3] == "starting again on node1, node2, node3, node4"
    went_on_from_memory(end, int(found[1]))
    assert "mpitrain: attempt 2 of 3 succeeded\n" in end.output
    assert end.output.count("made step 100 on 4 ranks") == 1
    assert parents == warm
    assert len(re.findall(r"\bcold\b", end.output)) == 1, end.output


@pytest.mark.parametrize("node", ["node3", pytest.param("node1", marks=pytest.mark.nightly)])
def test_an_agent_is_killed(bed: Bed, python: str, node: str) -> None:
    """Its host stays, with what its ranks hold: the next attempt has a new agent there."""
    job = Job(bed, "-n 4 --max-restarts 1 train.py 100", python=python, setting=EVERY_STEP)
    job.wait_for("made step 50 ")
    bed.node_run(node, ["bash", "-c", f"kill -9 {min(sent(bed, node))}"])
    write(bed, "node1", "go_on", "")
    end = job.end()
    assert end.code == 0, end.output
    killed = rf"mpitrain: {node}: the agent of the job there was killed"
    assert re.search(killed, end.output), end.output
    found = re.search(
        r"attempt 1 of 2 failed at step (\d+): .*; starting again on node1, node2, node3, node4\n", end.output
    )
    assert found, end.output
    went_on_from_memory(end, int(found[1]))
    assert end.output.count("made step 100 on 4 ranks") == 1


def test_the_launcher_is_killed(bed: Bed, python: str) -> None:
    """Another node continues with the job, on the same nodes."""
    arguments = "--hosts node1,node2,node3 --ppn 1 --max-restarts 2 train.py 100"
    job = Job(bed, arguments, python=python, setting=EVERY_STEP)
    job.wait_for("made step 50 ")
    job.signal("KILL")
    killed = job.end()
    assert killed.code == 128 + signal.SIGKILL, killed.output
    until(lambda: "To continue: " in job.output())  # the keeper prints this line after the end of the launcher
    (name,) = re.findall(r"To continue: `mpitrain resume (\w{8})`", job.output())
    listed = as_user(bed, "node3", f"{python} -m mpitrain ps")
    row = rf"mpitrain resume {name} .* none, its state on node1, node2, node3 .*train.py 100$"
    assert re.search(row, listed.stdout, re.M), listed.stdout + listed.stderr
    write(bed, "node1", "go_on", "")
    job = Job(bed, name, python=python, node="node3", command="resume")
    end = job.end()
    assert end.code == 0, end.output
    (resumed,) = re.findall(r"resumed from memory at step (\d+)\n", end.output)
    assert 49 <= int(resumed) < 100, end.output
    assert "memory is not used" not in end.output
    assert "made step 100 on 3 ranks" in end.output
    again = Job(bed, name, python=python, node="node2", command="resume").end()
    assert again.code == 1
    assert f"nothing is kept of a job {name} of yours on node1, node2, node3, node4." in again.output


def test_the_host_of_the_launcher_loses_its_power(bed: Bed, python: str) -> None:
    """The job continues without that host. The keepers of the other nodes learn of the loss only from the silence."""
    arguments = "--hosts node1,node2,node3 --ppn 1 --max-restarts 2 --nnodes 2:3 train.py 100"
    job = Job(bed, arguments, python=python, setting=EVERY_STEP, node="node3")
    job.wait_for("made step 50 ")
    listed = as_user(bed, "node1", f"{python} -m mpitrain ps")
    (name,) = re.findall(r"^(\w{8}) .* train.py 100$", listed.stdout, re.M)
    assert logins(bed, "node1", of="node3")
    bed.kill("node3")
    write(bed, "node1", "go_on", "")
    end = Job(bed, name, python=python, node="node2", command="resume").end()
    assert end.code == 0, end.output
    assert f"the launcher of job {name} ran on node3. If it is alive there" in end.output
    assert "starting again on node1, node2 with 2 ranks, without node3\n" in end.output
    (resumed,) = re.findall(r"resumed from memory at step (\d+)\n", end.output)
    assert 49 <= int(resumed) < 100, end.output
    assert "made step 100 on 2 ranks" in end.output
    # mpiexec's connection for the next attempt has no agent that ends; sshd itself finds that its client is gone.
    until(lambda: not any(logins(bed, node, of="node3") for node in ("node1", "node2")), "a dead host stays logged in")


@pytest.mark.nightly
def test_the_cable_of_the_launcher_is_plugged_in_again(bed: Bed, python: str) -> None:
    """All other hosts are silent then, so they get more time than one host alone."""
    job = Job(bed, "-n 4 --max-restarts 1 train.py 100", python=python, setting=EVERY_STEP)
    job.wait_for("made step 50 ")
    bed.cut("node1")
    write(bed, "node1", "go_on", "")
    time.sleep(5)
    bed.heal("node1")
    end = job.end()
    assert end.code == 0, end.output
    assert " failed at step " not in end.output
    assert end.output.count("made step 100 on 4 ranks") == 1


@pytest.mark.nightly
def test_silence(bed: Bed) -> None:
    """The launcher's node, a paused node and a node whose cable is cut fall silent. Only the last is lost."""
    write(bed, "node1", "go_on", "")
    job = Job(bed, "-n 4 --max-restarts 1 train.py 1000000", setting=EVERY_STEP)
    job.wait_for("made step 50 ")
    bed.freeze("node1")
    time.sleep(SILENCE_SECONDS + 2)
    bed.thaw("node1")
    began = time.monotonic()
    bed.freeze("node3")
    time.sleep(PAUSE_SECONDS)
    bed.thaw("node3")
    took = time.monotonic() - began
    made = job.output().count("made step ")
    job.wait_for("made step ", made + 10)
    if " failed at step " in job.output() and took > SILENCE_SECONDS - 1:
        job.signal("TERM")
        job.end()
        pytest.skip(f"this machine was so busy that a pause of {PAUSE_SECONDS:g} s took {took:.1f} s")
    assert " failed at step " not in job.output()
    bed.cut("node4")
    job.wait_for("node4 fell silent; starting again on node1, node2, node3 with 3 ranks, without node4\n")
    job.wait_for(" on 3 ranks")
    job.signal("TERM")
    end = job.end()
    assert end.code == 128 + signal.SIGTERM, end.output
    assert "mpitrain: node4: no message from this host since " in end.output
    assert end.output.count("resumed from memory at step ") == 1, end.output
    bed.heal("node4")
    drop_kept(bed, "node4")


@pytest.mark.nightly
def test_a_node_loses_its_power(bed: Bed, python: str) -> None:
    """Then another one does. Too few are left, so the job saves and ends, and the same command continues from there."""
    job = Job(bed, "--ppn 1 --max-restarts 2 --nnodes 3:4 train.py 200", python=python, setting=EVERY_STEP)
    job.wait_for("made step 50 ")
    bed.kill("node3")
    job.wait_for("starting again on node1, node2, node4 with 3 ranks, without node3\n")
    job.wait_for("on 3 ranks")
    bed.kill("node2")
    stop_waiting(bed, job, python)
    end = job.end()
    assert end.code == 1, end.output
    found = re.search(r"attempt 1 of 3 failed at step (\d+): node3 fell silent; starting", end.output)
    assert found, end.output
    went_on_from_memory(end, int(found[1]))
    few = "only node1, node4 of node1, node2, node3, node4 can take part, and --nnodes is 3:4"
    assert re.search(
        rf"attempt 2 of 3, from step \d+, failed at step \d+: node2 fell silent; {few}. "
        r"Waiting for node2, node3, up to 300 s; `mpitrain tell JOB stop` saves the state and ends the job\n"
        rf"mpitrain: told to stop; {few}. Starting again on node1, node4 only to save the state\n",
        end.output,
    ), end.output
    (saved,) = re.findall(r"checkpoints/step-(\d+) is saved; the same command continues from there\n", end.output)
    assert end.output.endswith(f"mpitrain: {few}: the job has ended after step {int(saved)}, which is saved\n")
    made = [int(step) for step in re.findall(r"made step (\d+) on", end.output)]
    assert max(made) <= int(saved) < 75, end.output
    bed.start("node2")
    bed.start("node3")
    write(bed, "node1", "go_on", "")
    again = Job(bed, "--ppn 1 --max-restarts 2 --nnodes 3:4 train.py 100", python=python, setting=EVERY_STEP).end()
    assert again.code == 0, again.output
    assert f"resumed from checkpoints/step-{saved} at step {int(saved)}\n" in again.output
    assert "made step 100 on 4 ranks" in again.output
