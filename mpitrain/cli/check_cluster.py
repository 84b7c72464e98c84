"""`mpitrain check-cluster`: report what is wrong with the machines of a cluster, where, why, and the repair."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mpitrain.cli.terminal_text import print_object
from mpitrain.errors import ClusterError, ConfigError, MpitrainError
from mpitrain.state_files import keep_state, state_folder

if TYPE_CHECKING:
    from mpitrain.check.check import Check, Result, Seen
    from mpitrain.check.report import ResultGroup
    from mpitrain.check.target import Target

HELP = "report what is wrong with a cluster, and what repairs it"
PAGE = "reference/checks.md"
_INTERRUPTED = 130
_NAGIOS_UNKNOWN = 3

_EPILOG = """\
Levels: quick is one login for each node; full also has pairs of nodes and a small
MPI job; bench also measures the network, the nodes and the shared folder. Nothing is
installed or changed on the nodes.

Exit codes: 0: no check failed; 1: one failed; 2: wrong use; 3: unknown.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "mpitrain check-cluster [OPTION]..."
    parser.epilog = _EPILOG
    usual = parser.error

    def refuse(message: str) -> NoReturn:
        if "--nagios" not in sys.argv:
            usual(message)
        sys.exit(_nagios_unknown(message))

    parser.error = refuse  # type: ignore[method-assign]
    add = parser.add_argument
    add("-i", "--inventory", type=Path, metavar="FILE", help="the nodes (cluster/hosts, else /etc/mpitrain/hosts)")
    add("--hosts", metavar="A,B", help="check only these nodes")
    add("--level", choices=("quick", "full", "bench"), default="full", help="how much to check (full)")
    add("--only", metavar="ID", type=_ids, action="extend", default=[], help="run only these checks and what they need")
    add("--skip", metavar="ID", type=_ids, action="extend", default=[], help="leave these checks out")
    add("--script", metavar="FILE", help="your program, which must be the same everywhere")
    add("--strict", action="store_true", help="count a warning as a failure")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--nagios", action="store_true", help="print one line and exit as a Nagios plugin does")
    add("--explain", metavar="ID", help="explain a check, and what repairs it; or `all`")
    add("--fix", action="store_true", help="run the provisioning that repairs it, and check again")
    add("--yes", action="store_true", help="with --fix: do not ask")
    add("--save-baseline", type=Path, metavar="FILE", help="record the current state of the nodes")
    add("--baseline", type=Path, metavar="FILE", help="compare with what --save-baseline recorded")
    add("--write-env", type=Path, metavar="FILE", help="write the variables for the right interfaces")
    add("-v", "--verbose", action="store_true", help="also show the checks that were skipped")


def run(arguments: argparse.Namespace) -> int:
    """Examine the nodes, judge and print. Return the exit code."""
    try:
        return _run(arguments)
    except Exception as error:
        if not arguments.nagios:
            raise
        is_ours = isinstance(error, MpitrainError)
        return _nagios_unknown(str(error) if is_ours else f"{type(error).__name__}: {error}")


def _nagios_unknown(why: str) -> int:
    print(f"MPITRAIN UNKNOWN - {why}".replace("\n", " ").replace("|", "/"))
    return _NAGIOS_UNKNOWN


def _run(arguments: argparse.Namespace) -> int:
    missing = [name for name in ("fabric", "rich", "yaml") if find_spec(name) is None]
    if missing:
        how = f"{sys.executable} -m pip install 'mpitrain[cluster]'"
        raise ClusterError(f"not installed: {', '.join(missing)}. Install the packages for clusters:\n    {how}")
    from mpitrain.check.checks.baseline import read_baseline
    from mpitrain.check.report import exit_code
    from mpitrain.check.run import select
    from mpitrain.check.target import find_target

    if arguments.explain:
        return _explain(arguments.explain, as_json=arguments.json)
    if arguments.yes and not arguments.fix:
        raise ConfigError("--yes answers the question that --fix asks; give both, or neither")
    if arguments.fix and not arguments.yes and not sys.stdin.isatty():
        raise ConfigError("--fix asks before it changes anything, but there is no terminal to ask on; add --yes")
    if arguments.fix and (arguments.json or arguments.nagios):
        raise ConfigError("--fix prints what it runs; use it without --json and --nagios")
    if arguments.save_baseline and arguments.only:
        raise ConfigError("--save-baseline records all checks; use it without --only")
    checks = select(arguments.level, arguments.only, arguments.skip)
    baseline = read_baseline(arguments.baseline) if arguments.baseline else None
    target = find_target(arguments.inventory, arguments.hosts, arguments.script, os.environ)
    if arguments.fix and target.inventory is None:
        raise ConfigError(
            "--fix runs the playbooks, which need an inventory; give -i FILE, or make one with `mpitrain cluster init`"
        )
    results, seen, interrupted = _check(arguments, target, checks, baseline)
    if not interrupted:
        _write(arguments, seen)
        if arguments.fix and _mend(arguments, results, target):
            results, seen, interrupted = _check(arguments, target, checks, baseline)
    if interrupted:
        print("interrupted: the report above covers only what was seen before", file=sys.stderr)
        sys.stdout.flush()
        os._exit(_INTERRUPTED)  # without waiting for logins that have not failed yet
    if arguments.nagios:
        from mpitrain.check.report import nagios

        return nagios(results, target)[1]
    return exit_code(results, strict=arguments.strict)


