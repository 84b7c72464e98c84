"""False findings of `mpitrain check-cluster` on healthy clusters, at every level, also on a busy machine.

    python benchmarks/check_healthy.py [--rounds 5] [--load 15] BED...

Each BED is a test bed that was set up (`mpitrain testbed up 3 --name BED`, `mpitrain testbed run --name BED
ansible-playbook cluster/setup.yml`). With --load, so many loops compute beside it. Prints each finding, and at the end,
for each level, the runs, those without a finding, and the findings by check. A reader judges whether a finding is
true: that a login takes 3 s is true on such a machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter

from mpitrain.diagnostics.check import LEVELS
from mpitrain.testbed import find

_SETTLES_SECONDS = 5.0


def compute() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--levels", nargs="+", default=LEVELS, choices=LEVELS)
    parser.add_argument("beds", nargs="+")
    arguments = parser.parse_args()
    loops = [multiprocessing.Process(target=compute, daemon=True) for _ in range(arguments.load)]
    for loop in loops:
        loop.start()
    while os.getloadavg()[0] < arguments.load:
        time.sleep(_SETTLES_SECONDS)
    for level in arguments.levels:
        said: Counter[str] = Counter()
        seconds, loads, quiet, runs = [], [], 0, 0
        for name in arguments.beds:
            bed = find(name)
            for _ in range(arguments.rounds):
                loads.append(os.getloadavg()[0])
                done = bed.run(["mpitrain", "check-cluster", "--json", "--level", level], timeout_seconds=3000)
                document = json.loads(done.stdout)
                findings = [one for one in document["findings"] if one["verdict"] != "skip"]
                for one in findings:
                    said[f"{one['id']} {one['verdict']}"] += 1
                    print(f"  {name} {level}: {one['id']} {one['verdict']} {one['places']}: {one['found']}", flush=True)
                if not findings:
                    print(f"  {name} {level}: no finding", flush=True)
                runs += 1
                quiet += not findings
                seconds.append(document["seconds"])
        listed = ", ".join(f"{key} {count} times" for key, count in said.most_common()) or "none"
        print(
            f"{level:<6} {runs} runs on {len(arguments.beds)} beds, {quiet} without a finding; findings: {listed}; "
            f"{min(seconds):.0f} to {max(seconds):.0f} s, load {min(loads):.0f} to {max(loads):.0f}",
            flush=True,
        )
    for loop in loops:
        loop.terminate()


if __name__ == "__main__":
    main()
