"""Make verdicts of what was seen: every check in every place, with root causes told apart from consequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

from mpitrain.diagnostics.check import Check, Finding, NotHereError, NotSeenError, Result, Seen, Target
from mpitrain.diagnostics.remedies import on_this_machine


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
        yield Result(check, "skip", (), f"the head, {seen.target.head}, is not looked at")
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
        findings.append(Finding("unknown", place, str(error)))
    except NotHereError as error:
        findings.append(Finding("skip", place, str(error)))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        # A node's answer of an unexpected form must not keep the others from being judged.
        findings.append(Finding("unknown", place, f"its answer cannot be read: {type(error).__name__}: {error}"))
    for finding in findings:
        yield Result(
            check,
            finding.verdict,
            finding.where,
            printable(finding.observed),
            printable(finding.allowed),
            _remedy(check, finding, seen),
            finding.mend,
        )
    # A check of the whole cluster names the faulty nodes; it has passed for the others.
    if check.scope == "cluster":
        named = {name for finding in findings for name in finding.where}
        if not any(finding.where == () for finding in findings):
            yield from (Result(check, "pass", (name,)) for name in subject if name not in named)
    elif not findings:
        yield Result(check, "pass", place)


def set_up_line(check: Check, target: Target) -> str:
    """The set-up command that repairs what the check finds, with {limit} for the nodes; empty if none does."""
    return f"{target.set_up} --tags {check.tag} --limit {{limit}}" if check.tag and target.set_up else ""


def printable(text: str) -> str:
    """The text without characters that a node may have put in to control a terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def _remedy(check: Check, finding: Finding, seen: Seen) -> str:
    """The repair command, with a placeholder for the nodes: {limit}; they may be folded first."""
    if finding.verdict not in ("warn", "fail"):
        return ""
    text = finding.remedy or (check.remedy_alone if seen.target.is_here else "") or check.remedy
    if not text:
        return set_up_line(check, seen.target)
    if seen.target.is_here:
        text = on_this_machine(text)
    node = finding.where[-1] if finding.where else seen.target.head
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
