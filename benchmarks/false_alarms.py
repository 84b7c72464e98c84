"""Whether a pause is taken for a loss: again and again, a node is frozen for less than the silence of a lost one.

    mpitrain testbed up 4 && mpitrain testbed run ansible-playbook cluster/setup.yml
    python benchmarks/false_alarms.py [--minutes 60] [--every 30] [--pause 4]

As root. A job trains on all nodes of the bed, two ranks on each, with the mpitrain of this checkout. Every `--every`
seconds, a node drawn by lot is frozen for `--pause` seconds; one of them has the launcher. A false alarm is any word of
the launcher's about a host or a try. Printed are the pauses, the steps and the load meanwhile.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
import time
from itertools import pairwise

from changes import PYTHONS, Training
from kill_table import install
from mpitrain.testbed import find


def main() -> None:
    """Freeze nodes, and print what the job said. The exit code is 1 if there was a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=30.0)
    parser.add_argument("--pause", type=float, default=4.0)
    parser.add_argument("--mb", type=int, default=1)
    parser.add_argument("--mpi", choices=sorted(PYTHONS), default="mpich")
    parser.add_argument("--name", help="the test bed, where there are several")
    options = parser.parse_args()
    bed = find(options.name)
    install(bed)
    training = Training(bed, PYTHONS[options.mpi], options.mb, "")
    training.wait_for(2 * len(bed.names), 20)
    started, loads, pauses = time.monotonic(), [], dict.fromkeys(bed.names, 0)
    while time.monotonic() < started + 60 * options.minutes:
        node = random.choice(bed.names)
        bed.freeze(node)
        time.sleep(options.pause)
        bed.thaw(node)
        pauses[node] += 1
        loads.append(os.getloadavg()[0])
        time.sleep(options.every - options.pause)
    stamps = training.stamps()
    output = training.end()
    said = [line for line in output.splitlines() if line.startswith("mpitrain: ")]
    alarms = [line for line in said if re.search(r"no message|\btry\b|lost|ended", line)]
    steps = [after[2] - before[2] for before, after in pairwise(stamps)]
    print(f"{sum(pauses.values())} pauses of {options.pause:g} s in {options.minutes:g} min: {pauses}")
    print(f"load: median {statistics.median(loads):.1f}, highest {max(loads):.1f}")
    print(f"{len(stamps)} steps, none left out: {[a for a, *_ in stamps] == list(range(1, len(stamps) + 1))}")
    print(f"a step takes {statistics.median(steps):.3f} s, the longest took {max(steps):.1f} s")
    print("the job ended with 0:", output.rstrip().endswith("\ncode 0"))
    print("the launcher said:", *said, sep="\n  ")
    sys.exit(int(bool(alarms) or not output.rstrip().endswith("\ncode 0")))


if __name__ == "__main__":
    main()
