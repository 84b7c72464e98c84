"""`mpitrain doctor`: what is wrong with this machine, then what it is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import socket
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpitrain.diagnostics import Facts
    from mpitrain.diagnostics.finding import Finding

HELP = "say what is wrong with this machine, and the command that repairs it"

_EPILOG = """\
Starts two processes to see whether they become one job; changes nothing.
The exit code is 1 if something fails. Warnings alone leave it 0.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Collect, judge and print; returns the exit code."""
    from mpitrain.diagnostics import SUBJECTS

    facts = {name: subject.collect() for name, subject in SUBJECTS.items()}
    findings = [finding for name, subject in SUBJECTS.items() for finding in subject.judge(facts[name])]
    findings.sort(key=lambda finding: finding.level != "fail")
    if arguments.json:
        plain = {name: dataclasses.asdict(fact) for name, fact in facts.items()}  # type: ignore[call-overload]
        report = {"findings": [dataclasses.asdict(finding) for finding in findings], "facts": plain}
        print(json.dumps(report, indent=2, default=str))
    else:
        width = shutil.get_terminal_size().columns
        print(report_text(socket.gethostname(), findings, list(facts.values()), width))
    return int(any(finding.level == "fail" for finding in findings))


def report_text(host: str, findings: list[Finding], facts: list[Facts], width: int) -> str:
    """The report for people, wrapped to `width`; a command is never wrapped, so that it can be copied."""
    counts = [sum(finding.level == level for finding in findings) for level in ("fail", "warn")]
    lines = [f"{host}: {counts[0]} failed, {counts[1]} warnings" if findings else f"{host}: nothing is wrong", ""]
    for finding in findings:
        lines += _wrapped(f"{finding.level.upper()}  ", finding.found, width)
        lines += _wrapped("      ", finding.why, width)
        lines += [f"      $ {finding.remedy}", ""]
    named = [line for fact in facts for line in fact.lines()]
    margin = max(len(name) for name, _ in named) + 2
    for name, value in named:
        lines += _wrapped(name.ljust(margin), value, width)
    return "\n".join(lines)


def _wrapped(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, len(label) + 20),
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )
