"""Servers against workers: samples/s for each number of both, beside what the links and the workers allow at most.

    python benchmarks/servers_study.py [--mbit 100] [--mib 2] [--compute 1] [--plot study.png] [--results study.json]

As root. Every pair of numbers is a job of servers.py, behind links of that rate. A worker pulls, computes and pushes,
so at most workers / (compute + 2 * size / rate) samples/s are possible. In mode async, the servers' links allow
servers * rate / size: a server sends the parameters to one worker while it receives the gradient of another one. In
mode sync a step takes at least compute + (workers / servers + 1) * size / rate: the last worker pulls after all others,
and pushes when it has computed. With fewer workers than servers, a worker's own link is the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MODES = ("sync", "async")


def bound(mode: str, servers: int, workers: int, compute: float, transfer: float) -> float:
    """The most samples/s. `transfer`: seconds in which a link carries all parameters once."""
    if mode == "sync":
        return workers / (compute + transfer * (max(workers / servers, 1) + 1))
    return min(workers / (compute + 2 * transfer), servers / transfer)


def measured(mode: str, servers: int, workers: int, options: argparse.Namespace) -> float:
    """The samples/s of one job."""
    steps = 6 if mode == "sync" else 6 * workers
    run = (
        f"$MPIEXEC {sys.executable} {FOLDER}/servers.py --servers {servers} --mib {options.mib} --steps {steps} "
        f"--mbit {options.mbit} --compute {options.compute} --mode {mode}"
    )
    command = [str(FOLDER / "shaped_hosts"), str(servers + workers), f"{options.mbit}mbit", run]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    found = re.search(r"([\d.]+) samples/s", done.stdout)
    if done.returncode or not found:
        raise SystemExit(done.stdout + done.stderr)
    return float(found[1])


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Points measured, lines of the bounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for mode, ax in zip(MODES, axes, strict=True):
        for index, servers in enumerate(sorted({row["servers"] for row in rows})):
            own = [row for row in rows if row["mode"] == mode and row["servers"] == servers]
            workers = [row["workers"] for row in own]
            label = f"{servers} server{'s' if servers > 1 else ''}"
            ax.plot(workers, [row["measured"] for row in own], "o", color=f"C{index}", label=label)
            ax.plot(workers, [row["bound"] for row in own], "-", color=f"C{index}", linewidth=1)
        ax.set(title=f"mode {mode}", xlabel="workers", xscale="log", yscale="log")
        ax.set_xticks(workers, workers)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("samples/s (lines: the most that is possible)")
    axes[0].set_yticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--mib", type=float, default=2.0, help="size of the parameters")
    parser.add_argument("--compute", type=float, default=1.0, help="seconds of a worker for a sample")
    parser.add_argument("--servers", default="1,2,4")
    parser.add_argument("--workers", default="1,2,4,8,16")
    parser.add_argument("--plot")
    parser.add_argument("--results", help="a JSON file")
    options = parser.parse_args()
    transfer = options.mib * 2**20 * 8 / (options.mbit * 1e6)
    rows = []
    print(f"{options.mib:g} MiB, {options.mbit} Mbit/s, {options.compute:g} s a sample, {os.cpu_count()} cores")
    print("| mode | servers | workers | samples/s | at most | share | load |", "| --- " * 7 + "|", sep="\n")
    for mode in MODES:
        for servers in map(int, options.servers.split(",")):
            for workers in map(int, options.workers.split(",")):
                most = bound(mode, servers, workers, options.compute, transfer)
                speed = measured(mode, servers, workers, options)
                load = os.getloadavg()[0]
                rows.append({"mode": mode, "servers": servers, "workers": workers, "measured": speed, "bound": most})
                text = f"{speed:.2f} | {most:.2f} | {speed / most:.2f} | {load:.0f}"
                print(f"| {mode} | {servers} | {workers} | {text} |", flush=True)
    if options.results:
        Path(options.results).write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
