"""The last line of `mpitrain run` after a kill: who was killed, where and by whom; and what is left in /tmp."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.outcome import failed
from jobs import VENVS, Job, run_command

HERE = re.escape(socket.gethostname())
DAEMON_FILES = "/tmp/hydra_hwloc_xmlfile_*"

SCRIPT = """
import os, pathlib, signal, sys, time
import mpitrain as mt

def parent_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

# The guard, if it waits for the end of this process, by a descriptor of it.
def guard_of(pid):
    for path in pathlib.Path("/proc").glob("[0-9]*/fdinfo/*"):
        try:
            if path.parts[2] != str(os.getpid()) and f"\\nPid:\\t{pid}\\n" in path.read_text():
                return path.parts[2]
        except OSError:
            pass
    return ""

# How often a process has slept. The guard sleeps between two looks at the ranks.
def num_sleeps(pid):
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("\\nvoluntary_ctxt_switches:")[2].split()[0])

daemon = os.getppid()
# MPICH's daemon is a child of mpiexec; the ranks of Open MPI are children of mpiexec itself.
mpiexec = parent_of(daemon) if "PMI_RANK" in os.environ else daemon
BEFORE
world = mt.init()
for path in pathlib.Path(f"/proc/{daemon}/fd").iterdir():
    if path.exists() and "hydra_hwloc_xmlfile" in os.readlink(path):
        print("the daemon's file:", os.readlink(path))
world.barrier()
if world.rank == 1:
    while not (guard_of(os.getpid()) and guard_of(daemon)):
        time.sleep(0.01)
    WHAT
world.barrier()
"""


def run(tmp_path: Path, vendor: str, what: str, before: str = "") -> Job:
    """Start 3 ranks without --restarts. Rank 1 runs this."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("BEFORE", before).replace("WHAT", what))
    job = run_command([str(VENVS[vendor] / "bin/python"), "-m", "mpitrain", "run", "-n", "3", str(path)])
    failed(job)
    left = [name for name in re.findall(r"the daemon's file: (\S+)", job.stdout) if Path(name).exists()]
    assert left == [], job.output
    return job


def test_mpiexec_was_killed(tmp_path: Path, vendor: str) -> None:
    """mpiexec is to blame, and no rank is, whatever the ranks did afterwards."""
    job = run(tmp_path, vendor, "os.kill(mpiexec, signal.SIGKILL); time.sleep(1000)")
    assert job.code == 137, job.output
    assert job.stderr.endswith(f"mpitrain: mpiexec itself was killed on {socket.gethostname()}, by signal 9\n"), job
    assert not re.search(r"^mpitrain: ranks? \d", job.stderr, re.M), job.output


def test_the_daemon_of_mpich_was_killed(tmp_path: Path) -> None:
    """mpiexec may or may not notice. The daemon leaves a file in /tmp, which the guard removes."""
    job = run(tmp_path, "mpich", "os.kill(daemon, signal.SIGKILL); time.sleep(1000)")
    assert "the daemon's file: /tmp/" in job.stdout, job.output
    killed = rf"mpitrain: the process of mpiexec on {HERE} that started ranks 0-2 (was killed|has gone)"
    assert re.search(killed, job.stderr), job.output


KILLED = "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)"


@pytest.mark.parametrize(("what", "code"), [("raise ValueError('bang')", 1), ("raise KeyboardInterrupt", 130)])
def test_mpiexec_tells_of_a_rank_that_it_has_ended_itself(tmp_path: Path, what: str, code: int) -> None:
    """MPICH's mpiexec sometimes reports such a rank; here it always does. The job's exit code is the failed rank's."""
    mpiexec, path = tmp_path / "mpiexec", tmp_path / "script.py"
    real = VENVS["mpich"] / "bin/mpiexec"
    mpiexec.write_text(f"#!/bin/sh\n{real} \"$@\" || {{ echo '{KILLED}'; exit 9; }}\n")
    mpiexec.chmod(0o755)
    path.write_text(SCRIPT.replace("BEFORE", "").replace("WHAT", what))
    command = [str(VENVS["mpich"] / "bin/python"), "-m", "mpitrain", "run", "--mpiexec", str(mpiexec), "-n", "3"]
    job = run_command([*command, str(path)])
    failed(job, "mpitrain: rank 1 on ")
    assert job.code == code, job.output
    assert KILLED not in job.output  # another rank than ours says it


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A new control group with a limit of 256 MiB. Return the file that takes its processes."""
    name = f"mpitrain-test-{os.getpid()}"
    for group, limit, needed in (
        (Path("/sys/fs/cgroup/memory", name), "memory.limit_in_bytes", "memory.oom_control"),
        (Path("/sys/fs/cgroup", name), "memory.max", "memory.events"),
    ):
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / needed).exists() or not (group / limit).exists():
                continue
            (group / limit).write_text(str(256 * 2**20))
            if (group / "memory.swap.max").exists():
                (group / "memory.swap.max").write_text("0")
            yield group / "cgroup.procs"
            return
        finally:
            deadline = time.monotonic() + 60
            while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)
            group.rmdir()
    pytest.skip("no control group with a limit of memory can be made here")


def test_the_kernel_took_a_rank_for_want_of_memory(tmp_path: Path, vendor: str, small_group: Path) -> None:
    """The real out-of-memory killer, in a control group of one rank."""
    before = f"""
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    pathlib.Path({str(small_group)!r}).write_text(str(os.getpid()))
"""
    # The guard notes the group of a rank in the same look in which it first sees the rank.
    what = """
    guard = guard_of(os.getpid())
    first = num_sleeps(guard)
    while num_sleeps(guard) < first + 2:
        time.sleep(0.01)
    blocks = [bytearray(b'x' * 2**20) for _ in range(1024)]
"""
    job = run(tmp_path, vendor, what, before)
    kernel = r'(killed it for want of memory: ".*Killed process \d+ .*"|may have .*: oom_kill in \S+ rose from 0 to 1)'
    words = rf"mpitrain: rank 1 on {HERE} was killed by signal 9: the kernel {kernel}; mpiexec ended the others\n"
    assert re.search(rf"(^|\n){words}$", job.stderr), job.output
