"""`mpitrain plan`: predict the speed on a cluster of a script, measured here, or of a described training."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.cli.described import add_described_arguments, counts, plan_described, refuse_description
from mpitrain.cli.launching import (
    add_launch_arguments,
    add_script_arguments,
    positive,
    request_of_script,
)
from mpitrain.errors import ConfigError, LaunchError, MpitrainError
from mpitrain.reading import is_folder
from mpitrain.units import add_renamed, rate_gbit, timeout

if TYPE_CHECKING:
    from mpitrain.forecast.machines import Machines
    from mpitrain.forecast.measured_steps import HostTimes
    from mpitrain.forecast.planner import Forecast
    from mpitrain.forecast.report import SimulationReport
    from mpitrain.launch.start import Request

HELP = "predict the speed of a training on a cluster"

PAGE = "how-to/performance.md"

_EPILOG = """\
The script makes some steps here, or with --hosts on each host, and ends before it
would overwrite a file. The sums of more ranks are simulated.

  mpitrain plan train.py
  mpitrain plan --link 10Gbit/s --ranks 1,2,4,8,16 train.py --epochs 5
  mpitrain plan --machines lab.toml --parameters 25e6 --compute 0.3s
  mpitrain plan --mtbf 2000h --nodes 64 --save 30s --restart 120s
"""
_MOST_RANKS = 8  # where nothing says how many machines there are
_STEPS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "mpitrain plan [OPTION]... [SCRIPT [ARGUMENT]...]"
    parser.epilog = _EPILOG
    add_launch_arguments(parser)
    parser.add_argument("--machines", type=Path, metavar="FILE", help="file that describes the machines (TOML)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="profile of `mpitrain bench --save-profile`")
    parser.add_argument("--link", type=rate_gbit, metavar="RATE", help="rate of each node's link (936Mbit/s)")
    parser.add_argument("--ranks", type=counts, metavar="N,N", help="numbers of ranks to plan (1,2,4,8, and more)")
    parser.add_argument("--total-steps", type=positive, metavar="N", help="steps of the whole training (StopAtStep's)")
    parser.add_argument("--steps", type=positive, metavar="N", help="steps to measure or to simulate (10)")
    parser.add_argument(
        "--step-timeout",
        type=timeout,
        default=600.0,
        metavar="T",
        help="limit of a step of the script (600s; 0: none)",
    )
    parser.add_argument("--writes", action="store_true", help="let the script overwrite and remove files")
    parser.add_argument("--all", action="store_true", help="show every row, not only the best few")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows with all digits to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture (needs matplotlib)")
    add_renamed(parser, gbit="--link, with a unit: --link 1Gbit/s")
    add_renamed(parser, step_seconds="--step-timeout, with a unit: --step-timeout 600s")
    add_described_arguments(parser)
    add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan a script, or the training that is described in its place. Return the exit code."""
    for path in (arguments.json, arguments.plot):
        if path is not None and not is_folder(path.parent):
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
        if path is not None and is_folder(path):
            raise ConfigError(f"{path} cannot be written: it is a folder; give the name of a file")
    if arguments.plot is not None:
        from mpitrain.forecast.report import need_matplotlib

        need_matplotlib()
    if arguments.script or arguments.module is not None:
        refuse_description(arguments)
        return _plan_script(arguments)
    report, title, settings = plan_described(arguments)
    report.print(title)
    _write(arguments, report, title, settings, title)
    return 0


def _write(
    arguments: argparse.Namespace, report: SimulationReport, machines: str, settings: dict[str, Any], title: str
) -> None:
    """Write the files that were asked for."""
    if arguments.json is not None:
        report.write_json(arguments.json, machines, settings)
    if arguments.plot is not None:
        from mpitrain.forecast.report import draw

        draw(arguments.plot, title, report.x_label, [report.panels])


