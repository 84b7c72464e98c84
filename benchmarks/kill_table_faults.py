"""The faults of kill_table.py: what is done to a job over several hosts, and what the job must say of it."""

from __future__ import annotations

import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kill_table import Trial

NODES = ("node1", "node2", "node3", "node4")
OFFSET, LIBRARY = "/tmp/kill-offset", "/opt/kill-clock.so"
OUTAGE_SECONDS = 20.0
LIMIT_BYTES = 64 << 20
GROUP = Path("/sys/fs/cgroup/memory/kill-table")
_KILLED = r"(was killed by signal 9|ended without a message).*$"


@dataclass(frozen=True)
class Rank:
    """A rank, and its process and the process that started it, on its host."""

    number: int
    host: str
    pid: int
    parent: int


@dataclass(frozen=True)
class Hit:
    """What was hit.

    Attributes:
        what: it, in words.
        pattern: of what is to be said of it; "": nothing is.
        ranks: those that are to blame.
        num_failed: how many attempts fail because of it.
        cut_off: the hosts that cannot be reached, and whose processes are to end by themselves.
        is_undone: the job has gone on, or goes on without another attempt.
    """

    what: str
    pattern: str = ""
    ranks: tuple[int, ...] = ()
    num_failed: int = 1
    cut_off: tuple[str, ...] = ()
    is_undone: bool = False


@dataclass(frozen=True)
class Fault:
    """How to hit a job.

    Attributes:
        hit: does it.
        is_harmless: no attempt fails because of it.
        needs_disk: the job saves checkpoints on the small disk.
        variables: for the launcher.
        prepare, undo: before the start of the job, and after its end.
    """

    hit: Callable[[Trial], Hit]
    is_harmless: bool = False
    needs_disk: bool = False
    variables: str = ""
    prepare: Callable[[Trial], object] = field(default=lambda _: None)
    undo: Callable[[Trial], object] = field(default=lambda _: None)


def _drawn(job: Trial) -> Rank:
    return random.choice(list(job.ranks.values()))


def _other() -> str:
    return random.choice(NODES[1:])


def _rank(job: Trial) -> Hit:
    rank = _drawn(job)
    job.on(rank.host, f"kill -KILL {rank.pid}")
    return Hit(f"rank {rank.number} on {rank.host}", rf"rank {rank.number} on {rank.host} {_KILLED}", (rank.number,))


def _stop(job: Trial) -> Hit:
    rank = _drawn(job)
    job.on(rank.host, f"kill -STOP {rank.pid}")
    says = rf"nothing has moved for 12 s .*\brank {rank.number} on {rank.host} is stopped"
    return Hit(f"rank {rank.number} on {rank.host} stopped", says, (rank.number,))


def _mpiexec(job: Trial) -> Hit:
    job.on("node1", f"kill -KILL {_pid_of_mpiexec(job)}")
    return Hit("mpiexec", "mpiexec itself was killed on node1, by signal 9")


def _pid_of_mpiexec(job: Trial) -> int:
    return int(job.on("node1", f"pgrep -P {job.launcher()} -x 'mpiexec|prterun|mpiexec.hydra'"))


def _proxy(job: Trial) -> Hit:
    mpiexec, rank = _pid_of_mpiexec(job), _drawn(job)
    # Open MPI has no other one on node1. Where ranks are forks of a warm interpreter, their parent is not the proxy.
    while rank.parent == mpiexec and rank.host == "node1":
        rank = _drawn(job)
    job.on(rank.host, f"kill -KILL {rank.parent}")
    return Hit(f"proxy on {rank.host}", rf"the process of mpiexec on {rank.host} .*(was killed|has gone)")


def _agent(job: Trial) -> Hit:
    host = random.choice(NODES)
    job.on(host, f"kill -KILL {agents(job, host)[0]}")
    return Hit(f"agent on {host}", rf"{host}: the agent of the job there was killed")


def agents(job: Trial, host: str) -> list[int]:
    """The agents on a host, but not what they have forked."""
    found = job.on(host, "pgrep -u cluster -f '^[^ ]*python[^ ]* -I -u -c .import json'").split()
    parents = {pid: job.on(host, f"ps -o ppid= -p {pid}").strip() for pid in found}
    return sorted(int(pid) for pid, parent in parents.items() if parent not in found and parent != "1")


def _launcher(job: Trial) -> Hit:
    job.kill_launcher("KILL")
    until = time.monotonic() + 60
    lost = r"job (\w+) has lost its launcher; its state is kept in memory until"
    while not (found := re.findall(lost, job.output())) and time.monotonic() < until:
        time.sleep(0.2)
    if not found:
        return Hit("launcher", lost)
    job.launch(f"resume {found[-1]}", [])
    return Hit("launcher", lost, num_failed=0)


def _away(do: str) -> Callable[[Trial], Hit]:
    def hit(job: Trial) -> Hit:
        host = _other()
        getattr(job.bed, do)(host)
        cut_off = (host,) if do == "cut" else ()
        return Hit(f"{do} of {host}", rf"{host}(: no message from this host since| fell silent)", cut_off=cut_off)

    return hit


def _short_cut(job: Trial) -> Hit:
    host = _other()
    job.bed.cut(host)
    time.sleep(3)
    job.bed.heal(host)
    return Hit(f"cable of {host} out for 3 s", num_failed=0)


def _address(job: Trial) -> Hit:
    host = _other()
    _move(job, host, job.bed.address(host), _new_address(job, host))
    return Hit(f"address of {host}", rf"{host}(: no message from this host since| fell silent)", cut_off=(host,))


