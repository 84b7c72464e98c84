"""One check of a cluster from start to end: the selected checks, the observations that they need, and their
verdicts."""

from __future__ import annotations

import difflib
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from mpitrain.check.agent import AgentClient
from mpitrain.check.check import (
    LEVELS,
    Check,
    Finding,
    Level,
    NotHereError,
    NotSeenError,
    Result,
    Seen,
    on_this_machine,
    set_up_line,
)
from mpitrain.check.checks import ASKS, CHECKS, CLUSTER, PAIRS
from mpitrain.check.collect import Cluster
from mpitrain.check.target import Target
from mpitrain.errors import ClusterError, ConfigError
from mpitrain.launch.hostfile import Host
from mpitrain.launch.libraries import Vendor
from mpitrain.launch.variables import pin
from mpitrain.state_files import why_nothing_is_kept

# Variables of all vendors go in, because each program reads only its own.
_VENDORS: tuple[Vendor, ...] = ("mpich", "impi", "openmpi")


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
    """Fill `cluster.seen` with the observations that `checks` use. Skip steps whose checks are all blocked already.

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
    return {**programs, "keeps nothing": why_nothing_is_kept()}


def check_cluster(
    target: Target,
    log_in: Callable[[Host], AgentClient],
    checks: Sequence[Check],
    progress: Callable[[str], None],
    *,
    baseline: Mapping[str, Any] | None = None,
) -> tuple[list[Result], Seen, bool]:
    """Examine the cluster through the agents that `log_in` returns, and judge.

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


def judge(checks: Sequence[Check], seen: Seen) -> list[Result]:
    """The results of `checks`, in their order; at least one for each.

    A pure function. A check whose needs failed in a place is blocked there, by the first cause of that failure.
    """
    results: list[Result] = []
    for check in checks:
        results += _judge_one(check, seen, results)
    return results


def places(check: Check, target: Target) -> list[tuple[str, ...]]:
    """Where the check gives verdicts: () stands for the whole cluster."""
    if check.scope == "pair":
        return list(permutations(target.names, 2))
    if check.scope == "way":
        return [(target.head, name) for name in target.names if name != target.head]
    if check.scope == "node":
        return [(name,) for name in target.names]
    return [(target.head,)] if check.scope == "head" else [()]


def cause(check: Check, place: tuple[str, ...], results: Sequence[Result], target: Target) -> str:
    """Return the id of the failed check that keeps `check` from being judged at `place`; "" if none does."""
    for result in results:
        if result.verdict not in ("fail", "blocked"):
            continue
        at_end = len(result.where) == 1 and result.where[0] in place
        anywhere = not result.where or check.needs_all
        concerns = result.check.id in check.needs and (anywhere or result.where == place or at_end)
        at_head = result.check.id in check.needs_head and result.where in ((target.head,), ())
        if concerns or at_head:
            return result.blocked_by or result.check.id
    return ""


def _judge_one(check: Check, seen: Seen, results: Sequence[Result]) -> Iterator[Result]:
    names = list(seen.target.names)
    if check.scope in ("head", "way") and seen.target.head not in names:
        yield Result(check, "skip", (), f"the head, {seen.target.head}, is not examined")
        return
    for place in places(check, seen.target):
        blocked_by = cause(check, place, results, seen.target)
        if blocked_by:
            yield Result(check, "blocked", place, blocked_by=blocked_by)
            continue
        if check.scope == "cluster":
            subject: Any = []
            for name in names:
                blocked_by = cause(check, (name,), results, seen.target)
                if blocked_by:
                    yield Result(check, "blocked", (name,), blocked_by=blocked_by)
                else:
                    subject.append(name)
            if not subject:
                continue
        else:
            subject = place if len(place) == 2 else place[0]
        yield from _asked(check, seen, subject, place)


def _asked(check: Check, seen: Seen, subject: Any, place: tuple[str, ...]) -> Iterator[Result]:
    findings: list[Finding] = []
    try:
        findings.extend(check.judge(seen, subject))
    except NotSeenError as error:
        findings.append(Finding("unknown", str(error)))
    except NotHereError as error:
        findings.append(Finding("skip", str(error)))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        # A node's answer of an unexpected form must not keep the others from being judged.
        findings.append(Finding("unknown", f"its answer cannot be read: {type(error).__name__}: {error}"))
    at = [place if finding.where is None else finding.where for finding in findings]
    for finding, where in zip(findings, at, strict=True):
        yield Result(
            check,
            finding.verdict,
            where,
            printable(finding.observed),
            printable(finding.allowed),
            _remedy(check, finding, where, seen),
            finding.mend,
        )
    # A check of the whole cluster names the faulty nodes; it has passed for the others.
    if check.scope == "cluster":
        named = {name for where in at for name in where}
        if () not in at:
            yield from (Result(check, "pass", (name,)) for name in subject if name not in named)
    elif not findings:
        yield Result(check, "pass", place)


def printable(text: str) -> str:
    """The text without control characters, with which a node might control a terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def _remedy(check: Check, finding: Finding, where: tuple[str, ...], seen: Seen) -> str:
    """The repair command, with a placeholder for the nodes: {limit}; they may be folded first."""
    if finding.verdict not in ("warn", "fail"):
        return ""
    text = finding.remedy or (check.remedy_alone if seen.target.is_here else "") or check.remedy
    if not text:
        return set_up_line(check, seen.target)
    if seen.target.is_here:
        text = on_this_machine(text)
    node = where[-1] if where else seen.target.head
    values = {
        "node": node,
        "address": seen.target.destination(node),
        "login": seen.target.login(node),
        "known_as": seen.target.known_as(node),
        "user": seen.target.user,
        "share": seen.target.share or "the shared folder",
        "python": seen.target.python,
        "set_up": seen.target.set_up,
    }
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
    return text


def variables(seen: Seen) -> dict[str, str]:
    """The variables that hold for all nodes, as `mpitrain run` would set them for each MPI.

    If interfaces have different names on different nodes, only networks are written.

    Raises:
        ClusterError: a node was not seen, or no network holds for all nodes.
    """
    facts: dict[str, Mapping[str, Any]] = {}
    for name in seen.target.names:
        try:
            network = seen.node(name, "network")
        except NotSeenError as error:
            raise ClusterError(f"no variables can be written: the network of {name} is not known: {error}") from None
        facts[name] = {"routes": network["routes"], "rdma": bool(network["rdma"])}
    if len(facts) == 1:
        raise ClusterError("no variables can be written: there is one node, which has no way to others")
    common: dict[str, str] = {}
    note = ""
    for vendor in _VENDORS:
        pinning = pin(facts, list(facts), vendor, {})
        common |= pinning.common
        note = pinning.note
    if not common:
        raise ClusterError(f"no variables can be written: {note}")
    return common


def write_variables(path: Path, seen: Seen) -> None:
    """Write `variables` as NAME=value lines, which a shell takes as well: `set -a; . FILE`.

    Raises:
        ClusterError: they are not known, or the file cannot be written.
    """
    names = ", ".join(seen.target.names)
    lines = [
        f"# The network between {names}, as `mpitrain check-cluster --write-env` saw it.",
        "# For jobs: mpitrain run --env-file FILE, or MPITRAIN_ENV_FILE=FILE; in a shell: set -a; . FILE; set +a",
        *(f"{name}={shlex.quote(value)}" for name, value in sorted(variables(seen).items())),
    ]
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise ClusterError(f"{path} cannot be written: {error.strerror}") from None