def _plan_script(arguments: argparse.Namespace) -> int:
    """Measure, simulate and print. Return the exit code."""
    from mpitrain.context import LEAST_PLAN_STEPS
    from mpitrain.forecast.machines import read_machines
    from mpitrain.forecast.measured_steps import described

    if arguments.steps is not None and arguments.steps < LEAST_PLAN_STEPS:
        raise ConfigError(f"--steps is {arguments.steps}; of a script, at least {LEAST_PLAN_STEPS} are measured")
    if arguments.num_ranks is not None:
        raise ConfigError("-n is of a run; give the numbers of ranks to plan with --ranks 1,2,4")
    if arguments.machines is not None:
        if others := [name for name in ("profile", "link", "hosts", "ppn") if getattr(arguments, name) is not None]:
            raise ConfigError(f"--machines, --{others[0]}: the file has all of the machines; give one of the two")
    elif arguments.profile is None and os.environ.get("MPITRAIN_PROFILE"):
        arguments.profile = Path(os.environ["MPITRAIN_PROFILE"])
    if arguments.link is not None and arguments.profile is not None:
        raise ConfigError(
            "--link and a profile (--profile, MPITRAIN_PROFILE) both have the rate of the links; give one"
        )
    there = None if arguments.machines is None else read_machines(arguments.machines)
    per_host, has_hosts = there.ranks_per_node if there else arguments.ppn or 1, arguments.hosts is not None
    if has_hosts:
        arguments.ppn = per_host
    else:
        arguments.hosts, arguments.num_ranks, arguments.ppn = "localhost", per_host, None
    _check_first_host(arguments)
    request = replace(request_of_script(arguments), variables={"MPITRAIN_PROFILE": "", "MPITRAIN_TRACE": ""})
    with tempfile.TemporaryDirectory(prefix="mpitrain-plan-") as folder:
        machines = None if arguments.profile is None else _of_profile(arguments.profile, per_host, has_hosts=has_hosts)
        here = arguments.hosts.count(",") + 1
        known = machines or there
        most = known.num_ranks if known else here * per_host if here > 1 else _MOST_RANKS
        ranks = arguments.ranks or _powers(most, per_host)
        if (known or here > 1) and ranks[-1] > most:
            where = f"{known.origin} has" if known else f"{here} hosts with --ppn {per_host} have"
            raise ConfigError(f"--ranks has {ranks[-1]}; {where} room for {most}. Plan at most {most}")
        began = time.monotonic()
        rehearsal = [f"{arguments.step_timeout:g}", str(int(arguments.writes))]
        steps = arguments.steps or _STEPS
        hosts = _measured(request, Path(folder) / "times.json", steps, sorted({1, *ranks}), rehearsal)
        timed = time.monotonic()
        if machines is None:
            path = Path(folder) / "profile.json"
            machines = _measured_machines(arguments, path, hosts, ranks[-1], per_host, there)
        elif has_hosts:
            hosts = _in_order(hosts, machines, arguments.profile)
        hosts = hosts[::per_host]
        profiled = time.monotonic()
        report = _reported(arguments, request, hosts, machines, ranks)
    print(
        f"mpitrain plan: {timed - began:.0f} s for steps, {profiled - timed:.0f} s for links and codecs, "
        f"{time.monotonic() - profiled:.0f} s to simulate",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    measured, origin = described(hosts), machines.origin
    if there is not None:
        origin += f"; {hosts[0].host} has speed 1"
    elif len(hosts) == 1 and arguments.profile is not None:
        origin += f"; each host is taken to be as fast as {hosts[0].host}"
    print(measured)
    report.print(origin)
    _write(arguments, report, machines.origin, {"script": request.script, "ranks": ranks}, report.title)
    _keep(request, report, measured, origin)
    return 0


def _check_first_host(arguments: argparse.Namespace) -> None:
    """Check that rank 0 runs on this machine: it writes the times into a file, which is read here."""
    from mpitrain.launch.hosts import place_ranks

    placement = place_ranks(arguments.hosts, arguments.inventory, arguments.num_ranks, arguments.ppn)
    if placement.hosts[0] != placement.own:
        raise ConfigError(
            f"--hosts {arguments.hosts} begins with {placement.hosts[0]}, and this machine is {placement.own}; the "
            "first host must be this machine, where the plan is made. Name it first, or start mpitrain plan on "
            f"{placement.hosts[0]}"
        )


def _measured(
    request: Request, path: Path, num_steps: int, ranks: Sequence[int], rehearsal: Sequence[str]
) -> list[HostTimes]:
    """Run the script on each host alone. Return the times, by rank. `rehearsal`: see mpitrain/forecast/rehearse.py."""
    from mpitrain.context import PlanTask
    from mpitrain.forecast.measured_steps import read_times
    from mpitrain.launch.start import start

    print(f"mpitrain plan: measuring steps of {request.script}", file=sys.stderr, flush=True)
    program = ["-P", "-m", "mpitrain.forecast.rehearse", *rehearsal, request.script, *request.program]
    code = start(replace(request, program=program, plan=PlanTask(str(path), num_steps, tuple(map(str, ranks)))))
    if code:
        raise LaunchError(
            f"{request.script} failed with exit code {code} before its steps were measured, so there is no plan; the "
            "messages above say why"
        )
    return read_times(path, request.script)


def _of_profile(path: Path, per_host: int, *, has_hosts: bool) -> Machines:
    """The machines of a profile, of which this one is one."""
    from mpitrain.forecast.machines import from_profile

    machines = from_profile(path)
    if machines.ranks_per_node != per_host:
        raise ConfigError(
            f"the profile {path} has {machines.ranks_per_node} ranks on each node, and the plan {per_host}; give --ppn "
            f"{machines.ranks_per_node}, or measure a profile with --ppn {per_host}"
        )
    if not has_hosts and socket.gethostname() not in machines.hosts:
        raise ConfigError(
            f"the profile {path} is of another cluster: it has {', '.join(machines.hosts)}, and this machine is "
            f"{socket.gethostname()}. Plan on one of them, give --hosts, or leave the profile out and give --link"
        )
    return machines


def _in_order(hosts: Sequence[HostTimes], machines: Machines, path: Path) -> list[HostTimes]:
    """The hosts in the order of the profile."""
    names = {host.host for host in hosts}
    if names != set(machines.hosts):
        raise ConfigError(
            f"the profile {path} is of another cluster: it has {', '.join(machines.hosts)}, and --hosts has "
            f"{', '.join(sorted(names))}. Measure one: mpitrain bench --hosts {','.join(sorted(names))} --ppn "
            f"{machines.ranks_per_node} --save-profile {path}"
        )
    return sorted(hosts, key=lambda host: machines.hosts.index(host.host))


def _measured_machines(
    arguments: argparse.Namespace,
    path: Path,
    hosts: Sequence[HostTimes],
    num_ranks: int,
    per_host: int,
    there: Machines | None,
) -> Machines:
    """Measure a profile. With one host it has no links: they are assumed, or taken from `there`, which a file
    describes."""
    from mpitrain.forecast.machines import equal_machines, from_profile
    from mpitrain.profile import DEFAULT, from_json, read_profile

    _bench(arguments, path)
    if len(hosts) > per_host:
        return replace(from_profile(path), origin="links measured now")
    costs = from_json(read_profile(path), str(path))
    if there is not None:
        own = costs if there.costs == DEFAULT else there.costs  # of memory, what the file says
        rates = own.add_bytes_per_second, own.copy_bytes_per_second
        costs = replace(costs, nodes=(), links=(), add_bytes_per_second=rates[0], copy_bytes_per_second=rates[1])
        return replace(there, costs=costs)
    rate = DEFAULT.bytes_per_second if arguments.link is None else arguments.link * 1e9 / 8
    said = "assumed, because there is no --profile, --link or second host: " if arguments.link is None else ""
    origin = f"{said}links of {rate * 8 / 1e9:.3g} Gbit/s and {DEFAULT.latency_seconds * 1e6:g} us, equal machines"
    num_nodes = -(-num_ranks // per_host)
    return equal_machines(num_nodes, bytes_per_second=rate, ranks_per_node=per_host, origin=origin, costs=costs)


def _bench(arguments: argparse.Namespace, path: Path) -> None:
    """Run `mpitrain bench --save-profile` on the same hosts. Its table is not shown."""
    print("mpitrain plan: measuring memory, codecs and links", file=sys.stderr, flush=True)
    words = ["--hosts", arguments.hosts, "--start-timeout", f"{arguments.start_timeout:g}s"]
    given = {
        "-n": arguments.num_ranks, "--ppn": arguments.ppn, "-i": arguments.inventory, "--env-file": arguments.env_file,
        "--mpiexec": arguments.mpiexec,
    }  # fmt: skip
    for option, value in given.items():
        words += [] if value is None else [option, str(value)]
    command = [sys.executable, "-P", "-m", "mpitrain", "bench", *words, "--save-profile", str(path)]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        raise LaunchError(
            f"mpitrain bench failed with exit code {code}, so there is no profile; its messages are above"
        )


def _reported(
    arguments: argparse.Namespace,
    request: Request,
    hosts: Sequence[HostTimes],
    machines: Machines,
    ranks: Sequence[int],
) -> SimulationReport:
    from mpitrain.forecast.planner import Planner, plan_report

    planner = Planner(hosts, machines, is_profiled=arguments.profile is not None)

    def command(row: Forecast) -> str:
        profile = str(arguments.profile) if planner.has_profile(row.num_ranks) else ""
        launch = _launch_of(arguments, row.num_ranks, machines, hosts)
        line = row.way.command(row.num_ranks, launch, profile, request.program)
        # A job on fewer machines would refuse the profile of this process's variable.
        return f"MPITRAIN_PROFILE= {line}" if os.environ.get("MPITRAIN_PROFILE") and not profile else line

    is_progress = sys.stderr.isatty()
    return plan_report(
        planner, hosts, ranks, command, shows_all=arguments.all, total_steps=arguments.total_steps,
        tell=lambda text: print(f"mpitrain plan: {text}", file=sys.stderr, flush=True) if is_progress else None,
    )  # fmt: skip


def _launch_of(
    arguments: argparse.Namespace, num_ranks: int, machines: Machines, hosts: Sequence[HostTimes]
) -> list[str]:
    """The options of `mpitrain run` for this many ranks, placed as they were simulated."""
    num_nodes = machines.nodes_of(num_ranks)[-1] + 1
    given = {"--env-file": arguments.env_file, "--mpiexec": arguments.mpiexec}
    if num_nodes > 1:
        given["-i"] = arguments.inventory
    options = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    if num_nodes == 1:
        return ["-n", str(num_ranks), "--hosts", "localhost", *options]
    known = machines.costs.nodes or tuple(host.host for host in hosts if len(hosts) > 1)
    names = known or tuple(f"HOST{number}" for number in range(1, num_nodes + 1))
    per_node = machines.ranks_per_node
    rest = ["-n", str(num_ranks)] if num_ranks % per_node else []  # the last node has fewer
    return ["--hosts", ",".join(names[:num_nodes]), "--ppn", str(per_node), *rest, *options]


def _powers(most: int, per_host: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and `most` itself. Ranks fill nodes."""
    numbers = [1]
    while numbers[-1] * 2 < most:
        numbers.append(numbers[-1] * 2)
    return sorted({number for number in (*numbers, most) if number <= per_host or number % per_host == 0})


def _keep(request: Request, report: SimulationReport, measured: str, origin: str) -> None:
    """Keep the plan for `mpitrain dashboard`."""
    from mpitrain.last_word import keep_word

    with contextlib.redirect_stdout(io.StringIO()) as text:
        print(measured)
        report.print(origin)
    words = 2 if request.program[0] == "-m" else 1
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    try:
        keep_word("plan", Path(request.script), request.program[words:], lines)
    except MpitrainError as error:
        print(f"mpitrain plan: {error}", file=sys.stderr)
