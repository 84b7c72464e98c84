"""Results for people: root causes first, equal findings of many nodes in one line, and the repair command."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpitrain.diagnostics.check import Check, Result, Target, Verdict
from mpitrain.diagnostics.fold import fold, fold_pairs
from mpitrain.diagnostics.judge import set_up_line

_ORDER: tuple[Verdict, ...] = ("fail", "unknown", "warn", "blocked", "skip", "pass")
_MOST_NAMES = 8
_COLOURS = {"FAIL": "1;31", "UNKNOWN": "1;35", "WARN": "1;33"}
SHOWN: tuple[Verdict, ...] = ("fail", "unknown", "warn")


@dataclass(frozen=True)
class ResultGroup:
    """Results that differ in their place only. `places` is folded: "node[2-4]", "node1 -> node3", "" for all."""

    check: Check
    verdict: Verdict
    places: str
    observed: str
    allowed: str
    remedy: str
    nodes: tuple[str, ...] = ()  # the nodes to repair
    is_mended_by_set_up: bool = False  # the remedy is just a run of the set-up with the check's tag
    blocks: tuple[str, ...] = ()  # checks that could not be judged because of this one


def group(results: Sequence[Result], target: Target) -> list[ResultGroup]:
    """The results except those that passed or are blocked; causes and graver ones first."""
    places: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        if result.verdict in ("pass", "blocked"):
            continue
        key = (result.check.id, result.verdict, result.observed, result.allowed, result.remedy)
        places.setdefault(key, []).append(result)
    groups = [_group(members, results, target) for members in places.values()]
    return sorted(groups, key=lambda one: _ORDER.index(one.verdict))


def _group(members: Sequence[Result], results: Sequence[Result], target: Target) -> ResultGroup:
    first = members[0]
    mend = [name for one in members for name in (one.mend or one.where)]
    nodes = tuple(name for name in target.names if name in mend)
    limit = ",".join(nodes) or "all"
    remedy = first.remedy if limit != "all" else first.remedy.replace(" --limit {limit}", "")
    blocked = [one for one in results if one.blocked_by == first.check.id] if first.verdict == "fail" else []
    return ResultGroup(
        first.check,
        first.verdict,
        fold_places([one.where for one in members], target.names),
        first.observed,
        first.allowed,
        remedy.replace("{limit}", limit),
        nodes,
        bool(first.check.tag) and first.remedy == set_up_line(first.check, target),
        tuple(dict.fromkeys(one.check.id for one in blocked)),
    )


def fold_places(places: Iterable[tuple[str, ...]], names: Sequence[str]) -> str:
    """Places as people read them."""
    all_places = list(places)
    pairs = [(place[0], place[1]) for place in all_places if len(place) == 2]
    nodes = [place[0] for place in all_places if len(place) == 1]
    return ", ".join(part for part in (fold(nodes), fold_pairs(pairs, names)) if part)


def counts(results: Sequence[Result]) -> dict[Verdict, int]:
    """How many checks have which verdict as their gravest one."""
    worst: dict[str, Verdict] = {}
    for result in results:
        before = worst.get(result.check.id, "pass")
        worst[result.check.id] = min(before, result.verdict, key=_ORDER.index)
    return {verdict: list(worst.values()).count(verdict) for verdict in _ORDER}


def exit_code(results: Sequence[Result], *, strict: bool) -> int:
    """0 none failed, 1 some failed (strict: or warned), 3 none failed but something could not be determined."""
    verdicts = {result.verdict for result in results}
    if "fail" in verdicts or (strict and "warn" in verdicts):
        return 1
    return 3 if "unknown" in verdicts else 0


def nagios(results: Sequence[Result], target: Target) -> tuple[str, int]:
    """The one line and the code (0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN) of the Nagios plugin interface."""
    verdicts = {result.verdict for result in results}
    for verdict, word, code in (("fail", "CRITICAL", 2), ("unknown", "UNKNOWN", 3), ("warn", "WARNING", 1)):
        if verdict in verdicts:
            said = "; ".join(_line(one, target) for one in group(results, target) if one.verdict == verdict)
            return f"MPITRAIN {word} - {said}".replace("|", "/"), code
    return f"MPITRAIN OK - {summary(results, target)}", 0


def summary(results: Sequence[Result], target: Target) -> str:
    """One line: how many nodes, how many checks, how they ended."""
    number = counts(results)
    said = [f"{number[verdict]} {word}" for verdict, word in _WORDS.items() if number[verdict]]
    count = len(target.hosts)
    nodes = target.head if target.is_here else f"{count} node{'s' * (count != 1)}"
    return f"{nodes}, {sum(number.values())} checks: {', '.join(said)}"


def text(results: Sequence[Result], target: Target, width: int, *, verbose: bool = False) -> str:
    """The report, wrapped to `width`; a remedy is never wrapped, so that it can be copied."""
    lines = []
    for one in group(results, target):
        if one.verdict not in SHOWN and not verbose:
            continue
        lines += wrapped(f"{one.verdict.upper():<8}", _line(one, target), width)
        for label, words in (
            ("allowed", one.allowed),
            ("why", one.check.why if one.verdict != "skip" else ""),
            ("blocks", _shortened(one.blocks)),
        ):
            lines += wrapped(f"        {label}: ", words, width) if words else []
        lines += [f"        $ {one.remedy}"] if one.remedy else []
        lines.append("")
    return "\n".join([*lines, summary(results, target)])


def show(report: str) -> None:
    """Print the report, with colours on a terminal (https://no-color.org)."""
    has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for line in report.splitlines():
        colour = _COLOURS.get(line.split(" ", 1)[0]) or ("1" if line.startswith("        $ ") else "")
        print(f"\033[{colour}m{line}\033[0m" if colour and has_colours else line)


def _shortened(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more"


def _line(one: ResultGroup, target: Target) -> str:
    if target.is_here:  # there is one place
        return f"{one.check.id}: {one.observed}"
    where = f" on {one.places}" if one.places and "->" not in one.places else f" {one.places}" if one.places else ""
    return f"{one.check.id}{where}: {one.observed}"


_WORDS: dict[Verdict, str] = {
    "fail": "failed",
    "unknown": "unknown",
    "warn": "with warnings",
    "blocked": "blocked somewhere",
    "skip": "skipped",
    "pass": "passed",
}


def wrapped(label: str, words: str, width: int) -> list[str]:
    """Lines of `words` after a label; a word is never broken."""
    return textwrap.wrap(
        words,
        max(width, len(label) + 30),
        initial_indent=label,
        subsequent_indent=" " * 10 if label.startswith(" ") else " " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [label.rstrip()]