def _check(
    arguments: argparse.Namespace, target: Target, checks: Sequence[Check], baseline: dict[str, object] | None
) -> tuple[list[Result], Seen, bool]:
    from mpitrain.check import report
    from mpitrain.check.connect import log_in
    from mpitrain.check.run import check_cluster

    started, begun = datetime.now(UTC), time.monotonic()
    with _progress() as progress:
        results, seen, interrupted = check_cluster(target, log_in, checks, progress, baseline=baseline)
    seconds = time.monotonic() - begun
    when = started.isoformat(timespec="seconds")
    content = report.document(results, target, started=when, seconds=seconds, interrupted=interrupted)
    if arguments.nagios:
        print(report.nagios(results, target)[0])
    elif arguments.json:
        print_object(content)
    else:
        width = shutil.get_terminal_size().columns
        report.show(report.text(results, target, width, verbose=arguments.verbose))
    if not interrupted:
        _keep(arguments, content, seen, started.timestamp())
    return results, seen, interrupted


def _keep(arguments: argparse.Namespace, report: dict[str, object], seen: Seen, started: float) -> None:
    """Keep the report, and what was measured between nodes, for `mpitrain dashboard`."""
    from mpitrain.check.report import KEPT_VERSION, REPORT_FILE, WAYS_FILE, machines, ways

    asked = {"level": arguments.level, "only": arguments.only, "skip": arguments.skip}
    content = {**asked, "machines": machines(seen), "report": report}
    try:
        keep_state(state_folder() / REPORT_FILE, KEPT_VERSION, content)
        if measured := ways(seen, measured=started):
            keep_state(state_folder() / WAYS_FILE, KEPT_VERSION, measured)
    except MpitrainError as error:
        print(f"mpitrain check-cluster: {error}", file=sys.stderr)


def _explain(name: str, *, as_json: bool) -> int:
    from mpitrain.check.checks import CHECKS
    from mpitrain.check.report import described, explain, listing
    from mpitrain.check.run import select

    chosen = [*CHECKS.values()] if name == "all" else [CHECKS[one] for one in [name] if select("quick", only=[one])]
    if as_json:
        print_object({"checks": [described(check) for check in chosen]})
    elif name == "all":
        print(listing(chosen))
    else:
        print(explain(CHECKS[name], shutil.get_terminal_size().columns))
    return 0


def _write(arguments: argparse.Namespace, seen: Seen) -> None:
    from mpitrain.check.checks.baseline import write_baseline
    from mpitrain.check.run import write_variables

    if arguments.save_baseline:
        write_baseline(arguments.save_baseline, seen)
        print(f"wrote {arguments.save_baseline}", file=sys.stderr)
    if arguments.write_env:
        write_variables(arguments.write_env, seen)
        print(f"wrote {arguments.write_env}", file=sys.stderr)


def _mend(arguments: argparse.Namespace, results: Sequence[Result], target: Target) -> bool:
    """Ask, then run the parts of the provisioning that repair what failed. Return whether anything was run."""
    from mpitrain.check.report import group
    from mpitrain.provision.playbook import run_playbook
    from mpitrain.provision.project import find_project

    wanted = ("fail", "warn") if arguments.strict else ("fail",)
    groups = [one for one in group(results, target) if one.verdict in wanted and one.is_mended_by_set_up]
    if not groups:
        print("provisioning cannot repair any of the failures", file=sys.stderr)
        return False
    for line in dict.fromkeys(one.remedy for one in groups):
        print(f"$ {line}", file=sys.stderr)
    if not arguments.yes and input("Run this? [y/N] ").strip().lower() not in ("y", "yes"):
        return False
    project = find_project(target.inventory)
    for tag, nodes in _runs(groups):
        options = ["--tags", tag, *(["--limit", ",".join(nodes)] if nodes else [])]
        report = run_playbook(project, "setup.yml", options)
        print(report.text(), file=sys.stderr)
        if report.code != 0:
            break
    return True


def _runs(groups: Sequence[ResultGroup]) -> list[tuple[str, tuple[str, ...]]]:
    """Each pair of a tag and its nodes once, in the order of the findings."""
    return list(dict.fromkeys((one.check.tag, one.nodes) for one in groups))


def _ids(text: str) -> list[str]:
    return [part.strip().upper() for part in text.split(",")]


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the current activity in a line on stderr, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update
