"""The remains of dead jobs. These checks end and remove nothing."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.diagnostics.check import BY_SSH, Ask, Check, Finding, Seen
from mpitrain.diagnostics.collect import ClusterStep, PairStep
from mpitrain.diagnostics.remedies import over_ssh
from mpitrain.launch.shared_files import OF_RANKS

# The names of the files of MPICH, Intel MPI and Open MPI (4, 5) in /dev/shm, and of the folders in which a rank of
# mpitrain has the file of Open MPI while MPI starts.
SHM_PATTERNS = ("mpich_shm_*", "Intel_MPI_*", "vader_segment.*", "sm_segment.*", f"{OF_RANKS}*")
# The remedy names each file, because a pattern would also remove files of other users and of newer jobs.
_NAMED = 100
_SHOWN = 4


def _processes(seen: Seen, node: str) -> Iterator[Finding]:
    processes = seen.node(node, "leftovers")["processes"]
    if not processes:
        return
    programs = list(dict.fromkeys(one["program"] for one in processes))
    pids = [str(one["pid"]) for one in processes]
    oldest = _age(max(one["age_seconds"] for one in processes))
    yield Finding(
        "warn",
        (node,),
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
    yield Finding("warn", (node,), observed, "none that no process has mapped", remedy=remedy)


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

ASKS = (Ask("leftovers", "leftovers", "job", lambda _target, _host: {"patterns": SHM_PATTERNS}),)
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {}
CHECKS = (
    Check(
        "LEF01",
        "no processes of dead jobs",
        "quick",
        "node",
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
        "quick",
        "node",
        _files,
        uses=("leftovers",),
        alone=True,
        looks="Files of MPI libraries in /dev/shm that belong to the shared user and that none of its processes maps.",
        why="They take memory from the next job until they are removed.",
        needs=_NEEDS,
        fault="a file of MPICH in /dev/shm that no process maps",
    ),
)
