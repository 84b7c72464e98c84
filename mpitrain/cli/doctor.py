"""`mpitrain doctor`: report what is wrong with this machine, then describe it."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from datetime import UTC, datetime

from mpitrain.cli.terminal_text import print_object

HELP = "report what is wrong with this machine, and what repairs it"
PAGE = "how-to/troubleshooting.md"

_EPILOG = """\
doctor makes the checks of `mpitrain check-cluster` that concern a single machine, without ssh. It starts two processes
to see whether they become one job. It changes nothing. The exit code is 1 if a check fails. It is 0 if there are only
warnings, or checks that could not be made.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Examine this machine, judge and print. Return the exit code."""

    from mpitrain.check.doctor import aligned, facts, log_in, target_here
    from mpitrain.check.report import document, show, text
    from mpitrain.check.run import check_cluster, of_one_machine

    target, started, begun = target_here(), datetime.now(UTC), time.monotonic()
    results, seen, interrupted = check_cluster(target, log_in, of_one_machine(), lambda _text: None)
    if arguments.json:
        when, seconds = started.isoformat(timespec="seconds"), time.monotonic() - begun
        answer = document(results, target, started=when, seconds=seconds, interrupted=interrupted)
        sections = {**seen.nodes.get(target.head, {}), "two ranks": None, "gpu ways": None}
        sections |= {name: nodes.get(target.head) for name, nodes in seen.cluster.items()}
        print_object({**answer, "facts": sections})
    else:
        width = shutil.get_terminal_size().columns
        show(text(results, target, width))
        print()
        print(aligned(facts(seen, target.head), width))
    if interrupted:
        print("interrupted: the report above covers only what was seen before", file=sys.stderr)
    return 130 if interrupted else int(any(result.verdict == "fail" for result in results))
