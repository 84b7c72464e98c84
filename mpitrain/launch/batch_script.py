"""The script that `sbatch` takes: it runs `mpitrain run` in the allocation, and goes on after the end of its time.

A pure function. Some time before the end, Slurm sends SIGUSR1 to the shell of the script (--signal=B:), which passes it
on. The launcher then saves and leaves with code 138 (time_up.py), and the script asks Slurm to start the job again.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.launch.time_up import EXIT_CODE

_SCRIPT = """\
#!/bin/bash
# Written by `{written_by}`. Submit it with sbatch.
{options}

{enter}{command} &
job=$!
# Slurm tells only this shell that the time is nearly over. `wait` ends at each signal.
trap 'told=1; kill -USR1 $job' USR1
trap 'told=1; kill -TERM $job' TERM
code=127
told=1
while [ $told = 1 ]; do
    told=0
    wait $job
    status=$?
    [ $status = 127 ] || code=$status
done
# The training is saved and not complete: the next start goes on from there.
if [ "$code" = {saved} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
# Each task of an array has a folder: what a run writes has the same names in each.
_ENTER = """mkdir -p "run-$SLURM_ARRAY_TASK_ID" && cd "run-$SLURM_ARRAY_TASK_ID" || exit 1
"""


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What the script asks of Slurm.

    Attributes:
        name: of the job.
        folder: in which it runs, absolute.
        command: what runs there, such as python -m mpitrain run train.py.
        written_by: the command that has written the script.
        nodes: how many.
        ranks_per_node: on each.
        gpus_per_node: on each; 0: the job asks for none.
        cpus_per_task: cores of each rank; 0: as Slurm has it.
        time: the most time that the job may take, in a form of sbatch; "": the limit of the partition.
        partition: "": Slurm's default.
        array: the tasks of an array, such as 0-9; "": the job is none.
        warn_seconds: how long before its end the job is told.
    """

    name: str
    folder: str
    command: Sequence[str]
    written_by: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int = 0
    cpus_per_task: int = 0
    time: str = ""
    partition: str = ""
    array: str = ""
    warn_seconds: int = 120


def batch_script(job: BatchJob) -> str:
    """Return the text of the script."""
    output = "%A_%a" if job.array else "%j"
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-node": job.gpus_per_node,
        "time": job.time,
        "partition": job.partition,
        "array": job.array,
        "chdir": job.folder,
        "output": f"{job.name}-{output}.out",
        "open-mode": "append",  # a job that is started again adds to its output
        "signal": f"B:USR1@{job.warn_seconds}",
    }
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options.items() if value]
    return _SCRIPT.format(
        written_by=job.written_by,
        options="\n".join([*lines, "#SBATCH --requeue"]),
        enter=_ENTER if job.array else "",
        command=shlex.join(job.command),
        saved=EXIT_CODE,
    )
