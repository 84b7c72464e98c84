"""`mpitrain plan` without a script: a training and its machines, both described by options."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.errors import ConfigError
from mpitrain.measured_loss import loss_in_words
from mpitrain.reading import shown_text, whole
from mpitrain.units import add_renamed, seconds, seconds_list, seconds_or_0, size_mib

if TYPE_CHECKING:
    from mpitrain.forecast.machines import Machines
    from mpitrain.forecast.report import SimulationReport

# The settings of each question, with the values of options that are not given. An option that is given has a value in
# the namespace. `--servers` and `--mtbf` ask the second and the third question.
_TRAINING: dict[str, Any] = {
    "machines": None, "profile": None, "link": None, "latency": None, "ppn": None,
    "parameters": 25_000_000, "compute": 0.3, "samples": 32, "spread": 0.0, "seeds": 5,
}  # fmt: skip
_STEPS = _TRAINING | {
    "ranks": [1, 2, 4, 8, 16, 32], "algorithms": "auto", "codec": "none", "bucket": None, "sync_every": 1,
    "straggler": 1.0, "steps": 10,
}  # fmt: skip
_SERVERS = _TRAINING | {"servers": None, "workers": [1, 2, 4, 8, 16], "mode": "async", "staleness": 4, "rounds": 10}
_SAVES: dict[str, Any] = {
    "nodes": 16, "mtbf": None, "save": 30.0, "restart": 120.0, "work": 360000.0, "every": None, "seeds": 200,
}  # fmt: skip
_ALL = _STEPS | _SERVERS | _SAVES
# Options that a plan of a script has too; and options that only it has, with the defaults.
_OF_SCRIPTS_TOO = ("machines", "profile", "link", "ppn", "ranks", "steps")
_OF_SCRIPTS = {
    "num_ranks": None, "hosts": None, "inventory": None, "env_file": None, "mpiexec": None, "start_timeout": 60.0,
    "step_timeout": 600.0, "writes": False, "all": False, "total_steps": None,
}  # fmt: skip


def add_described_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a plan without a script. `--help` does not list them; `--help-machines` does."""
    for _title, options in _DESCRIBED:
        for name, (kind, metavar, _words) in options.items():
            parser.add_argument(name, type=kind, metavar=metavar, help=argparse.SUPPRESS)
    parser.add_argument("--help-machines", action=_Help, nargs=0, help="list the options of a plan without a script")
    add_renamed(
        parser,
        latency_us="--latency, with a unit: --latency 50us",
        bucket_mib="--bucket, with a unit: --bucket 25MiB",
        mtbf_hours="--mtbf, with a unit: --mtbf 2000h",
        hours="--work, with a unit: --work 100h",
    )


