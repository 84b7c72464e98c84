"""`mpitrain simulate`: how a training would go on machines that are not here."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError

if TYPE_CHECKING:
    from mpitrain.simulate.machines import Machines
    from mpitrain.simulate.report import SimulationReport

HELP = "simulate a training on machines that are not here"

_EPILOG = """\
The allreduce algorithms are those of a job. Their messages go over simulated links,
and nothing is computed. Describe the machines by --gbit, by a file
(docs/simulate.md), or by the profile of a cluster, which `mpitrain bench
--save-profile FILE` writes.

  mpitrain simulate steps --parameters 25e6 --compute 0.3 --ranks 1,2,4,8,16
  mpitrain simulate steps --machines lab.toml --algorithms ring,halving_doubling
  mpitrain simulate servers --servers 1,2,4 --workers 4,8,16 --mode sync
  mpitrain simulate saves --nodes 64 --mtbf-hours 2000 --save 30 --restart 120
"""
# Of the namespace, what is no setting of the simulation.
_NO_SETTINGS = ("command", "action", "json", "plot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    steps = _action(actions, "steps", "show step time, samples/s and efficiency for numbers of ranks")
    _add_training(steps)
    _add_ranks(steps, "ranks", [1, 2, 4, 8, 16, 32])
    steps.add_argument("--algorithms", default="auto", metavar="A,B", help="allreduce algorithms to compare (auto)")
    steps.add_argument("--codec", default="none", metavar="NAME", help="codec between nodes (none)")
    steps.add_argument("--bucket-mib", type=_positive, metavar="MIB", help="size of buckets; default: that of a job")
    steps.add_argument("--sync-every", type=_count, default=1, metavar="N", help="steps of a round of local_sgd (1)")
    steps.add_argument(
        "--straggler", type=_positive, default=1.0, metavar="X", help="the last rank computes X times as long (1)"
    )
    steps.add_argument("--steps", type=_count, default=10, metavar="N", help="steps, or rounds, to simulate (10)")

    servers = _action(actions, "servers", "show samples/s for numbers of parameter servers and workers")
    _add_training(servers)
    _add_ranks(servers, "servers", [1, 2, 4])
    _add_ranks(servers, "workers", [1, 2, 4, 8, 16])
    servers.add_argument("--mode", default="async", metavar="NAME", help="sync, bounded or async (async)")
    servers.add_argument("--staleness", type=_count, default=4, metavar="N", help="of the mode bounded (4)")
    servers.add_argument("--rounds", type=_count, default=10, metavar="N", help="jobs of each worker to simulate (10)")

    saves = _action(actions, "saves", "show how often a training should save on machines that fail")
    saves.add_argument("--nodes", type=_count, default=16, metavar="N", help="a failure of one ends the job (16)")
    saves.add_argument(
        "--mtbf-hours", type=_positive, default=2000.0, metavar="H", help="time between failures of a node (2000)"
    )
    saves.add_argument("--save", type=_positive, default=30.0, metavar="S", help="seconds of a save (30)")
    saves.add_argument("--restart", type=_positive, default=120.0, metavar="S", help="seconds of a restart (120)")
    saves.add_argument("--hours", type=_positive, default=100.0, metavar="H", help="work of the training (100)")
    saves.add_argument(
        "--every", type=_seconds, metavar="S,S", help="seconds between saves; default: some around Daly's formula"
    )
    saves.add_argument("--seeds", type=_count, default=200, metavar="N", help="random trainings (200)")


def run(arguments: argparse.Namespace) -> int:
    """Simulate. Return the exit code."""
    for path in (arguments.json, arguments.plot):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent} for {path.name}; make it first")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} is a folder; give the name of a file")
    if arguments.plot is not None:
        from mpitrain.simulate.picture import draw
    report, title = {"steps": _steps, "servers": _servers, "saves": _saves}[arguments.action](arguments)
    report.print(title)
    if arguments.json is not None:
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name not in _NO_SETTINGS
        }
        report.write_json(arguments.json, title, settings)
    if arguments.plot is not None:
        draw(arguments.plot, report, title)
    return 0


def _steps(arguments: argparse.Namespace) -> tuple[SimulationReport, str]:
    from mpitrain.simulate.scaling import scaling_report
    from mpitrain.simulate.training import SimulatedTraining

    machines = _machines(arguments, max(arguments.ranks))
    trainings = {
        name: SimulatedTraining(
            arguments.parameters,
            arguments.compute,
            arguments.samples,
            name,
            arguments.codec,
            arguments.bucket_mib,
            arguments.sync_every,
            arguments.spread,
            arguments.straggler,
        )
        for name in arguments.algorithms.split(",")
    }
    report = scaling_report(
        machines, trainings, arguments.ranks, num_steps=arguments.steps,
        num_seeds=arguments.seeds if arguments.spread else 1,
        tell=lambda text: print(f"mpitrain simulate: {text}", file=sys.stderr),
    )  # fmt: skip
    return report, machines.origin


def _servers(arguments: argparse.Namespace) -> tuple[SimulationReport, str]:
    from mpitrain.simulate.servers_table import servers_report
    from mpitrain.simulate.serving import SimulatedServing

    machines = _machines(arguments, max(arguments.servers) + max(arguments.workers))
    serving = SimulatedServing(
        arguments.parameters,
        arguments.compute,
        arguments.samples,
        arguments.mode,
        arguments.spread,
        arguments.staleness,
    )
    report = servers_report(
        machines, serving, arguments.servers, arguments.workers, num_rounds=arguments.rounds,
        num_seeds=arguments.seeds if arguments.spread else 1,
    )  # fmt: skip
    return report, machines.origin


def _saves(arguments: argparse.Namespace) -> tuple[SimulationReport, str]:
    from mpitrain.simulate.saves import Failing, saves_report

    failing = Failing(
        arguments.hours * 3600, arguments.mtbf_hours * 3600, arguments.nodes, arguments.save, arguments.restart
    )
    title = f"{arguments.hours:g} h of work on {arguments.nodes} nodes"
    return saves_report(failing, arguments.every, arguments.seeds), title


def _machines(arguments: argparse.Namespace, num_ranks: int) -> Machines:
    """The machines that the options describe; without a file, as many as so many ranks need."""
    from mpitrain.profile import DEFAULT
    from mpitrain.simulate.machines import equal_machines, from_profile
    from mpitrain.simulate.machines_file import read_machines

    plain = {name: getattr(arguments, name) for name in ("gbit", "latency_us", "ppn")}
    given = [f"--{name.replace('_', '-')}" for name, value in plain.items() if value is not None]
    files = [name for name in ("machines", "profile") if getattr(arguments, name) is not None]
    if len(files) > 1 or (files and given):
        raise ConfigError(f"{', '.join(['--' + name for name in files] + given)}: a file has all of it; give one")
    if arguments.machines is not None:
        return read_machines(arguments.machines)
    if arguments.profile is not None:
        return from_profile(arguments.profile)
    ppn = arguments.ppn or 1
    rate = DEFAULT.bytes_per_second if arguments.gbit is None else arguments.gbit * 1e9 / 8
    latency = DEFAULT.latency_seconds if arguments.latency_us is None else arguments.latency_us * 1e-6
    return equal_machines(
        -(-num_ranks // ppn), bytes_per_second=rate, latency_seconds=latency, ranks_per_node=ppn,
        origin=f"{ppn} a node, {rate * 8 / 1e9:.3g} Gbit/s, {latency * 1e6:.3g} us",
    )  # fmt: skip


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    """Add an action with the options that all of them have."""
    action: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    action.add_argument("--json", type=Path, metavar="FILE", help="write the rows with all digits to this file")
    action.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture (needs matplotlib)")
    return action


def _add_training(action: argparse.ArgumentParser) -> None:
    """The options of the machines and of the model."""
    action.add_argument("--machines", type=Path, metavar="FILE", help="file that describes the machines (TOML)")
    action.add_argument("--profile", type=Path, metavar="FILE", help="profile of `mpitrain bench --save-profile`")
    action.add_argument("--gbit", type=_positive, metavar="X", help="rate of each node's link in Gbit/s (0.936)")
    action.add_argument("--latency-us", type=_latency, metavar="US", help="time of an empty message (50)")
    action.add_argument("--ppn", type=_count, metavar="N", help="ranks on each node (1)")
    action.add_argument("--parameters", type=_amount, default=25_000_000, metavar="N", help="float32 (25e6)")
    action.add_argument(
        "--compute", type=_positive, default=0.3, metavar="S", help="seconds of a forward and backward pass (0.3)"
    )
    action.add_argument(
        "--samples", type=_count, default=32, metavar="N", help="samples of a rank in a step, or of a job (32)"
    )
    action.add_argument(
        "--spread", type=_spread, default=0.0, metavar="X", help="of compute times, lognormal: 0.1 is about 10 %% (0)"
    )
    action.add_argument("--seeds", type=_count, default=5, metavar="N", help="random runs, with --spread (5)")


def _add_ranks(action: argparse.ArgumentParser, name: str, numbers: list[int]) -> None:
    shown = ",".join(str(number) for number in numbers)
    action.add_argument(f"--{name}", type=_counts, default=numbers, metavar="N,N", help=f"numbers of {name} ({shown})")


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _seconds(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _amount(text: str) -> int:
    return _count(str(round(_positive(text))))


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def _latency(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def _spread(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 2; a spread of 0.1 is about 10 %")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
