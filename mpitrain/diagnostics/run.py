"""One check of a cluster from start to end: which checks run, what they need to see, and their results."""

from __future__ import annotations

import difflib
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.diagnostics.agent import AgentClient
from mpitrain.diagnostics.check import LEVELS, Check, Level, Result, Seen, Target
from mpitrain.diagnostics.checks import ASKS, CHECKS, CLUSTER, PAIRS
from mpitrain.diagnostics.collect import Cluster
from mpitrain.diagnostics.judge import cause, judge, places
from mpitrain.errors import ConfigError
from mpitrain.launch.hostfile import Host


def select(level: Level, only: Sequence[str] = (), skip: Sequence[str] = ()) -> list[Check]:
    """The checks of a level and of lower ones; with `only`, the checks named, of any level, and what they need.

    Raises:
        ConfigError: an id is not known.
    """
    for name in (*only, *skip):
        if name not in CHECKS:
            close = difflib.get_close_matches(name.upper(), CHECKS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(f"there is no check {name}; {hint}`mpitrain check-cluster --explain all` lists them")
    if only:
        wanted = _with_needs(only)
        return [check for check in CHECKS.values() if check.id in wanted and check.id not in skip]
    levels = LEVELS[: LEVELS.index(level) + 1]
    return [check for check in CHECKS.values() if check.level in levels and check.id not in skip]


def of_one_machine() -> list[Check]:
    """The checks that apply to a single machine: `mpitrain doctor` makes these."""
    return [check for check in CHECKS.values() if check.alone]


def _with_needs(names: Iterable[str]) -> set[str]:
    needed: set[str] = set()
    to_do = list(names)
    while to_do:
        name = to_do.pop()
        if name not in needed:
            needed.add(name)
            to_do += [*CHECKS[name].needs, *CHECKS[name].needs_head]
    return needed


def look(checks: Sequence[Check], cluster: Cluster, progress: Callable[[str], None]) -> None:
    """Fill `cluster.seen` with what `checks` use. Skip the steps whose checks are all blocked already.

    A KeyboardInterrupt passes through; what was seen before stays.
    """
    cluster.seen.control = control()
    cluster.log_in(progress)
    wanted = {section for check in checks for section in check.uses}
    cluster.look_at_nodes([ask for section, ask in ASKS.items() if section in wanted], progress)
    steps = {section: step for section, step in PAIRS.items() if section in wanted}
    if steps:
        cluster.look_at_pairs(steps, progress)
    for section, step in CLUSTER.items():
        if section in wanted and not _is_blocked(section, checks, cluster.seen):
            progress(f"running: {section}")
            cluster.look_at_all(section, step)


def _is_blocked(section: str, checks: Sequence[Check], seen: Seen) -> bool:
    """True if every check that uses the section is blocked everywhere: a job would only wait for its deadline."""
    results = judge([check for check in checks if section not in check.uses], seen)
    return all(
        cause(check, place, results, seen.target)
        for check in checks
        if section in check.uses
        for place in places(check, seen.target)
    )


def control() -> dict[str, str]:
    """The facts of this machine."""
    programs = {}
    for name in ("ssh", "ansible-playbook"):
        beside = Path(sys.executable).with_name(name)
        programs[name] = str(beside) if beside.exists() else shutil.which(name) or ""
    return programs


def check_cluster(
    target: Target,
    log_in: Callable[[Host], AgentClient],
    checks: Sequence[Check],
    progress: Callable[[str], None],
    *,
    baseline: Mapping[str, Any] | None = None,
) -> tuple[list[Result], Seen, bool]:
    """Look through the agents that `log_in` gives, and judge.

    Return the results, what was seen, and whether the check was interrupted.
    """
    interrupted = False
    with Cluster(target, log_in) as cluster:
        if baseline is not None:
            cluster.seen.cluster["baseline"] = dict(baseline)
        try:
            look(checks, cluster, progress)
        except KeyboardInterrupt:
            interrupted = True
    return judge(checks, cluster.seen), cluster.seen, interrupted
