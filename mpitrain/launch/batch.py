"""The job of a batch system that this process is in: its hosts, and the way to them by a step of Slurm.

    Slurm   SLURM_JOB_NODELIST=n[1-3]  SLURM_TASKS_PER_NODE="2(x2),1"     a step of srun: SLURM_STEP_...
    PBS     PBS_NODEFILE: a file with a line for each rank
    LSF     LSB_DJOB_HOSTFILE: the same;  else LSB_MCPU_HOSTS="a 4 b 4"

Formats: sbatch(1) of Slurm 22.05, qsub(1B) of OpenPBS, and the reference of LSF 10.1. Slurm was tried, the others only
by their formats.

On a host of this process's Slurm job a step of srun takes the place of ssh. So a job needs neither ssh on the nodes
nor a key. Slurm knows the step, and ends it with the job.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.reading import read_text, shown, whole

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
    part = "JOB" if whole(step, 0, FIRST_SPECIAL_SLURM_STEP - 1) is None else "STEP"
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
            f"{job}: {variable} is {shown(text)}; for its {num_hosts} hosts it must be of the form 2(x3),1, with a "
            "number for each. Name the hosts and the ranks: --hosts A,B --ppn N"
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

    def refusal(said: str) -> ConfigError:
        return ConfigError(f"{said}; {_NAME_HOSTS}")

    called = f"{name}: the file of its hosts, {variable}={path},"
    words = read_text(path, refusal, called=called).split()
    if not words:
        raise refusal(f"{called} is empty")
    return Allocation(name, dict(Counter(words)), len(words), how_more)


def _of_pairs(name: str, text: str) -> Allocation:
    words = text.split()
    hosts, counts = words[::2], words[1::2]
    if not words or len(words) % 2 or not all(whole(count, 1, 10**6) for count in counts):
        raise ConfigError(
            f"{name}: LSB_MCPU_HOSTS is {shown(text)}; it must be of the form 'a 4 b 4'. Name the hosts: --hosts A,B"
        )
    slots: Counter[str] = Counter()
    for host, count in zip(hosts, counts, strict=True):
        slots[host] += int(count)
    return Allocation(name, dict(slots), sum(slots.values()), "bsub -n RANKS")


_GPUS = "CUDA_VISIBLE_DEVICES"
# srun would take these of the batch script for the step, which is one task that may use all that the job has there.
_OF_JOB = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    *("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE", "SLURM_CPUS_PER_TASK"),
    *("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"),
    *("SLURM_GPU_BIND", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_DISTRIBUTION", "SLURM_HINT", "SLURM_EXACT"),
    *("SLURM_EXCLUSIVE", "SLURM_WHOLE", "SLURM_LABELIO", "SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_STDINMODE"),
    *("SLURM_KILL_BAD_EXIT", "SLURM_WAIT", "SLURM_TIMELIMIT", "SLURM_MULTI_PROG", "SLURM_NO_KILL"),
)
# The step shares what the job has with other steps, is bound to no cores, and tells its processes nothing of MPI.
_SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none", "--quiet")


def step_on(host: str) -> list[str]:
    """Return the words that run a program on `host` as a step of this Slurm job; none: the host is not of the job.

    Raises:
        ConfigError: Slurm cannot expand its own list of hosts.
    """
    hosts = slurm_hosts(os.environ, "unset SLURM_JOB_ID to use ssh")
    return [*step(), f"--nodelist={host}"] if host in hosts else []


def step() -> list[str]:
    """Return the words that are the same for all hosts of the job."""
    unset = [word for name in _OF_JOB if name in os.environ for word in ("-u", name)]
    return ["env", *unset, *_SRUN, f"--jobid={os.environ['SLURM_JOB_ID']}"]


def advice_on_lost(hosts: Collection[str]) -> str:
    """Return what to do about `hosts`, which do not answer, if Slurm has taken one from this job; "": it has not.

    It does so where a node fails, and where the user makes the job smaller. The variables of the job stay as they were.
    """
    of_job = [host for host in hosts if step_on(host)]
    rest = slurm_hosts_now(os.environ) if of_job else ()
    if not rest or set(of_job) <= set(rest):
        return ""
    job, names = os.environ["SLURM_JOB_ID"], ",".join(rest)
    return (
        f"Slurm job {job} has only {names} now, and this shell still has the list of before. "
        f"Name the hosts and the ranks: --hosts {names} --ppn N. "
    )


def gpus_of_step(host: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable that names the GPUs which Slurm has given to the job on `host`, if it is not as here.

    mpiexec gives all ranks the variables of this process, and Slurm may have chosen other GPUs on another host.
    """
    gpus = facts.get("gpus")
    return {_GPUS: gpus} if gpus is not None and gpus != os.environ.get(_GPUS) and step_on(host) else {}