class _Help(argparse.Action):
    """Lists the options of a plan without a script."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        listed = argparse.ArgumentParser(
            prog=parser.prog, usage=f"{parser.prog} [OPTION]...", add_help=False,
            formatter_class=parser.formatter_class,
            description="Without a script nothing is started: these options describe the training and its machines.",
        )  # fmt: skip
        for title, options in _DESCRIBED:
            group = listed.add_argument_group(title)
            for name, (_kind, metavar, words) in options.items():
                group.add_argument(name, metavar=metavar, help=words)
        listed.print_help()
        parser.exit()


def refuse_description(arguments: argparse.Namespace) -> None:
    """Check the options of a plan of a script: its training is measured, so nothing may describe it."""
    given = [name for name in _ALL if name not in _OF_SCRIPTS_TOO and getattr(arguments, name) is not None]
    if given:
        raise ConfigError(
            f"{_options(given)}: the training is described where no script is named; a script is measured. Leave out "
            "one of the two"
        )


def plan_described(arguments: argparse.Namespace) -> tuple[SimulationReport, str, dict[str, Any]]:
    """Simulate. Return the report, its title, and the settings behind it."""
    given = {name: value for name in _ALL if (value := getattr(arguments, name)) is not None}
    if not given:
        raise ConfigError(
            "name a script, as in `mpitrain plan train.py`; or describe a training and its machines, as in `mpitrain "
            "plan --machines lab.toml --parameters 25e6 --compute 0.3s`"
        )
    if of_scripts := [name for name, default in _OF_SCRIPTS.items() if getattr(arguments, name) != default]:
        raise ConfigError(f"{_options(of_scripts)}: without a script, nothing is started; name one, or leave it out")
    if arguments.mtbf is not None:
        marker, defaults, simulate = "--mtbf", _SAVES, _saves
    elif arguments.servers is not None:
        marker, defaults, simulate = "--servers", _SERVERS, _servers
    else:
        marker, defaults, simulate = "", _STEPS, _steps
    if others := [name for name in given if name not in defaults]:
        needed = "--mtbf" if others[0] in _SAVES else "--servers"
        raise ConfigError(
            f"{_options(others)}: not together with {marker}" if marker else f"{_options(others)}: needs {needed}"
        )
    settings = {name: given.get(name, default) for name, default in defaults.items()}
    report, title = simulate(argparse.Namespace(**settings))
    return report, title, {name: str(one) if isinstance(one, Path) else one for name, one in settings.items()}


def _steps(settings: argparse.Namespace) -> tuple[SimulationReport, str]:
    from mpitrain.forecast.scaling import scaling_report
    from mpitrain.forecast.training import SimulatedTraining

    machines = _machines(settings, max(settings.ranks))
    trainings = {
        name: SimulatedTraining(
            settings.parameters,
            settings.compute,
            settings.samples,
            name,
            settings.codec,
            settings.bucket,
            settings.sync_every,
            settings.spread,
            settings.straggler,
        )
        for name in settings.algorithms.split(",")
    }
    report = scaling_report(
        machines, trainings, settings.ranks, num_steps=settings.steps,
        num_seeds=settings.seeds if settings.spread else 1,
        tell=lambda text: print(f"mpitrain plan: {text}", file=sys.stderr),
    )  # fmt: skip
    if settings.codec != "none" or settings.sync_every > 1:
        loss = loss_in_words(settings.codec, settings.sync_every)
        report = replace(report, answers=[*report.answers, loss])
    return report, machines.origin


def _servers(settings: argparse.Namespace) -> tuple[SimulationReport, str]:
    from mpitrain.forecast.scaling import servers_report
    from mpitrain.forecast.serving import SimulatedServing

    machines = _machines(settings, max(settings.servers) + max(settings.workers))
    serving = SimulatedServing(
        settings.parameters, settings.compute, settings.samples, settings.mode, settings.spread, settings.staleness
    )
    report = servers_report(
        machines, serving, settings.servers, settings.workers, num_rounds=settings.rounds,
        num_seeds=settings.seeds if settings.spread else 1,
    )  # fmt: skip
    return report, machines.origin


def _saves(settings: argparse.Namespace) -> tuple[SimulationReport, str]:
    from mpitrain.forecast.saves import Failing, saves_report

    failing = Failing(settings.work, settings.mtbf, settings.nodes, settings.save, settings.restart)
    title = f"{settings.work / 3600:g} h of work on {settings.nodes} nodes"
    return saves_report(failing, settings.every, settings.seeds), title


def _machines(settings: argparse.Namespace, num_ranks: int) -> Machines:
    """The machines that the settings describe; without a file, as many as the ranks need."""
    from mpitrain.forecast.machines import equal_machines, from_profile, read_machines
    from mpitrain.profile import DEFAULT

    files = [name for name in ("machines", "profile") if getattr(settings, name) is not None]
    plain = [name for name in ("link", "latency", "ppn") if getattr(settings, name) is not None]
    if len(files) > 1 or (files and plain):
        raise ConfigError(f"{_options(files + plain)}: a file has all of it; give one")
    if settings.machines is not None:
        return read_machines(settings.machines)
    if settings.profile is not None:
        return from_profile(settings.profile)
    ppn = settings.ppn or 1
    rate = DEFAULT.bytes_per_second if settings.link is None else settings.link * 1e9 / 8
    latency = DEFAULT.latency_seconds if settings.latency is None else settings.latency
    return equal_machines(
        -(-num_ranks // ppn), bytes_per_second=rate, latency_seconds=latency, ranks_per_node=ppn,
        origin=f"{ppn} a node, {rate * 8 / 1e9:.3g} Gbit/s, {latency * 1e6:.3g} us",
    )  # fmt: skip


def _options(names: list[str]) -> str:
    short = {"num_ranks": "-n", "inventory": "-i"}
    return ", ".join(short.get(name, f"--{name.replace('_', '-')}") for name in names)


def _number(lowest: float, highest: float, allowed: str) -> Callable[[str], float]:
    """Return the type of an option: a number in these limits. `allowed` names the limits after "is not a number"."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not lowest <= value <= highest:  # this form refuses NaN
            raise argparse.ArgumentTypeError(f"{shown_text(text)} is not a number {allowed}")
        return value

    return read


