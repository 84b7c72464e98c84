"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each of three nodes, all in one folder.

The three nodes are one machine: each slurmd has a name (-N) and a port of its own. Or they are hosts
(pretended_hosts.py). The daemons use no file outside of the folder, and no service of the machine. The kernel ends them
with the process that has started them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from free_ports import free_port
from jobs import HANG_SECONDS, REPOSITORY, TOKEN, Job, clean_environment, kill_all, processes_of, run_command, until
from pretended_hosts import NAMES, Hosts, address

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "setpriv")
# The first one has a name that this machine knows, so that `mpitrain run` can be tried on it.
NODES = (socket.gethostname(), "n2", "n3")
# `task/none` binds nothing, and `linuxproc` needs no control groups: the tests are about neither. The three timeouts
# are longer than Slurm's own (10, 2 and 10 seconds), because other tests keep the machine busy.
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}({address})
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=1
MessageTimeout=60
TCPTimeout=30
BatchStartTimeout=60
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP MaxTime=INFINITE PriorityTier=2
"""
_SIZE = "CPUs=4 RealMemory=100 Gres=gpu:2"
# A GPU is a file to Slurm; any device will do.
_GPUS = "NodeName={nodes} Name=gpu File=/dev/null,/dev/zero\n"


def why_not() -> str:
    """Why this machine runs no Slurm; "": it does."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    if missing := [name for name in _PROGRAMS if shutil.which(name, path=path) is None]:
        packages = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
        return f"there is no {', '.join(missing)}: {packages}"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """Use this in `with`: inside, jobs can be submitted; at the end nothing of it is left."""

    def __init__(self, folder: Path, hosts: Hosts | None = None) -> None:
        self.folder, self._hosts = folder, hosts
        self.nodes = NAMES if hosts else NODES
        self._token = uuid.uuid4().hex
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._conf = folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which commands find this Slurm."""
        return {"SLURM_CONF": str(self._conf)}

    def __enter__(self) -> Slurm:
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir(mode=0o700)
        munge = self.folder / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        try:
            files = {name: f"{munge}/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")}
            options = [f"--{name}={path}" for name, path in files.items()]
            # --force: as root, munged wants no folder above that others may write, and /tmp is one.
            self._start("munged", "--foreground", "--force", f"--key-file={munge}/key", *options)
            self._await((munge / "socket").exists, "munged")
            self._configure()
            self._start("slurmctld", "-D", "-f", str(self._conf))
            for node in self.nodes:
                self._start("slurmd", "-D", "-N", node, "-f", str(self._conf), node=node)
            self._await(lambda: self.states() == ["idle"] * len(self.nodes), "nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 1:
            self._ask("scancel", "--user", "root")
            deadline = time.monotonic() + 30.0
            while self._ask("squeue", "--noheader").stdout.strip() and time.monotonic() < deadline:
                time.sleep(0.1)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20.0)
        kill_all(self._token)
        for daemon in self._daemons:
            daemon.wait()
        assert processes_of(self._token, patience=30.0) == []

    def _configure(self) -> None:
        host = self.nodes[0]
        names = [(name, name if self._hosts else host, self._address(name)) for name in self.nodes]
        lines = [
            f"NodeName={name} NodeHostname={own} NodeAddr={where} Port={free_port()} {_SIZE}"
            for name, own, where in names
        ]
        text = _CONFIGURATION.format(
            host=host,
            address=self._address(host),
            port=free_port(),
            folder=self.folder,
            user="root",
            nodes="\n".join(lines),
        )
        self._conf.write_text(text)
        (self.folder / "gres.conf").write_text(_GPUS.format(nodes=",".join(self.nodes)))

    def _address(self, node: str) -> str:
        return address(node) if self._hosts else "127.0.0.1"

    def on(self, node: str, cwd: Path | None = None) -> list[str]:
        """The words that run a command on a node; none: all nodes are this machine."""
        return self._hosts.enter(node, cwd or Path.cwd()) if self._hosts else []

    def _start(self, *command: str, node: str = "") -> None:
        environment = clean_environment(self.environment) | {TOKEN: self._token}
        environment["PATH"] += ":/usr/sbin:/sbin"
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *self.on(node or self.nodes[0]), *command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _await(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> object:
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not ended, f"{ended} ended: {(self.folder / 'daemons.log').read_text()}"
            return condition()

        until(holds, f"no {what}")

    def states(self) -> list[str]:
        """The state of each node; none: slurmctld does not answer yet."""
        return self._ask("sinfo", "--noheader", "--Node", "--partition=all", "--format=%t").stdout.split()

    def command(self, *words: str) -> str:
        """Run a command of Slurm, and return what it printed."""
        done = self._ask(*words)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def _ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.on(self.nodes[0]), *words],
            env=clean_environment(self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )

    def run(self, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Job:
        """Run a command that may start a job, to its end."""
        line = [*self.on(self.nodes[0], cwd), *words]
        return run_command(line, env={**self.environment, **(env or {})}, cwd=cwd or REPOSITORY)

    def submit(self, script: Path, *options: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a batch script, and return the id of its job. The script runs in its own folder."""
        done = subprocess.run(
            [*self.on(self.nodes[0], script.parent), "sbatch", "--parsable", *options, str(script)],
            env=clean_environment({**self.environment, **(env or {})}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            cwd=script.parent,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, by the names of `scontrol show job`."""
        shown = self.command("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, job: str) -> dict[str, str]:
        """Wait for the end of a job, and return its state then."""
        until(lambda: self.state(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), f"job {job} runs")
        return self.state(job)

    def start_again(self, job: str, output: Path) -> None:
        """Wait until a job that was requeued, and writes to `output`, has been started again."""

        def has_started() -> bool:
            state = self.state(job)
            assert state["JobState"] not in ("FAILED", "CANCELLED"), f"{state}\n{output.read_text()}"
            # Slurm waits two minutes, because its nodes refuse a credential as old as the end of the first start. It
            # counts in whole seconds.
            if state["JobState"] == "PENDING" and state["Reason"] == "BeginTime":
                time.sleep(2.0)
                self._ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # fails if the job has begun meanwhile
            return state["JobState"] in ("RUNNING", "COMPLETED")

        until(has_started, f"job {job} does not start again")
