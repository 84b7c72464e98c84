"""The limit of a job's time in a batch system: the script that asks for it, and what follows when it is near.

    batch system ──SIGUSR1──> launcher ──"stop", as `mpitrain tell JOB stop`──> ranks: the present step is the last one
                                     <── saved ── exit code 138: the same command resumes from there

The script that `sbatch` takes runs `mpitrain run` in the allocation. Some time before the end, Slurm sends SIGUSR1 to
the shell of the script (--signal=B:USR1@120), which passes it on. The launcher saves and leaves with code 138, and the
script asks Slurm to start the job again. A signal that comes before the training waits for its first step.
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from mpitrain.launch.log import say
from mpitrain.launch.orders import Orders, teller_name

EXIT_CODE = 128 + signal.SIGUSR1
_AGAIN_SECONDS = 1.0
_early = threading.Event()


def note_early() -> None:
    """Keep a SIGUSR1 that comes before there is a TimeUp: it would kill this process, with the code of a saved job.

    Call this in the main thread.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda *_: _early.set())


class TimeUp:
    """Use this in `with`, in the main thread: inside, SIGUSR1 ends the training in order.

    A parent that ignores the signal has its way, as with `nohup`.

    Attributes:
        stop_wait: has a job that waits for hosts save and end with this exit code; returns None if it does not wait.
    """

    def __init__(self, orders: Orders) -> None:
        """`orders` are those of the job."""
        self.stop_wait: Callable[[int], object] = lambda code: None
        self._orders = orders
        self._told, self._stop = threading.Event(), threading.Event()
        self._is_told = False
        self._thread = threading.Thread(target=self._run, name="time up", daemon=True)

    def __enter__(self) -> TimeUp:
        if signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN:
            signal.signal(signal.SIGUSR1, self._on_signal)
            self._thread.start()
            if _early.is_set():
                self._is_told = True
                self._told.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._told.set()
        if self._thread.ident is not None:
            # The signal may come once more before this process has ended, and would then kill it.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def code(self, code: int) -> int:
        """Return the exit code of the job, from that without the signal."""
        return EXIT_CODE if code == 0 and self._is_told and self._orders.has_stopped else code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True
        self._told.set()  # the thread does the rest: a signal handler must not wait

    def _run(self) -> None:
        self._told.wait()
        if self._stop.is_set():
            return
        say("SIGUSR1: the time of the job is nearly over; the training ends after the present step and is saved")
        teller = teller_name(os.getuid(), "SIGUSR1")
        said = ""
        # A script may have several trainings, one after the other: each of them ends.
        while not self._stop.is_set():
            if self.stop_wait(EXIT_CODE) is not None:
                return
            refused = self._orders.answer({"kind": "stop"}, teller).get("refused", "")
            if refused not in ("", said) and not self._orders.has_stopped:
                said = refused
                say(f"SIGUSR1: {said}")
            self._stop.wait(_AGAIN_SECONDS)


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
# The training is saved and not complete: the next start continues from there.
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
