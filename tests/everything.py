"""Run every check and test, one after the other, and end with one line: `N passed, N failed`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from jobs import REPOSITORY, VENVS, clean_environment, mpiexec

# World sizes for the tests that run on all ranks: powers of two and not, more ranks than cores.
SIZES = {"mpich": (1, 2, 3, 4, 5, 7), "openmpi": (2, 3)}
# Far above what a part takes; a part that reaches it hangs.
DEADLINE_SECONDS = 900.0


def parts(full: bool) -> Iterator[tuple[str, list[str], bool]]:
    """Name, command, and whether it is a pytest run (which gets --junit-xml)."""
    yield "lint and types", ["scripts/check"], False
    slow = [] if full else ["-m", "not slow"]
    yield "one process", [sys.executable, "-m", "pytest", "-q", "--ignore=tests/ranks", *slow], True
    for vendor, sizes in SIZES.items():
        for size in sizes:
            python = VENVS[vendor] / "bin/python"
            yield f"{size} ranks, {vendor}", [*mpiexec(size, vendor), str(python), "-m", "tests.ranks", *slow], True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the slow tests too")
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    failed_parts = []
    for name, command, is_pytest in parts(arguments.full):
        print(f"\n=== {name}", flush=True)
        started = time.monotonic()
        counts = run(command, is_pytest)
        total += counts
        if counts["failed"]:
            failed_parts.append(name)
        print(f"--- {name}: {dict(counts)}, {time.monotonic() - started:.0f} s", flush=True)
    if failed_parts:
        print(f"\nfailed: {', '.join(failed_parts)}")
    print(f"\nskipped, with the reasons above: {total['skipped']}")
    print(f"{total['passed']} passed, {total['failed']} failed", flush=True)
    return 1 if total["failed"] else 0


def run(command: list[str], is_pytest: bool) -> Counter[str]:
    """Counts of one part. A part that ends badly without a failed test counts as one failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        if is_pytest:
            command = [*command, f"--junit-xml={report}"]
        process = subprocess.Popen(command, cwd=REPOSITORY, env=clean_environment(), start_new_session=True)
        try:
            code = process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"ended: it ran longer than {DEADLINE_SECONDS:.0f} s")
            process.terminate()  # mpiexec ends its ranks
            code = process.wait()
        counts: Counter[str] = Counter()
        if is_pytest and report.exists():
            suite = next(ElementTree.parse(report).iter("testsuite")).attrib
            bad = int(suite["failures"]) + int(suite["errors"])
            skipped = int(suite["skipped"])
            counts.update(failed=bad, skipped=skipped, passed=int(suite["tests"]) - bad - skipped)
        elif not is_pytest:
            counts["failed" if code else "passed"] += 1
    if code and not counts["failed"]:
        print(f"exit code {code} from {' '.join(command)}")
        counts["failed"] += 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
