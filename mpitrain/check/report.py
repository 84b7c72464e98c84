"""Results as text for users and as JSON of a fixed form for programs; and the description of a check."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.check.check import Check, Result, Seen, Verdict, set_up_line
from mpitrain.check.target import Target

_ORDER: tuple[Verdict, ...] = ("fail", "unknown", "warn", "blocked", "skip", "pass")
_MOST_NAMES = 8
_COLOURS = {"FAIL": "1;31", "UNKNOWN": "1;35", "WARN": "1;33"}
SHOWN: tuple[Verdict, ...] = ("fail", "unknown", "warn")
VERSION = 1
# What `mpitrain check-cluster` keeps of its last run, for `mpitrain dashboard`, in the folder of the user's state.
REPORT_FILE, WAYS_FILE = "check-cluster.json", "check-cluster-ways.json"
KEPT_VERSION = 1
_SCOPES = {
    "cluster": "the cluster as a whole",
    "node": "each node",
    "head": "the head",
    "pair": "each pair of nodes, in both directions",
    "way": "the way from the head to each other node",
}


@dataclass(frozen=True)
class ResultGroup:
    """Results that differ only in their place. `places` is folded: "node[2-4]", "node1 -> node3", "" for all."""

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
    """The results except those that passed or are blocked; causes and more severe ones first."""
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
    """Format places for users."""
    all_places = list(places)
    pairs = [(place[0], place[1]) for place in all_places if len(place) == 2]
    nodes = [place[0] for place in all_places if len(place) == 1]
    return ", ".join(part for part in (fold(nodes), fold_pairs(pairs, names)) if part)


def counts(results: Sequence[Result]) -> dict[Verdict, int]:
    """The number of checks by their most severe verdict."""
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


def fold(names: Iterable[str]) -> str:
    """Names with their numbers folded, in order of number: node1, node2, node3, gpu -> "gpu,node[1-3]"."""
    numbered: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(names):
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        key = (match[1], match[3]) if match else (name, "")
        numbered.setdefault(key, []).append(match[2] if match else "")
    parts = []
    for (before, behind), numbers in sorted(numbered.items()):
        ranges = _ranges(sorted(numbers, key=lambda text: (int(text or 0), len(text))))
        body = ",".join(ranges)
        parts.append(f"{before}[{body}]{behind}" if "," in body or "-" in body else f"{before}{body}{behind}")
    return ",".join(parts)


def fold_pairs(pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> str:
    """Directed pairs, folded if a node has the same problem with all others: "node3 -> all"."""
    left = dict.fromkeys(pairs)
    parts = []
    for name in names:
        others = [other for other in names if other != name]
        if len(others) < 2:
            break
        for group, text in (
            ([(name, other) for other in others], f"{name} -> every other"),
            ([(other, name) for other in others], f"every other -> {name}"),
        ):
            if all(pair in left for pair in group):
                parts.append(text)
                for pair in group:
                    del left[pair]
    both = [pair for pair in left if pair[::-1] in left and pair[0] < pair[1]]
    parts += [f"{a} <-> {b}" for a, b in both]
    parts += [f"{a} -> {b}" for a, b in left if (b, a) not in left]
    return ", ".join(parts)


def _ranges(numbers: Sequence[str]) -> list[str]:
    ranges: list[list[str]] = []
    for number in numbers:
        last = ranges[-1][-1] if ranges else ""
        # 09 and 10 are consecutive, and so are 9 and 10; 9 and 010 are names of two kinds.
        goes_on = last and number and int(number) == int(last) + 1
        if goes_on and (len(number) == len(last) or (not number.startswith("0") and not last.startswith("0"))):
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return [part[0] if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in ranges]


def document(
    results: Sequence[Result], target: Target, *, started: str, seconds: float, interrupted: bool
) -> dict[str, Any]:
    """Make the document. `started` is a time in RFC 3339 format."""
    return {
        "schema": VERSION,
        "started": started,
        "seconds": round(seconds, 3),
        "interrupted": interrupted,
        "nodes": target.addresses,
        "head": target.head,
        "counts": counts(results),
        "findings": [
            {
                "id": one.check.id,
                "title": one.check.title,
                "verdict": one.verdict,
                "places": one.places,
                "found": one.observed,
                "allowed": one.allowed,
                "why": one.check.why,
                "remedy": one.remedy,
                "blocks": list(one.blocks),
            }
            for one in group(results, target)
        ],
        "results": [
            {
                "id": result.check.id,
                "verdict": result.verdict,
                "where": list(result.where),
                "found": result.observed,
                "blocked_by": result.blocked_by,
            }
            for result in results
        ],
    }


def machines(seen: Seen) -> dict[str, dict[str, Any]]:
    """Return the cores and the memory of each node that has reported them."""
    systems = {name: sections.get("system", {}) for name, sections in seen.nodes.items()}
    return {
        name: {"cores": system["cores"], "memory_bytes": system["memory_mib"] and system["memory_mib"] << 20}
        for name, system in systems.items()
        if "cores" in system
    }


def ways(seen: Seen, *, measured: float) -> dict[str, Any] | None:
    """Return latency and bandwidth from each node to each other; None: they were not measured.

    Rows are the senders, in the order of "nodes"; what could not be measured is None. `measured` is when, in seconds
    since the epoch.
    """
    rates = seen.cluster.get("ways")
    if not isinstance(rates, dict) or not any("bytes_per_second" in one for one in rates.values() if one):
        return None
    names = list(seen.target.names)

    def table(field: str, scale: float) -> list[list[float | None]]:
        values = [[rates.get(f"{a} {b}", {}).get(field) for b in names] for a in names]
        return [[None if value is None else value * scale for value in row] for row in values]

    return {
        "measured": measured,
        "nodes": names,
        "latency_us": table("latency_seconds", 1e6),
        "bytes_per_second": table("bytes_per_second", 1.0),
    }


def explain(check: Check, width: int) -> str:
    """All about one check, wrapped to `width`."""
    parts = [f"{check.id}  {check.title}", ""]
    for label, words in _facts(check):
        parts += textwrap.wrap(
            f"{label:<10}{words}", width, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(parts)


def listing(checks: Iterable[Check]) -> str:
    """One line per check."""
    return "\n".join(f"{check.id:<6} {check.level:<6} {check.title}" for check in checks)


def table(checks: Iterable[Check]) -> str:
    """docs/reference/checks.md."""
    lines = [
        "# Checks of mpitrain check-cluster and mpitrain doctor",
        "",
        "Made from the checks themselves; `mpitrain check-cluster --explain ID` prints all about one.",
        "[Fault coverage](../dev/fault-coverage.md) has the faults that prove them. In repairs, `{login}` is what",
        "`ssh` needs to reach the node: its address, with the user, the port and the key that the inventory names.",
        "`mpitrain doctor` makes the checks with a *.",
        "",
        "| check | level | looks at | why it matters | repair |",
        "| --- | --- | --- | --- | --- |",
    ]
    for check in checks:
        facts = {label: words.replace("|", "\\|") for label, words in _facts(check)}
        name = f"{check.id}{'*' if check.alone else ''}: {check.title}"
        cells = name, *(facts.get(label, "") for label in ("level", "looks", "why", "repair"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def described(check: Check) -> dict[str, str]:
    """Return the fields of a check, by name."""
    return {"id": check.id, "title": check.title, **dict(_facts(check))}


def _facts(check: Check) -> list[tuple[str, str]]:
    facts = [
        ("level", check.level),
        ("of", f"{_SCOPES[check.scope]}{'; `mpitrain doctor` makes it too' if check.alone else ''}"),
        ("looks", check.looks),
        ("why", check.why),
        ("needs", ", ".join([*check.needs, *(f"{name} of the head" for name in check.needs_head)])),
        ("repair", check.remedy or (f"ansible-playbook cluster/setup.yml --tags {check.tag}" if check.tag else "")),
        ("proved by", check.fault),
    ]
    return [(label, words) for label, words in facts if words]