_factor = _number(1e-9, 1e9, "above 0, from 1e-9 to 1e9")
_spread = _number(0, 2, "from 0 to 2; a spread of 0.1 is about 10 %")


def _amount(text: str) -> int:
    return round(_number(1, 1e12, "of at least 1 and at most 1e12")(text))


def _count(text: str) -> int:
    value = whole(text, 1, 10**15)
    if value is None:
        raise argparse.ArgumentTypeError(f"{shown_text(text)} is not a whole number of at least 1 and at most 10^15")
    return value


def counts(text: str) -> list[int]:
    """The type of an option with whole numbers: sorted, without duplicates."""
    return sorted({_count(part) for part in text.split(",")})


# By what they describe: the options' types, metavars and helps.
_DESCRIBED: list[tuple[str, dict[str, tuple[Callable[[str], Any], str, str]]]] = [
    ("the machines, and what a rank does in a step", {
        "--latency": (seconds_or_0, "T", "time of an empty message (50us)"),
        "--parameters": (_amount, "N", "float32 (25e6)"),
        "--compute": (seconds, "T", "time of a forward and backward pass (0.3s)"),
        "--samples": (_count, "N", "samples of a rank in a step, or of a work unit (32)"),
        "--spread": (_spread, "X", "of compute times, lognormal: 0.1 is about 10 %% (0)"),
        "--seeds": (_count, "N", "random runs, with --spread (5)"),
        "--algorithms": (str, "A,B", "allreduce algorithms to compare (auto)"),
        "--codec": (str, "NAME", "codec between nodes (none)"),
        "--bucket": (size_mib, "SIZE", "size of buckets (default: that of a job)"),
        "--sync-every": (_count, "N", "steps of a round of local_sgd (1)"),
        "--straggler": (_factor, "X", "the last rank computes X times as long (1)"),
    }),
    ("parameter servers", {
        "--servers": (counts, "N,N", "show samples/s for these numbers of servers"),
        "--workers": (counts, "N,N", "and of workers (1,2,4,8,16)"),
        "--mode": (str, "NAME", "sync, bounded or async (async)"),
        "--staleness": (_count, "N", "of the mode bounded (4)"),
        "--rounds": (_count, "N", "work units of each worker to simulate (10)"),
    }),
    ("how often a training should save on machines that fail", {
        "--mtbf": (seconds, "T", "show that, for so long between failures of a node"),
        "--nodes": (_count, "N", "a failure of one ends the job (16)"),
        "--save": (seconds, "T", "time of a save (30s)"),
        "--restart": (seconds, "T", "time of a restart (120s)"),
        "--work": (seconds, "T", "work of the training (100h)"),
        "--every": (seconds_list, "T,T", "time between saves (default: around Daly's formula)"),
    }),
]  # fmt: skip
