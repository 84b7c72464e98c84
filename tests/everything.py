"""Run every check and test, one after the other, and end with one line: `N passed, N failed`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from jobs import REPOSITORY, RUN_TOKEN, VENVS, clean_environment, kill_all, mpiexec, processes_of
from mpitrain.diagnostics.limits import SHM_PATTERNS

# The tests that run on all ranks of a job at once.
ON_RANKS = ["tests/ranks", "tests/device_ranks", "tests/torch_ranks", "tests/jax_ranks"]
# World sizes for those of tests/ranks: powers of two and not, more ranks than cores.
SIZES = {"mpich": (1, 2, 3, 4, 5, 7), "openmpi": (2, 3)}
# With so many ranks on few cores, the tests whose arithmetic or order of messages depends on how many there are.
MANY_RANKS = (5, 7)
BY_SIZE = "test_allreduce or test_collectives or test_compressed or test_reducer or test_transfer or test_world"
# World sizes for tests with arrays on GPUs, which are emulated here; scripts/gpu-check runs them on real ones.
EMULATED_GPUS = {1: 1, 2: 2, 4: 2}  # by number of ranks
EMULATED_GPUS_TOO = {3: 1}  # with --full
MANY_FOR_GPUS, DEVICES_BY_SIZE = 4, "test_transports or test_compressed or test_reducer"
# World sizes for the tests of mpitrain.torch and mpitrain.jax, which are skipped where there is no PyTorch, or no JAX.
FRAMEWORKS = {"torch": (1, 2, 3, 4, 5), "jax": (1, 2, 3, 4, 5)}
# With these many ranks, the tests of mpitrain.torch whose messages or arithmetic depend on how many there are.
MANY_FOR_TORCH = (4, 5)
TORCH_BY_SIZE = (
    "(test_collectives or test_groups or test_point_to_point or test_sharded or test_prepare.py) and not compression"
)
# The tests that need a bed of nodes (mpitrain/testbed).
ON_NODES = ["tests/testbed", "tests/cluster", "tests/cli/test_cluster_bed.py", "tests/faults/cluster"]
# Far above what a part takes; a part that reaches it hangs.
DEADLINE_SECONDS = 1800.0
ON_NODES_SECONDS = 3600.0
# After SIGTERM, before SIGKILL.
GRACE_SECONDS = 10.0


def parts(full: bool) -> Iterator[tuple[str, list[str], bool, float]]:
    """Name, command, whether it is a pytest run (which gets --junit-xml), and how long it may take."""
    yield "lint and types", ["scripts/check"], False, DEADLINE_SECONDS
    slow = [] if full else ["-m", "not slow"]
    pytest = [sys.executable, "-m", "pytest", "-q", *slow]
    elsewhere = [f"--ignore={path}" for path in [*ON_RANKS, *ON_NODES]]
    yield "one process", [*pytest, "--durations=25", *elsewhere], True, DEADLINE_SECONDS
    yield "nodes", [*pytest, "--durations=15", *ON_NODES], True, ON_NODES_SECONDS
    for vendor, sizes in SIZES.items():
        for size in sizes:
            python = VENVS[vendor] / "bin/python"
            chosen = ["-k", BY_SIZE] if size in MANY_RANKS and not full else []
            command = [*mpiexec(size, vendor), str(python), "-m", "tests.ranks", *slow, *chosen]
            yield f"{size} ranks, {vendor}", command, True, DEADLINE_SECONDS
    for framework, sizes in FRAMEWORKS.items():
        if importlib.util.find_spec(framework) is None:
            print(f"\n=== tests.{framework}_ranks: skipped, {sys.prefix} has no {framework}", flush=True)
            continue
        for size in sizes:
            few = framework == "torch" and size in MANY_FOR_TORCH and not full
            chosen = ["-k", TORCH_BY_SIZE] if few else []
            command = [*mpiexec(size), sys.executable, "-m", f"tests.{framework}_ranks", *slow, *chosen]
            yield f"{size} ranks, {framework}", command, True, DEADLINE_SECONDS
    for size, gpus in (EMULATED_GPUS | (EMULATED_GPUS_TOO if full else {})).items():
        chosen = ["-k", DEVICES_BY_SIZE] if size == MANY_FOR_GPUS and not full else []
        command = [*mpiexec(size), sys.executable, "-m", "tests.device_ranks", f"--emulated={gpus}", *slow, *chosen]
        yield f"{size} ranks, emulated GPU", command, True, DEADLINE_SECONDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the slow tests too")
    arguments = parser.parse_args()
    # In the background of a shell script Ctrl-C is ignored, and would be in all tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As by Ctrl-C: the part and all its jobs end too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    total: Counter[str] = Counter()
    failed_parts = []
    shared = shared_memory()
    for name, command, is_pytest, deadline_seconds in parts(arguments.full):
        print(f"\n=== {name}", flush=True)
        started = time.monotonic()
        counts = run(command, is_pytest, deadline_seconds)
        total += counts
        if counts["failed"]:
            failed_parts.append(name)
        print(f"--- {name}: {dict(counts)}, {time.monotonic() - started:.0f} s", flush=True)
        for path in shared_memory() - shared:
            path.unlink(missing_ok=True)
    if failed_parts:
        print(f"\nfailed: {', '.join(failed_parts)}")
    print(f"\nskipped, with the reasons above: {total['skipped']}")
    print(f"{total['passed']} passed, {total['failed']} failed", flush=True)
    return 1 if total["failed"] else 0


def run(command: list[str], is_pytest: bool, deadline_seconds: float) -> Counter[str]:
    """Counts of one part. A part that ends badly without a failed test counts as one failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        if is_pytest:
            command = [*command, f"--junit-xml={report}"]
        token = uuid.uuid4().hex
        environment = clean_environment({RUN_TOKEN: token})
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, start_new_session=True)
        try:
            code = process.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            print(f"ended: it ran longer than {deadline_seconds:.0f} s")
            code = end(process, token)
        except BaseException:  # Ctrl-C comes to this process alone
            end(process, token)
            raise
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


def end(process: subprocess.Popen[bytes], token: str) -> int:
    """End a part and all the jobs in it, also those in sessions of their own. Returns its exit code."""
    _signal_group(process, signal.SIGTERM)
    processes_of(token, patience=GRACE_SECONDS)
    _signal_group(process, signal.SIGKILL)
    while processes_of(token):  # again: one may have started another in between
        kill_all(token)
        time.sleep(0.05)
    return process.wait()


def shared_memory() -> set[Path]:
    """What MPI keeps in memory, and leaves there where a test has killed its job; not what a process has mapped."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {line.split()[5] for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    found = {path for pattern in (*SHM_PATTERNS, "sem.mp-*") for path in Path("/dev/shm").glob(pattern)}
    return {path for path in found if str(path) not in mapped}


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.returncode is None:  # not waited for, so that its number cannot be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
