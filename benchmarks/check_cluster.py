"""How long `mpitrain check-cluster` takes on a test bed, level by level, and with a node that is off.

    python benchmarks/check_cluster.py BED [ROUNDS]

BED is a test bed that is there (`mpitrain testbed up 4`, set up or not). Prints seconds (median, lowest, highest), and
from the nodes' journals how many logins were open on a node at the same time.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Sequence

from mpitrain.testbed import Bed, find

_LOGINS = "journalctl --no-pager -o short-unix -t sshd -S @{since} | grep -E 'session (opened|closed) for user admin'"


def seconds_of(bed: Bed, level: str) -> float:
    """The time of one run, including the start of Python."""
    started = time.perf_counter()
    bed.run(["mpitrain", "check-cluster", "--json", "--level", level], timeout_seconds=600)
    return time.perf_counter() - started


def show(name: str, seconds: Sequence[float]) -> None:
    print(f"{name:<28} {statistics.median(seconds):6.2f} s  [{min(seconds):.2f} to {max(seconds):.2f}]", flush=True)


def most_logins(bed: Bed, since: int) -> int:
    """The largest number of logins of the checking machine that one node had at a time."""
    most = 0
    for node in bed.names:
        text = bed.node_run(node, ["bash", "-c", _LOGINS.format(since=since)]).stdout
        now = 0
        for word in re.findall(r"session (opened|closed)", text):
            now += 1 if word == "opened" else -1
            most = max(most, now)
    return most


def main() -> None:
    bed = find(sys.argv[1])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    print(f"{len(bed.names)} nodes, {rounds} rounds")
    since = int(time.time())
    for level in ("quick", "full") if len(bed.names) <= 8 else ("quick",):
        show(level, [seconds_of(bed, level) for _ in range(rounds)])
    print(f"most logins on a node at once: {most_logins(bed, since)}")
    last = bed.names[-1]
    bed.kill(last)
    try:
        show(f"quick, {last} off", [seconds_of(bed, "quick") for _ in range(rounds)])
    finally:
        bed.heal(last)


if __name__ == "__main__":
    main()
