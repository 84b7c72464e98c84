"""The way to a host of this process's Slurm job: a step of srun, in place of ssh.

So a job needs neither ssh on the nodes nor a key. Slurm knows the step, and ends it with the job.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from mpitrain.launch.allocation import slurm_hosts, slurm_hosts_now

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
