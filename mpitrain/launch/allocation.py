"""The hosts that a batch system has given to a job, from the variables that it sets there.

    Slurm   SLURM_JOB_NODELIST=n[1-3]  SLURM_TASKS_PER_NODE="2(x2),1"     a step of srun: SLURM_STEP_...
    PBS     PBS_NODEFILE: a file with a line for each rank
    LSF     LSB_DJOB_HOSTFILE: the same;  else LSB_MCPU_HOSTS="a 4 b 4"

Formats: sbatch(1) of Slurm 22.05, qsub(1B) of OpenPBS, and the reference of LSF 10.1. Slurm was tried, the others only
by their formats.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import ConfigError

_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")
# Slurm also numbers batch scripts, interactive shells and the like as steps, from 2^32 - 6 upwards.
FIRST_SPECIAL_SLURM_STEP = 2**32 - 6
# If none of these is set, the job has asked for nodes alone, and srun starts one task on each.
_SLURM_ASKED_TASKS = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
_ANSWER_SECONDS = 30.0
_NAME_HOSTS = "name the hosts: --hosts A,B"
# The variables that make an mpiexec use a batch system by itself.
MARKS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


@dataclass(frozen=True)
class Allocation:
    """What the batch system has given.

    Attributes:
        name: for messages, such as "Slurm job 7".
        slots: how many ranks it starts on each host, in the order of the ranks.
        most_ranks: the most that may be asked for: the tasks, or the CPUs if Slurm has given more of them.
        how_more: what asks for more.
    """

    name: str
    slots: Mapping[str, int]
    most_ranks: int
    how_more: str


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return what this process has been given; None: it is in no job of a batch system.

    Raises:
        ConfigError: the variables contradict each other, or what they name cannot be read.
    """
    if "SLURM_JOB_ID" in environ and "SLURM_JOB_NODELIST" in environ:
        return _of_slurm(environ)
    name = f"PBS job {environ.get('PBS_JOBID', '')}".rstrip()
    if "PBS_NODEFILE" in environ:
        return _of_file(name, "PBS_NODEFILE", environ, "qsub -l select=NODES:mpiprocs=RANKS")
    name = f"LSF job {environ.get('LSB_JOBID', '')}".rstrip()
    if "LSB_DJOB_HOSTFILE" in environ:
        return _of_file(name, "LSB_DJOB_HOSTFILE", environ, "bsub -n RANKS")
    if "LSB_MCPU_HOSTS" in environ:
        return _of_pairs(name, environ["LSB_MCPU_HOSTS"])
    return None


def slurm_hosts(environ: Mapping[str, str], remedy: str = _NAME_HOSTS) -> tuple[str, ...]:
    """Return the hosts of the Slurm job that this process is in; none: it is in no such job.

    `remedy` is what the user can do if Slurm's commands do not work here.

    Raises:
        ConfigError: Slurm cannot expand its own list.
    """
    if "SLURM_JOB_ID" not in environ or not environ.get("SLURM_JOB_NODELIST"):
        return ()
    return _expanded(environ["SLURM_JOB_NODELIST"], remedy)


