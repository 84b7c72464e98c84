"""`mpitrain plan` without a script: a training that is described, on machines that are described."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.errors import ConfigError
from mpitrain.reading import shown_text, whole

if TYPE_CHECKING:
    from mpitrain.forecast.machines import Machines
    from mpitrain.forecast.report import SimulationReport

# The settings of each question, and what holds where an option is not given. An option that is given has a value in the
# namespace. `--servers` and `--mtbf-hours` ask the second and the third question.
_TRAINING: dict[str, Any] = {
    "machines": None, "profile": None, "gbit": None, "latency_us": None, "ppn": None,
    "parameters": 25_000_000, "compute": 0.3, "samples": 32, "spread": 0.0, "seeds": 5,
}  # fmt: skip
_STEPS = _TRAINING | {
    "ranks": [1, 2, 4, 8, 16, 32], "algorithms": "auto", "codec": "none", "bucket_mib": None, "sync_every": 1,
    "straggler": 1.0, "steps": 10,
}  # fmt: skip
_SERVERS = _TRAINING | {"servers": None, "workers": [1, 2, 4, 8, 16], "mode": "async", "staleness": 4, "rounds": 10}
_SAVES: dict[str, Any] = {
    "nodes": 16, "mtbf_hours": None, "save": 30.0, "restart": 120.0, "hours": 100.0, "every": None, "seeds": 200,
}  # fmt: skip
_ALL = _STEPS | _SERVERS | _SAVES
# A plan of a script has these too; and what it alone has, with the defaults.
_OF_SCRIPTS_TOO = ("machines", "profile", "gbit", "ppn", "ranks", "steps")
_OF_SCRIPTS = {
    "num_ranks": None, "hosts": None, "inventory": None, "env_file": None, "mpiexec": None, "start_seconds": 60.0,
    "step_seconds": 600.0, "writes": False, "all": False,
}  # fmt: skip


def add_described_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a plan without a script."""
    model = parser.add_argument_group("without a script: the machines, and what a rank does in a step")
    add = model.add_argument
    add("--latency-us", type=_latency, metavar="US", help="time of an empty message (50)")
    add("--parameters", type=_amount, metavar="N", help="float32 (25e6)")
    add("--compute", type=_positive, metavar="S", help="seconds of a forward and backward pass (0.3)")
    add("--samples", type=_count, metavar="N", help="samples of a rank in a step, or of a work unit (32)")
    add("--spread", type=_spread, metavar="X", help="of compute times, lognormal: 0.1 is about 10 %% (0)")
    add("--seeds", type=_count, metavar="N", help="random runs, with --spread (5)")
    add("--algorithms", metavar="A,B", help="allreduce algorithms to compare (auto)")
    add("--codec", metavar="NAME", help="codec between nodes (none)")
    add("--bucket-mib", type=_mib, metavar="MIB", help="size of buckets; default: that of a job")
    add("--sync-every", type=_count, metavar="N", help="steps of a round of local_sgd (1)")
    add("--straggler", type=_positive, metavar="X", help="the last rank computes X times as long (1)")

    servers = parser.add_argument_group("without a script: parameter servers")
    add = servers.add_argument
    add("--servers", type=counts, metavar="N,N", help="show samples/s for these numbers of servers")
    add("--workers", type=counts, metavar="N,N", help="and of workers (1,2,4,8,16)")
    add("--mode", metavar="NAME", help="sync, bounded or async (async)")
    add("--staleness", type=_count, metavar="N", help="of the mode bounded (4)")
    add("--rounds", type=_count, metavar="N", help="work units of each worker to simulate (10)")

    saves = parser.add_argument_group("without a script: how often a training should save on machines that fail")
    add = saves.add_argument
    add("--mtbf-hours", type=_positive, metavar="H", help="show that, for so long between failures of a node")
    add("--nodes", type=_count, metavar="N", help="a failure of one ends the job (16)")
    add("--save", type=_positive, metavar="S", help="seconds of a save (30)")
    add("--restart", type=_positive, metavar="S", help="seconds of a restart (120)")
    add("--hours", type=_hours, metavar="H", help="work of the training (100)")
    add("--every", type=_seconds, metavar="S,S", help="seconds between saves; default: some around Daly's formula")


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
            "plan --machines lab.toml --parameters 25e6 --compute 0.3`"
        )
    if of_scripts := [name for name, default in _OF_SCRIPTS.items() if getattr(arguments, name) != default]:
        raise ConfigError(f"{_options(of_scripts)}: without a script, nothing is started; name one, or leave it out")
    if arguments.mtbf_hours is not None:
        marker, defaults, simulate = "--mtbf-hours", _SAVES, _saves
    elif arguments.servers is not None:
        marker, defaults, simulate = "--servers", _SERVERS, _servers
    else:
        marker, defaults, simulate = "", _STEPS, _steps
    if others := [name for name in given if name not in defaults]:
        needed = "--mtbf-hours" if others[0] in _SAVES else "--servers"
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
            settings.bucket_mib,
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

    failing = Failing(
        settings.hours * 3600, settings.mtbf_hours * 3600, settings.nodes, settings.save, settings.restart
    )
    title = f"{settings.hours:g} h of work on {settings.nodes} nodes"
    return saves_report(failing, settings.every, settings.seeds), title


