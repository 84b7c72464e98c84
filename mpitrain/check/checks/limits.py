"""The limits of a node for jobs: files, memory, processors, disk; and what dead jobs have left there.

The checks of dead jobs end and remove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from mpitrain.check.check import BY_SSH, Ask, Check, Finding, NotHereError, NotSeenError, Seen, over_ssh
from mpitrain.launch.shared_files import OF_RANKS

# The files that Python, MPI and data need; and the connections to each rank, of which some libraries open several.
_OWN_FILES = 64
_FILES_A_RANK = 4
_FEW_FILES = 1024  # Linux's default; a lower limit was set by a person
_TINY_LOCKED_BYTES = 8 << 20  # Linux's default: 64 KiB, 8 MiB since 5.16
_ENOUGH_LOCKED_BYTES = 16 << 30
_NO_MEMORY_BYTES = 256 << 20
_LITTLE_MEMORY_BYTES = 512 << 20
# The computation by other processes, as a share of all processors.
_BUSY = 0.25
_NO_ROOM_BYTES = 64 << 20
_LITTLE_ROOM_BYTES = 2 << 30
_LITTLE_ROOM = 0.1
# The names of the files of MPICH, Intel MPI and Open MPI (4, 5) in /dev/shm, and of the folders in which a rank of
# mpitrain has the file of Open MPI while MPI starts.
SHM_PATTERNS = ("mpich_shm_*", "Intel_MPI_*", "vader_segment.*", "sm_segment.*", f"{OF_RANKS}*")
# The remedy names each file, because a pattern would also remove files of other users and of newer jobs.
_NAMED = 100
_SHOWN = 4


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"


def _open_files(seen: Seen, node: str) -> Iterator[Finding]:
    most = seen.node(node, "shell")["limits"]["nofile"]
    ranks = 0
    for name in seen.target.names:
        with suppress(NotSeenError):
            ranks += seen.node(name, "processors")["usable"]
    least = _OWN_FILES + _FILES_A_RANK * ranks
    enough = max(_FEW_FILES, least)
    if most is not None and most < enough:
        if seen.target.is_here:
            hard = seen.node(node, "shell")["limits"]["nofile_hard"]
            yield Finding(
                "fail" if most < least else "warn",
                f"a process may have {most} files open",
                f"{enough} or more",
                f"ulimit -n {'unlimited' if hard is None else hard}",
            )
            return
        given = seen.target.settings.get("mpitrain_nofile", enough)
        allowed = f"{enough} or more; {least} is the least, for a rank on each of {ranks} processors"
        remedy = "" if given >= enough else f"{_MORE_FILES} --limit {{limit}} -e mpitrain_nofile={enough}"
        yield Finding("fail" if most < least else "warn", f"a job may have {most} files open", allowed, remedy)


def _locked_memory(seen: Seen, node: str) -> Iterator[Finding]:
    shell = seen.node(node, "shell")
    most = shell["limits"]["memlock_bytes"]
    if not shell["has_rdma"]:
        raise NotHereError("there is no RDMA device, and nothing else locks much memory")
    if most is not None and most < _ENOUGH_LOCKED_BYTES:
        observed = f"there is an RDMA device, but a job may lock only {most / 1024:,.0f} KiB of memory"
        is_fatal = most <= _TINY_LOCKED_BYTES and not seen.target.is_here  # ranks of one machine need no RDMA
        yield Finding("fail" if is_fatal else "warn", observed, "unlimited")


def _memory(seen: Seen, node: str) -> Iterator[Finding]:
    resources = seen.node(node, "resources")
    free, size = resources["available_bytes"], resources["memory_bytes"]
    if free is None or size is None:
        raise NotSeenError("/proc/meminfo does not say how much memory is available")
    if free < _LITTLE_MEMORY_BYTES:
        observed = f"{_mib(free)} of {_mib(size)} of memory is available"
        yield Finding("fail" if free < _NO_MEMORY_BYTES else "warn", observed, _mib(_LITTLE_MEMORY_BYTES))


def _processors(seen: Seen, node: str) -> Iterator[Finding]:
    processors = seen.node(node, "processors")
    machine, usable, quota = processors["machine"], processors["usable"], processors["quota"]
    # On a single machine, the caller has chosen the processors.
    if usable < machine and not seen.target.is_here:
        yield Finding(
            "fail" if usable == 1 else "warn",
            f"a login may use {usable} of {machine} processors",
            "all",
            remedy="ssh {login} 'systemctl show ssh sshd user.slice -p CPUAffinity -p AllowedCPUs; "
            "taskset -cp $(pgrep -o sshd)'  # remove the restriction, then restart ssh",
        )
    elif quota is not None and quota < usable:
        remedy = "ssh {login} 'systemctl show user.slice ssh sshd -p CPUQuotaPerSecUSec'"
        said = f"{usable} processors are usable, but the quota has time for only {quota:g}"
        remedy = f"{remedy}  # or docker run --cpus"
        if seen.target.is_here:  # NumPy starts a thread for each core, and all are stopped when the quota is used up
            remedy = f"export OMP_NUM_THREADS={max(1, int(quota))}"
        yield Finding("warn", said, "time for all of them", remedy=remedy)
    cores = sum(one["cores"] for one in processors["busy"])
    if cores >= _BUSY * machine:
        first = processors["busy"][0]
        more = f" and {len(processors['busy']) - 1} more" if len(processors["busy"]) > 1 else ""
        pids = ",".join(str(one["pid"]) for one in processors["busy"])
        yield Finding(
            "warn",
            f"other processes compute: {first['program']} of {first['user']} (pid {first['pid']}){more}",
            "none: every rank waits for the slowest",
            remedy=f"ssh {{login}} ps -o pid,user,etime,pcpu,comm -p {pids}  # then wait for them, or end them",
        )


def _keeps_shared_memory(seen: Seen, node: str) -> Iterator[Finding]:
    removes = seen.node(node, "resources")["removes_ipc"]
    if removes is None:
        raise NotHereError("there is no systemd-logind")
    if removes:
        yield Finding("warn", "logind has RemoveIPC=yes", "RemoveIPC=no")


def _governors(seen: Seen, nodes: Sequence[str]) -> Iterator[Finding]:
    governors = {}
    slow = set()
    for node in nodes:
        resources = seen.node(node, "resources")
        governors[node] = tuple(resources["governors"])
        # intel_pstate and amd-pstate have a "powersave" that goes up under load; this one never does.
        if "powersave" in resources["governors"] and "acpi-cpufreq" in resources["governor_drivers"]:
            slow.add(node)
    if not any(governors.values()):
        raise NotHereError("no node sets the speed of its processors (virtual machines do not)")
    wants_performance = seen.target.settings.get("mpitrain_tuning") is True
    # The repair sets performance, so a few nodes that have it are right, not the many that have not.
    common = max(governors.values(), key=lambda one: (one == ("performance",), list(governors.values()).count(one)))
    for node, own in governors.items():
        if not own:
            yield Finding("skip", "the node does not set the speed of its processors", where=(node,))
        elif node in slow or (wants_performance and own != ("performance",)) or (own != common and common):
            allowed = (
                "performance" if wants_performance or node in slow else f"{' and '.join(common)}, as on the others"
            )
            yield Finding("warn", f"the CPU governor is {' and '.join(own)}", allowed, where=(node,))


def _disks(seen: Seen, node: str) -> Iterator[Finding]:
    for path in ("/", "/tmp"):
        place = seen.node(node, "resources")["places"][path]
        if place is None:
            yield Finding("fail", f"there is no {path}", "a folder", remedy=f"ssh {{login}} ls -ld {path}")
            continue
        free, size = place["free_bytes"], place["size_bytes"]
        look = f"ssh {{login}} 'sudo du -xh --max-depth=2 {path} | sort -h | tail'  # remove what is not used"
        room = f"{_mib(free)} free of {_mib(size)}"
        if path == "/tmp" and place["is_read_only"]:
            remedy = "ssh {login} 'findmnt -T /tmp; sudo dmesg | tail'  # the kernel turns a broken disk read-only"
            yield Finding("fail", "/tmp is read-only", "a place to write to", remedy=remedy)
        elif place["files"] and not place["free_files"]:
            look = look.replace("-xh", "-x --inodes").replace("-h", "-n")
            yield Finding("fail", f"{path} has no inodes left", "room for files", remedy=look)
        elif size and not place["is_read_only"] and free < _NO_ROOM_BYTES:
            yield Finding("fail", f"{path} has {room}", f"{_mib(_NO_ROOM_BYTES)} or more", remedy=look)
        elif size and not place["is_read_only"] and free < _LITTLE_ROOM_BYTES and free < _LITTLE_ROOM * size:
            yield Finding("warn", f"{path} has {room}", f"{_LITTLE_ROOM:.0%} of it", remedy=look)


_LOCK_ALL = (
    r"printf '* soft memlock unlimited\n* hard memlock unlimited\n' | sudo tee /etc/security/limits.d/mpitrain.conf"
)
_KEEP_IPC = (
    r"sudo mkdir -p /etc/systemd/logind.conf.d && printf '[Login]\nRemoveIPC=no\n' | "
    "sudo tee /etc/systemd/logind.conf.d/mpitrain.conf && sudo systemctl restart systemd-logind"
)
_MORE_FILES = "{set_up} --tags limits"
_JOB = (*BY_SSH, "PRB02", "USR01", "USR02")


def _processes(seen: Seen, node: str) -> Iterator[Finding]:
    processes = seen.node(node, "leftovers")["processes"]
    if not processes:
        return
    programs = list(dict.fromkeys(one["program"] for one in processes))
    pids = [str(one["pid"]) for one in processes]
    oldest = _age(max(one["age_seconds"] for one in processes))
    yield Finding(
        "warn",
        f"{_count(len(processes), 'process', 'es')} of a dead job, the oldest {oldest} old: {_some(programs)} of "
        f"{seen.target.user} (pid {_some(pids)})",
        "none: a rank ends with the job that started it",
        remedy=" ".join(["ssh {login}", *_sudo(seen), "kill -9", *pids]),
    )


def _files(seen: Seen, node: str) -> Iterator[Finding]:
    files = seen.node(node, "leftovers")["files"]
    if not files:
        return
    mib = sum(one["bytes"] for one in files) / 2**20
    remedy = over_ssh("{login}", *_sudo(seen), "rm", "-rf", *(one["path"] for one in files[:_NAMED]))
    if len(files) > _NAMED:
        remedy += f"  # then check again, for the other {len(files) - _NAMED}"
    observed = f"{_count(len(files), 'file')} of dead jobs in /dev/shm, {mib:.0f} MiB"
    yield Finding("warn", observed, "none that no process has mapped", remedy=remedy)


def _sudo(seen: Seen) -> tuple[str, ...]:
    """Return sudo and the shared user, or nothing on a single machine, where the files belong to the user who looks."""
    return () if seen.target.is_here else ("sudo",)


def _some(words: list[str]) -> str:
    return ", ".join(words[:_SHOWN]) + (", ..." if len(words) > _SHOWN else "")


def _count(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{plural if number > 1 else ''}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "less than 1 min"


_NEEDS = (*BY_SSH, "PRB02", "USR01")

ASKS = (
    Ask("resources", "resources", "login"),
    Ask("processors", "processors", "job"),
    Ask("leftovers", "leftovers", "job", lambda _target, _host: {"patterns": SHM_PATTERNS}),
)
CHECKS = (
    Check(
        "LIM01",
        "a job may have many files open",
        _open_files,
        uses=("shell", "processors"),
        alone=True,
        looks="ulimit -n in the shell that mpiexec gets through ssh, which reads no profile. The check fails below 64 "
        "+ 4 for each processor of the cluster, and warns below 1024. Set-up gives 65536 (mpitrain_nofile).",
        why="A rank has several connections to every other rank, in addition to its data files.",
        tag="limits",
        needs=(*_JOB, "SSH09"),
        fault="nofile 64 for the shared user",
    ),
    Check(
        "LIM02",
        "a job may lock memory, if there is RDMA",
        _locked_memory,
        uses=("shell",),
        alone=True,
        remedy_alone=_LOCK_ALL,
        looks="ulimit -l in the same shell; /sys/class/infiniband.",
        why="RDMA sends only from locked memory. MPI fails with larger messages, or falls back to TCP.",
        tag="limits",
        needs=(*_JOB, "SSH09"),
        fault="none on a test bed, which has no RDMA: judged on made-up answers",
    ),
    Check(
        "LIM03",
        "there is memory left",
        _memory,
        uses=("resources",),
        alone=True,
        looks="MemAvailable in /proc/meminfo.",
        why="If memory runs out, the kernel ends the largest process, which is a rank.",
        remedy="ssh {login} 'ps -eo pid,user,rss,args --sort -rss | head'  # end what is not needed",
        needs=BY_SSH,
        fault="none on a test bed, whose memory is the host's: judged on made-up answers",
    ),
    Check(
        "LIM04",
        "the processors are free for jobs",
        _processors,
        uses=("processors",),
        alone=True,
        looks="The affinity of a login against that of process 1, the quota of its cgroup, and processes that have "
        "computed for 5 s or more, for a good part of their life, and still do. A short burst, as of a check, does not "
        "count.",
        why="Every rank waits for the slowest one.",
        needs=_JOB,
        fault="sshd bound to one processor; two processes that compute",
    ),
    Check(
        "LIM05",
        "shared memory stays when the user logs out",
        _keeps_shared_memory,
        uses=("resources",),
        alone=True,
        remedy_alone=_KEEP_IPC,
        looks="The present value of systemd-logind's RemoveIPC.",
        why="logind would remove the shared memory of a running job when the last login of its user ends.",
        tag="limits",
        needs=BY_SSH,
        fault="RemoveIPC=yes",
    ),
    Check(
        "LIM06",
        "the processors run at full speed, on all nodes alike",
        _governors,
        scope="cluster",
        uses=("resources",),
        looks="scaling_governor of every processor. A governor other than performance counts only if tuning was "
        "requested, if nodes differ, or if it is acpi-cpufreq's powersave.",
        why="Every rank waits for the slowest one.",
        remedy="{set_up} --tags tuning --limit {limit} -e mpitrain_tuning=true",
        needs=BY_SSH,
        fault="none on a test bed, whose processors have no governor: judged on made-up answers",
    ),
    Check(
        "LIM07",
        "there is room on the node's own disk",
        _disks,
        uses=("resources",),
        alone=True,
        looks="statvfs of / and /tmp: bytes, inodes, read-only.",
        why="MPI and Python put sockets and files into /tmp. If it is full, they fail with misleading messages.",
        needs=BY_SSH,
        fault="/tmp full",
    ),
    Check(
        "LEF01",
        "no processes of dead jobs",
        _processes,
        uses=("leftovers",),
        alone=True,
        looks="Processes of the shared user that a launcher started as ranks (by their environment) and whose parent "
        "is gone; daemons of Hydra whose parent is gone.",
        why="They still use processors and memory, and may hold the ports of the next job.",
        needs=_NEEDS,
        fault="mpiexec and its daemon killed, the ranks left",
    ),
    Check(
        "LEF02",
        "no shared memory of dead jobs",
        _files,
        uses=("leftovers",),
        alone=True,
        looks="Files of MPI libraries in /dev/shm that belong to the shared user and that none of its processes maps.",
        why="They take memory from the next job until they are removed.",
        needs=_NEEDS,
        fault="a file of MPICH in /dev/shm that no process maps",
    ),
)