def slurm_hosts_now(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts that this Slurm job still has of SLURM_JOB_NODELIST; none: Slurm does not say."""
    job = environ["SLURM_JOB_ID"]
    try:
        done = _asked(["squeue", "--noheader", f"--jobs={job}", "--format=%A %N"])
        # Slurm also lists the other tasks of an array, and the other parts of a job of several kinds of nodes.
        lines = [line.split() for line in done.stdout.splitlines()]
        nodes = [words[1] for words in lines if len(words) == 2 and words[0] == job]
        return _expanded(nodes[0]) if nodes else ()
    except (OSError, subprocess.TimeoutExpired, ConfigError):
        return ()


def _of_slurm(environ: Mapping[str, str]) -> Allocation:
    job = f"Slurm job {environ['SLURM_JOB_ID']}"
    step = environ.get("SLURM_STEP_ID", "")
    part = "STEP" if step.isdecimal() and int(step) < FIRST_SPECIAL_SLURM_STEP else "JOB"
    hosts = _expanded(environ.get(f"SLURM_{part}_NODELIST", environ["SLURM_JOB_NODELIST"]))
    variable = "SLURM_STEP_TASKS_PER_NODE" if part == "STEP" else "SLURM_TASKS_PER_NODE"
    if not environ.get(variable):
        raise ConfigError(
            f"{job}: {variable} is not set, as after a change of the job's nodes, so the number of ranks is not known. "
            f"Name the hosts and the ranks: --hosts {','.join(hosts)} --ppn N"
        )
    tasks = _counts(job, variable, environ[variable], len(hosts))
    has_asked = part == "STEP" or any(name in environ for name in _SLURM_ASKED_TASKS)
    slots, most = tasks if has_asked else [1] * len(hosts), sum(tasks)
    if part == "JOB" and (cpus := environ.get("SLURM_JOB_CPUS_PER_NODE")):
        most = max(most, sum(_counts(job, "SLURM_JOB_CPUS_PER_NODE", cpus, len(hosts))))
    return Allocation(job, dict(zip(hosts, slots, strict=True)), most, "sbatch --ntasks=RANKS")


def _counts(job: str, variable: str, text: str, num_hosts: int) -> list[int]:
    """Return the numbers in `2(x3),1`."""
    counts: list[int] = []
    for part in text.split(","):
        count = _COUNT.fullmatch(part)
        times = int(count[2] or 1) if count else 0
        if count is None or times > num_hosts:
            counts = []
            break
        counts += [int(count[1])] * times
    if len(counts) != num_hosts or 0 in counts:
        raise ConfigError(
            f"{job}: {variable} is {text!r}; for its {num_hosts} hosts it must be of the form 2(x3),1, with a number "
            "for each. Name the hosts and the ranks: --hosts A,B --ppn N"
        )
    return counts


@functools.cache
def _expanded(nodes: str, remedy: str = _NAME_HOSTS) -> tuple[str, ...]:
    """Return the hosts of a list such as `n[1-3,7]`. Slurm itself knows all its forms."""
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = _asked(command)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{' '.join(command)!r} cannot be run: {error}. Put Slurm's commands on PATH, or {remedy}"
        ) from None
    if done.returncode != 0 or not done.stdout.split():
        said = done.stderr.strip().partition("\n")[0] or f"exit code {done.returncode}"
        raise ConfigError(f"{' '.join(command)!r} failed: {said}. Make it work here, or {remedy}")
    return tuple(done.stdout.split())


def _asked(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
    )


def _of_file(name: str, variable: str, environ: Mapping[str, str], how_more: str) -> Allocation:
    """Read a file with a line for each rank. A host may come again later in it: then it gets all of them at once."""
    path = Path(environ[variable])
    try:
        words = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"{name}: the file of its hosts, {variable}={path}, cannot be read: {reason}; name the hosts: --hosts A,B"
        ) from None
    if not words:
        raise ConfigError(f"{name}: the file of its hosts, {variable}={path}, is empty; name the hosts: --hosts A,B")
    return Allocation(name, dict(Counter(words)), len(words), how_more)


def _of_pairs(name: str, text: str) -> Allocation:
    words = text.split()
    hosts, counts = words[::2], words[1::2]
    if not words or len(words) % 2 or not all(count.isdecimal() and int(count) for count in counts):
        raise ConfigError(
            f"{name}: LSB_MCPU_HOSTS is {text!r}; it must be of the form 'a 4 b 4'. Name the hosts: --hosts A,B"
        )
    slots: Counter[str] = Counter()
    for host, count in zip(hosts, counts, strict=True):
        slots[host] += int(count)
    return Allocation(name, dict(slots), sum(slots.values()), "bsub -n RANKS")
