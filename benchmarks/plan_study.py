"""Blind predictions of `mpitrain plan` for several clusters, then the same steps measured.

    .venv/bin/python benchmarks/plan_study.py /tmp/plan-study          less than 25 minutes, on a quiet machine, as root

First all clusters are predicted, and the predictions written to FOLDER/predict.jsonl with the time. Only then the steps
are measured, into FOLDER/measure.jsonl. The folder must be empty: nothing is predicted twice.

    error   predicted / measured - 1, of the median
    cores   the machine's cores were full for more than a tenth of the time of these steps (plan_measured.py). They are
            shared by all hosts, so such a step says little of hosts with cores of their own. It counts in the first
            line of the summary, and not in the second one.
    best    how much longer the way takes that the plan puts first than the fastest one that was measured
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FULL = 0.1
_MOST_SECONDS = 300  # of a job: one that hangs must not keep the others


@dataclass(frozen=True)
class Cluster:
    """Hosts that are simulated, and the model that is trained there."""

    hosts: int
    rate: str
    millions: float
    slow_last: float = 1.0
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a name without blanks, which goes through three shells."""
        last = f"+last-{self.environment['LAST_RATE']}" if "LAST_RATE" in self.environment else ""
        return f"{self.hosts}x{self.rate}{last}"


# What an idle link of a bed carries at once counts in the small steps of slow links, and no real link does so.
_SLOW = {"BURST": "32kb"}
_CLUSTERS = (
    Cluster(2, "100mbit", 1, environment=_SLOW),
    Cluster(2, "1gbit", 5),
    Cluster(2, "10gbit", 10),
    Cluster(4, "100mbit", 1, environment=_SLOW),
    Cluster(4, "1gbit", 5),
    Cluster(4, "1gbit", 5, 1.5, {"LAST_RATE": "500mbit"}),
    Cluster(4, "10gbit", 10),
    Cluster(8, "100mbit", 1, environment=_SLOW),
    Cluster(8, "1gbit", 5),
    Cluster(8, "10gbit", 10),
)


def job(cluster: Cluster, what: str, folder: Path) -> None:
    """Run one job on the cluster."""
    words = [
        "$MPIEXEC", sys.executable, "benchmarks/plan_measured.py", what, f"--file={folder}/{what}.jsonl",
        f"--row={cluster}", f"--millions={cluster.millions}", f"--slow-last={cluster.slow_last}",
        f"--costs={folder}/costs-{cluster.hosts}", f"--turns={1 if cluster.hosts == 8 else 2}",
    ]  # fmt: skip
    began = time.perf_counter()
    command = ["benchmarks/shaped_hosts", str(cluster.hosts), cluster.rate, " ".join(words)]
    code = subprocess.run(
        ["timeout", str(_MOST_SECONDS), *command], env={**os.environ, **cluster.environment}, check=False
    ).returncode
    ended = f"exit code {code}, " if code else ""
    print(f"{what} {cluster}: {ended}{time.perf_counter() - began:.0f} s", flush=True)


def lines_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a file, by row."""
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    return {line["row"]: line for line in lines}


def main() -> None:
    """Predict, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hosts", default="2,4,8", help="only clusters with so many (2,4,8)")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    if any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty; a prediction is made once")
    numbers = {int(number) for number in options.hosts.split(",")}
    clusters = [cluster for cluster in _CLUSTERS if cluster.hosts in numbers]
    for what in ("predict", "measure"):
        for cluster in clusters:
            job(cluster, what, options.folder)
    show(lines_of(options.folder / "predict.jsonl"), lines_of(options.folder / "measure.jsonl"))


def show(predicted: dict[str, dict[str, Any]], measured: dict[str, dict[str, Any]]) -> None:
    """Print a row for each cluster, and a summary."""
    rows = [row for row in predicted if row in measured]
    if not rows:
        sys.exit("plan_study: no cluster was both predicted and measured; see the messages above")
    ways = list(predicted[rows[0]]["predicted"])
    load = max(line["load"] for line in measured.values())
    times = f"predicted until {predicted[rows[-1]]['time']}, measured until {measured[rows[-1]]['time']}"
    print(f"{measured[rows[0]]['versions']}; {times}; load at most {load:.0f}")
    print("| hosts, links |", " | ".join(ways), "| best |")
    print("|", "--- | " * (len(ways) + 2))
    errors: dict[bool, list[float]] = {True: [], False: []}
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        told, full = predicted[row]["predicted"], measured[row]["full"]
        medians = {way: statistics.median(taken) for way, taken in measured[row]["measured"].items()}
        cells = []
        for way in ways:
            error, is_full = told[way] / medians[way] - 1, full[way] > _FULL
            errors[is_full].append(abs(error))
            mark = f", cores {full[way]:.0%}" if is_full else ""
            cells.append(f"{told[way] * 1e3:.0f}, {medians[way] * 1e3:.0f}, {error:+.1%}{mark}")
        first = min(told, key=told.__getitem__)
        gap = medians[first] / min(medians.values()) - 1
        gaps[full[first] > _FULL].append(gap)
        print(f"| {row} |", " | ".join(cells), f"| {first} {gap:+.1%} |")
    for name, of_rows, of_best in (
        ("all steps", errors[True] + errors[False], gaps[True] + gaps[False]),
        ("where the cores were not full", errors[False], gaps[False]),
    ):
        if of_rows:
            best = f"; best row at most {max(of_best):.1%} off" if of_best else ""
            print(
                f"{name}, {len(of_rows)}: median error {statistics.median(of_rows):.1%}, worst {max(of_rows):.1%}{best}"
            )


if __name__ == "__main__":
    main()
