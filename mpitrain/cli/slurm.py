"""`mpitrain slurm`: write the script with which sbatch runs a training."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from mpitrain.cli.launching import add_script_arguments, positive, script_of
from mpitrain.errors import ConfigError
from mpitrain.reading import shown

HELP = "write the script with which sbatch runs a training"
PAGE = "how-to/run-jobs.md"

_EPILOG = """\
In the job, `mpitrain run` takes its hosts and ranks from Slurm, and starts its
processes by steps of srun: no node needs ssh.

Some time before the job ends (--warn-seconds), Slurm tells it. The training then
ends after the present step, is saved by mt.Checkpoint, and the script has Slurm
start the job again. It continues from there.

Each task of an --array runs in a folder of its own, run-TASK.

  mpitrain slurm --nodes 4 --time 12:00:00 -o job.sh train.py --epochs 90
  sbatch job.sh
  mpitrain slurm --nodes 2 --gpus-per-node 4 train.py | sbatch
"""
_TIME = re.compile(r"\d{1,7}|\d{1,7}(:\d\d){1,2}|\d{1,7}-\d\d?(:\d\d){0,2}", re.ASCII)
# Slurm may send the signal so much earlier (sbatch(1), --signal).
_EARLIER_SECONDS = 60
_ARRAY = re.compile(r"N(-N(:N)?)?(,N(-N(:N)?)?)*(%N)?".replace("N", "[0-9]{1,9}"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--nodes", type=positive, required=True, metavar="N", help="number of nodes")
    add("--ppn", type=positive, metavar="N", help="ranks on each node (1; with GPUs, one for each GPU)")
    add("--gpus-per-node", type=positive, default=0, metavar="N", help="GPUs on each node")
    add("--cpus-per-task", type=positive, default=0, metavar="N", help="cores of each rank")
    add("--time", type=_time, metavar="T", help="the most time that the job may take, as in 12:00:00")
    add("--partition", metavar="NAME", help="Slurm's partition")
    add("--array", type=_array, metavar="TASKS", help="start one run for each task, as in 0-9")
    add(
        "--warn-seconds",
        type=positive,
        default=120,
        metavar="S",
        help="how long before its end the job is told (120): enough for a step and a checkpoint",
    )
    add("-o", type=Path, dest="output", metavar="FILE", help="write the script to a new file, not to stdout")
    add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the script. Return the exit code."""
    from mpitrain.launch.time_limit import BatchJob, batch_script

    _refuse_early_warning(arguments.time, arguments.warn_seconds)
    words, script = script_of(arguments)
    if arguments.array and words[0] != "-m":  # each task has another folder
        words = [str(Path(words[0]).absolute()), *words[1:]]
    job = BatchJob(
        name=Path(script).stem,
        folder=str(Path.cwd()),
        command=[sys.executable, "-m", "mpitrain", "run", *words],
        written_by=" ".join(shlex.join(["mpitrain", *sys.argv[1:]]).splitlines()),  # a comment has one line
        nodes=arguments.nodes,
        ranks_per_node=arguments.ppn or arguments.gpus_per_node or 1,
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_task=arguments.cpus_per_task,
        time=arguments.time or "",
        partition=arguments.partition or "",
        array=arguments.array or "",
        warn_seconds=arguments.warn_seconds,
    )
    text = batch_script(job)
    if arguments.output is None:
        print(text, end="")
        return 0
    try:
        with arguments.output.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"there is already a file {arguments.output}; remove it, or name another one") from None
    except OSError as error:
        raise ConfigError(f"{arguments.output} cannot be written: {error.strerror}") from None
    print(f"wrote {arguments.output}; submit it: sbatch {shlex.quote(str(arguments.output))}", file=sys.stderr)
    return 0


def _time(text: str) -> str:
    if not _TIME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a time of sbatch; write minutes, or hours:minutes:seconds as in 12:00:00"
        )
    return text


def _seconds(time: str) -> int:
    """Return a time of sbatch in seconds: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if not dash and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds


def _refuse_early_warning(time: str | None, warn_seconds: int) -> None:
    """Refuse a warning that may come at the start of each attempt: the job would be started again without end."""
    seconds = _seconds(time) if time else 0  # for Slurm, 0 means no limit
    if seconds and seconds < (least := warn_seconds + 2 * _EARLIER_SECONDS):
        raise ConfigError(
            f"--time {time} is {seconds} seconds, and with --warn-seconds {warn_seconds} it must be at least {least}: "
            f"Slurm may warn up to {_EARLIER_SECONDS} seconds earlier, and the job needs time to train before. Raise "
            "--time or lower --warn-seconds"
        )


def _array(text: str) -> str:
    if not _ARRAY.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not an array of sbatch; write 0-9, 1,3,5, or 0-9%2 for two at a time"
        )
    return text
