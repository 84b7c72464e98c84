"""`scripts/testbed chaos JOB`: make real faults in a running job, undo them in time, and report what it did."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from mpitrain.cli.changing import add_job_argument
from mpitrain.cli.ps import add_host_arguments
from mpitrain.config import SECONDS
from mpitrain.errors import ConfigError
from mpitrain.reading import shown, whole
from testbed.chaos.conduct import Conductor
from testbed.chaos.crew import BedNodes, Crew, RealHosts, Site
from testbed.chaos.episode import Episode
from testbed.chaos.plan import Fault, parse_kinds, plan
from testbed.chaos.report import draw, is_good, numbers, text

HELP = "make faults in a running job, and report how it continues"

_EPILOG = """\
Faults: rank (kill -9), freeze (a rank, or a whole host), link (a cable), host
(its power), disk (full). link and host need a test bed; disk needs --disk.

  scripts/testbed chaos 1a2b3c4d --show
  scripts/testbed chaos 1a2b3c4d --every 30s --faults rank,freeze --seed 1 --yes
  sudo scripts/testbed chaos 1a2b3c4d --bed bed1 --faults rank,host,link,freeze
"""
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add_host_arguments(parser)
    add_job_argument(parser, "the id of the job, as `mpitrain ps` shows it")
    parser.add_argument(
        "--every", type=_duration, default=30.0, metavar="TIME", help="length of a period, with one fault (30s)"
    )
    parser.add_argument("--faults", default="rank,freeze", metavar="A,B", help="kinds of faults (rank,freeze)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the faults and their times (0)")
    parser.add_argument("--count", type=_count, metavar="N", help="number of faults; default: until the job ends")
    parser.add_argument("--hold", type=_duration, default=5.0, metavar="TIME", help="how long a fault lasts (5s)")
    parser.add_argument("--bed", metavar="BED", help="the job runs on this test bed, on this machine; as root")
    parser.add_argument("--disk", default="", metavar="DIR", help="folder on a small disk; chaos fills the disk")
    parser.add_argument("--report", type=Path, metavar="DIR", help="folder of the report (chaos-JOB)")
    parser.add_argument("--show", action="store_true", help="print the plan, and do nothing")
    parser.add_argument("--yes", action="store_true", help="make the faults, although the hosts are real")


def run(arguments: argparse.Namespace) -> int:
    """Make faults until the job ends; returns 0 if the job has done its work and nothing of it is left."""

    kinds = parse_kinds(arguments.faults)
    _check(arguments, kinds)
    faults = itertools.islice(plan(kinds, arguments.every, arguments.seed), arguments.count)
    site = _site(arguments)
    launcher = site.launcher_of(arguments.job)
    apart = launcher.partition(" ")[0]
    if apart not in site.hosts:
        raise ConfigError(
            f"the launcher of job {arguments.job} is on {apart}, and chaos looks on {', '.join(site.hosts)}: "
            "name its host in --hosts too"
        )
    if arguments.show:
        _show(faults, arguments, site)
        return 0
    if site.is_real and not arguments.yes:
        raise ConfigError(
            f"job {arguments.job} runs on real hosts ({', '.join(site.hosts)}): --show prints what would be done to "
            "it, --yes does it"
        )
    folder = arguments.report or Path(f"chaos-{arguments.job}")
    folder.mkdir(parents=True, exist_ok=True)
    breaks_nodes = not {"link", "host"}.isdisjoint(kinds)
    with Crew(site, launcher, arguments.disk, breaks_nodes=breaks_nodes) as crew:
        pause = arguments.every / 4
        conductor = Conductor(crew, faults, hold_seconds=arguments.hold, pause_seconds=pause, apart=apart, say=_say)
        conductor.run()
    _report(conductor.episode, arguments, folder)
    return 128 + conductor.interrupted if conductor.interrupted else int(not is_good(conductor.episode))


def _check(arguments: argparse.Namespace, kinds: Sequence[str]) -> None:
    """Refuse what cannot be done, or not be undone."""
    for kind, act in (("link", "cut the cable of"), ("host", "switch off")):
        if kind in kinds and not arguments.bed:
            raise ConfigError(
                f"--faults {kind}: chaos does not {act} a real host, because nothing is sure to bring it back; "
                "name a test bed with --bed, or leave this fault out"
            )
    if ("disk" in kinds) != bool(arguments.disk):
        raise ConfigError("--faults disk and --disk DIR belong together: DIR is the folder of the checkpoints")
    if arguments.bed and (arguments.hosts or arguments.inventory):
        raise ConfigError("--bed names the hosts: leave out --hosts and -i")


def _site(arguments: argparse.Namespace) -> Site:

    return BedNodes(arguments.bed) if arguments.bed else RealHosts(arguments.hosts, arguments.inventory)


def _show(faults: itertools.islice[Fault], arguments: argparse.Namespace, site: Site) -> None:
    """Print the plan. On whom a fault comes depends on the ranks that there are at its time."""
    lasts = f" for {arguments.hold:g} s"
    acts = {
        "rank": "kill -9 of one rank",
        "link": f"the cable of a host pulled out{lasts}",
        "host": f"the power of a host cut{lasts}",
        "disk": f"the disk with {arguments.disk} filled{lasts}",
    }
    print(f"job {arguments.job} on {', '.join(site.hosts)}; nothing is done now")
    for fault in itertools.islice(faults, _SHOWN):
        freeze = f"{'all processes of the job on a host' if fault.is_of_host else 'one rank'} stopped{lasts}"
        print(f"{fault.number:3} at {fault.seconds:7.1f} s: {fault.kind}: {acts.get(fault.kind, freeze)}")
    if arguments.count is None:
        print("and so on, until the job ends")


def _report(episode: Episode, arguments: argparse.Namespace, folder: Path) -> None:
    """Write and print the report."""

    names = ("every", "faults", "seed", "count", "hold")
    report = numbers(episode, arguments.job, {name: getattr(arguments, name) for name in names})
    (folder / "chaos.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "chaos.txt").write_text(text(report))
    print(text(report), end="")
    if len(episode.points) < 2:
        return
    try:
        title = f"job {arguments.job}: {report['throughput_kept']:.1%} of the undisturbed throughput"
        draw(folder / "chaos.png", episode, title)
    except ConfigError as error:
        print(f"no picture: {error}")
    print(f"report: {folder}")


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _duration(text: str) -> float:
    """The seconds of 30s, 2m, 1.5h or 30."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    lowest, highest = SECONDS
    if not lowest <= seconds <= highest:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write it as 30s, 2m or 1.5h")
    return seconds


def _count(text: str) -> int:
    number = whole(text, 1, 999_999)
    if number is None:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number of faults; it must be 1 to 999999")
    return number