def _new_address(job: Trial, host: str) -> str:
    return job.bed.address(host).rpartition(".")[0] + ".99"


def _move(job: Trial, host: str, old: str, new: str) -> None:
    """Give a host another address, if it has the old one."""
    words = job.on(host, f"ip -o -4 addr show to {old}").split()
    if words:
        job.on(host, f"ip addr del {old}/24 dev {words[1]}; ip addr add {new}/24 dev {words[1]}")


def _old_address(job: Trial) -> None:
    for host in NODES[1:]:
        _move(job, host, _new_address(job, host), job.bed.address(host))


def _disk(job: Trial) -> Hit:
    says = "training continues, and the next save tries again. Earlier checkpoints are intact"
    job.on("node1", "dd if=/dev/zero of=/srv/small/full bs=64k || true")
    job.wait_for(says, OUTAGE_SECONDS)
    job.on("node1", "rm -f /srv/small/full")
    return Hit("disk full", says, num_failed=0)


def _share(job: Trial) -> Hit:
    job.on("node1", "systemctl stop nfs-server")
    time.sleep(OUTAGE_SECONDS)
    job.on("node1", "systemctl start nfs-server")
    return Hit(f"NFS server stopped for {OUTAGE_SECONDS:.0f} s", num_failed=0)


def _memory(job: Trial) -> Hit:
    """The kernel's out-of-memory killer takes a rank, in a control group of its own with a limit."""
    rank = _drawn(job)
    pid = _pid_here(job, rank)
    if not GROUP.parent.exists():
        raise SystemExit("this fault needs version 1 of the control groups")
    GROUP.mkdir(exist_ok=True)
    (GROUP / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    (GROUP / "cgroup.procs").write_text(str(pid))
    job.on("node1", f"touch {job.folder}/grow-{rank.number}; sleep 2; rm -f {job.folder}/grow-*")
    says = rf"rank {rank.number} on {rank.host} was killed by signal 9: the kernel"
    return Hit(f"memory of rank {rank.number} on {rank.host}", says, (rank.number,))


def _pid_here(job: Trial, rank: Rank) -> int:
    """The process of a rank as this machine numbers it."""
    inside = Path(f"/proc/{job.bed.node(rank.host).pid()}/ns/pid").readlink()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            is_there = (status.parent / "ns/pid").readlink() == inside
            numbers = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()
        except OSError:
            continue
        if is_there and numbers[-1] == str(rank.pid):
            return int(status.parent.name)
    raise SystemExit(f"no process of {rank}")


def _no_limit(_: Trial) -> None:
    if GROUP.exists():
        GROUP.rmdir()


# Adds to the clock what a file says, as if it was set: the monotonic one stays. (libfaketime moves that, too.)
CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long offset(void) {
    char text[32] = {0};
    int file = open("OFFSET", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
    return atol(text);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, clock, now);
    if (!code && clock == CLOCK_REALTIME) now->tv_sec += offset();
    return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int code = syscall(SYS_gettimeofday, now, zone);
    if (!code) now->tv_sec += offset();
    return code;
}
time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
""".replace("OFFSET", OFFSET)


def _offset(job: Trial) -> None:
    """On node3, all that a login starts has a clock that can be set."""
    root = Path(f"/proc/{job.bed.node('node3').pid()}/root")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "clock.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", path, "-xc", "-"], input=CLOCK, text=True, check=True)
        (root / LIBRARY[1:]).write_bytes(path.read_bytes())
    job.on("node3", f"chmod 755 {LIBRARY}; echo 0 > {OFFSET}; echo LD_PRELOAD={LIBRARY} >> /etc/environment")


def _no_offset(job: Trial) -> None:
    job.on("node3", f"rm -f {OFFSET} {LIBRARY}; sed -i '/^LD_PRELOAD=/d' /etc/environment")


def _clock(job: Trial) -> Hit:
    job.on("node3", f"echo {random.choice([3600, -3600])} > {OFFSET}")
    return Hit("clock of node3, an hour", num_failed=0)


def _second(job: Trial) -> Hit:
    """While the job recovers from a death, another rank dies, as soon as it has a process again."""
    first = _rank(job)
    until = time.monotonic() + 60
    while (new := {rank for rank in job.processes().values() if rank != job.ranks[rank.number]}) == set():
        if time.monotonic() > until:
            break
    if not new:
        return Hit(f"{first.what}, no second", "another attempt", first.ranks)
    rank = random.choice(sorted(new, key=lambda rank: rank.number))
    job.on(rank.host, f"kill -KILL {rank.pid}")
    says = rf"attempt 2 of .* failed.*: rank {rank.number} on {rank.host} {_KILLED}"
    what = f"{first.what}, then rank {rank.number} on {rank.host}"
    return Hit(what, says, (*first.ranks, rank.number), num_failed=2)


FAULTS = {
    "rank": Fault(_rank),
    "stop": Fault(_stop, variables="MPITRAIN_HANG_SECONDS=12"),
    "mpiexec": Fault(_mpiexec),
    "proxy": Fault(_proxy),
    "agent": Fault(_agent),
    "launcher": Fault(_launcher),
    "power": Fault(_away("kill")),
    "cable": Fault(_away("cut")),
    "short cut": Fault(_short_cut, is_harmless=True),
    "freeze": Fault(_away("freeze")),
    "disk": Fault(_disk, is_harmless=True, needs_disk=True),
    "share": Fault(_share, is_harmless=True),
    "memory": Fault(_memory, undo=_no_limit),
    "clock": Fault(_clock, is_harmless=True, prepare=_offset, undo=_no_offset),
    "address": Fault(_address, undo=_old_address),
    "second": Fault(_second),
}