def _machines(settings: argparse.Namespace, num_ranks: int) -> Machines:
    """The machines that the settings describe; without a file, as many as so many ranks need."""
    from mpitrain.forecast.machines import equal_machines, from_profile, read_machines
    from mpitrain.profile import DEFAULT

    files = [name for name in ("machines", "profile") if getattr(settings, name) is not None]
    plain = [name for name in ("gbit", "latency_us", "ppn") if getattr(settings, name) is not None]
    if len(files) > 1 or (files and plain):
        raise ConfigError(f"{_options(files + plain)}: a file has all of it; give one")
    if settings.machines is not None:
        return read_machines(settings.machines)
    if settings.profile is not None:
        return from_profile(settings.profile)
    ppn = settings.ppn or 1
    rate = DEFAULT.bytes_per_second if settings.gbit is None else settings.gbit * 1e9 / 8
    latency = DEFAULT.latency_seconds if settings.latency_us is None else settings.latency_us * 1e-6
    return equal_machines(
        -(-num_ranks // ppn), bytes_per_second=rate, latency_seconds=latency, ranks_per_node=ppn,
        origin=f"{ppn} a node, {rate * 8 / 1e9:.3g} Gbit/s, {latency * 1e6:.3g} us",
    )  # fmt: skip


def _options(names: list[str]) -> str:
    short = {"num_ranks": "-n", "inventory": "-i"}
    return ", ".join(short.get(name, f"--{name.replace('_', '-')}") for name in names)


def number(lowest: float, highest: float, allowed: str) -> Callable[[str], float]:
    """Return the type of an option: a number in these limits. `allowed` says so after "is not a number"."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not lowest <= value <= highest:  # this form refuses NaN
            raise argparse.ArgumentTypeError(f"{shown_text(text)} is not a number {allowed}")
        return value

    return read


_positive = number(1e-9, 1e9, "above 0, from 1e-9 to 1e9")
_latency = number(0, 1e9, "of at least 0 and at most 1e9")
_spread = number(0, 2, "from 0 to 2; a spread of 0.1 is about 10 %")
_mib = number(1e-3, 1e9, "of at least 0.001 and at most 1e9")
_hours = number(1e-9, 1e6, "from 1e-9 to 1e6, which are 114 years")


def _amount(text: str) -> int:
    return round(number(1, 1e12, "of at least 1 and at most 1e12")(text))


def _seconds(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _count(text: str) -> int:
    value = whole(text, 1, 10**15)
    if value is None:
        raise argparse.ArgumentTypeError(f"{shown_text(text)} is not a whole number of at least 1 and at most 10^15")
    return value


def counts(text: str) -> list[int]:
    """The type of an option with whole numbers; in order, each once."""
    return sorted({_count(part) for part in text.split(",")})
