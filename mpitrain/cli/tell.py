"""`mpitrain tell JOB WORD`: send a command to a running job: pause, save, change a value, and more."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpitrain.cli.changing import complete_by, ids_here, show_answer
from mpitrain.cli.ps import add_host_arguments
from mpitrain.cli.terminal_text import print_object

if TYPE_CHECKING:
    from mpitrain.launch.placement import Placement

HELP = "tell a job to pause, save, stop, or change a value"
PAGE = "how-to/monitor.md"

_EPILOG = """\
  pause              wait after the present step
  resume             continue after a pause
  save               save a checkpoint now
  stop               end the run after the present step, and save it
  rate FACTOR        multiply the learning rate, as in `rate 0.5`
  set NAME=VALUE     set a value that the script declares with mt.tunable
  stacks             show what every rank does now, with its stack
  kill               end the job, as `mpitrain kill` does

Without an order, tell lists what the job can be told, with its present values.
JOB may be left out if one job runs. All ranks do what they are told after the
same step. What lasts holds after a restart, and in checkpoints.

Run this on a node of the cluster, or where `mpitrain run` runs.

  mpitrain tell
  mpitrain tell 1a2b3c4d rate 0.5
  mpitrain tell 1a2b3c4d set dropout=0.2
"""

_FACTORS = 0.01, 100.0  # of the learning rate; others are asked about

# The words, each with the number of words that follow.
_WORDS = {"pause": 0, "resume": 0, "save": 0, "stop": 0, "rate": 1, "set": 1, "stacks": 0, "kill": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add_host_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="without an order: print what the job can be told as one JSON object"
    )
    parser.add_argument("--yes", action="store_true", help="multiply the learning rate by any factor, unasked")
    words = parser.add_argument(
        "words", nargs="*", metavar="[JOB] [WORD]", help="the id of the job, and what to tell it"
    )
    complete_by(words, _completions)


def run(arguments: argparse.Namespace) -> int:
    """Send the command. Return 0 if the job carries it out."""
    from mpitrain.cli import kill
    from mpitrain.cli.terminal_text import wrapped
    from mpitrain.launch.hosts import place_ranks
    from mpitrain.launch.jobs import tell_launcher

    words = list(arguments.words)
    job = words.pop(0) if words and words[0] not in _WORDS else ""
    order = _order(words)
    if arguments.json and words:
        from mpitrain.errors import ConfigError

        raise ConfigError(f"--json prints what the job can be told; leave out {words[0]}")
    if order["kind"] == "rate" and not arguments.yes and not _is_meant(order["value"]):
        return 1
    placement = place_ranks(arguments.hosts, arguments.inventory, None, 1)
    if not job:
        job, problem = _only_job(placement)
        if problem:
            print(wrapped(f"mpitrain tell: {problem}", sys.stderr), file=sys.stderr)
            return 1
    if order["kind"] == "kill":
        return kill.run(argparse.Namespace(hosts=arguments.hosts, inventory=arguments.inventory, job=job))
    answer, wrong = tell_launcher(placement, job, {"tell": order, "from": socket.gethostname()})
    if "can" in answer and arguments.json:
        print_object({"job": job, "step": int(answer["step"]), **answer["can"]})
        return 0
    if "can" in answer:
        print(wrapped(_listed(job, int(answer["step"]), answer["can"]), sys.stdout))
        return 0
    return show_answer("tell", job, placement.machines, answer, wrong)


def _completions(parsed_args: argparse.Namespace, **_: object) -> dict[str, str]:
    """Completions for a shell: the id of a job, then a word."""
    words = parsed_args.words or []
    known = dict.fromkeys(_WORDS, "")
    if not words:
        return {**ids_here(), **known}
    return known if words[-1] not in _WORDS else {}


def _order(words: list[str]) -> dict[str, str]:
    """Return the command in the words after the job. Raises ConfigError."""
    from mpitrain.errors import ConfigError

    if not words:
        return {"kind": "list"}
    kind, *rest = words
    if kind not in _WORDS:
        raise ConfigError(f"there is no word {kind!r}; known are {', '.join(_WORDS)}")
    if len(rest) != _WORDS[kind]:
        needed = {"rate": "rate FACTOR, as in `rate 0.5`", "set": "set NAME=VALUE, as in `set dropout=0.2`"}
        raise ConfigError(f"{' '.join(words)}: allowed is {needed.get(kind, f'{kind} alone')}")
    if kind == "set":
        name, equals, value = rest[0].partition("=")
        if not equals or not name:
            raise ConfigError(f"set {rest[0]}: allowed is set NAME=VALUE, as in `set dropout=0.2`")
        return {"kind": kind, "name": name, "value": value}
    return {"kind": kind, "value": rest[0] if rest else ""}


def _is_meant(text: str) -> bool:
    """Ask whether an unusual learning-rate factor is intended; refuse it if there is no terminal to ask on."""
    from mpitrain.errors import ConfigError

    try:
        factor = float(text.removesuffix("x"))
    except ValueError:  # the job refuses it
        return True
    least, most = _FACTORS
    if not factor > 0 or least <= factor <= most:
        return True
    about = f"rate {text}: factors are mostly from {least:g} to {most:g}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{about}; if it is meant, give --yes too")
    print(f"mpitrain tell: {about}. Multiply the learning rate by {text}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _only_job(placement: Placement) -> tuple[str, str]:
    """Return the job if there is one, or a problem."""
    from mpitrain.launch.jobs import find_jobs

    jobs, wrong = find_jobs(placement)
    where = ", ".join(placement.machines)
    if wrong:
        return "", "; ".join([*wrong.values(), "name the job: `mpitrain tell JOB ...`"])
    if not jobs:
        return "", (
            f"no job of yours that `mpitrain run` has started runs on {where}. A job under plain mpiexec has no "
            "launcher that could tell it anything"
        )
    if len(jobs) > 1:
        listed = [f"  {job.token}  {job.script}" for job in jobs]
        return "", "\n".join([f"{len(jobs)} jobs of yours run on {where}. Name one: `mpitrain tell JOB ...`", *listed])
    return jobs[0].token, ""


def _listed(job: str, step: int, can: Mapping[str, Any]) -> str:
    """Print the commands that a job accepts."""
    lines = [f"job {job}, step {step}" + (f", {can['paused']}" if can["paused"] else "")]
    lines.append("  resume" if can["paused"] else "  pause")
    lines.append("  save, stop" if can["saves"] else "  (save and stop need the hook mt.Checkpoint)")
    lines.append(f"  rate FACTOR      the learning rate is multiplied by {can['rate_factor']:g} now")
    lines += [f"  set {name}={_typed(value)}" for name, value in can["tunables"].items()]
    if not can["tunables"]:
        lines.append("  (set needs values that the script declares with mt.tunable)")
    return "\n".join([*lines, "  stacks, kill"])


def _typed(value: Any) -> str:
    """A value as a user would type it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
