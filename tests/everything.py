"""Run every check and test, as many side by side as there are cores, and end with one line: `N passed, N failed`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from jobs import REPOSITORY, SNAPSHOT, VENVS, mpiexec
from mpitrain.diagnostics.checks.leftovers import SHM_PATTERNS
from mpitrain.errors import ConfigError
from mpitrain.testbed import STATE, forget_snapshot, snapshot_names
from side_by_side import Part, run

# The tests that run on all ranks of a job at once.
ON_RANKS = ["tests/ranks", "tests/device_ranks", "tests/torch_ranks", "tests/jax_ranks"]
# What is chosen of tests/ranks, by MPI library and world size ("": all of them). One rank is alone; of two, the one
# before is also the one after; of three, it is not. With four come what needs a fourth rank, nodes of different size,
# and what depends on the number of ranks in its arithmetic or in the order of its messages, which a queue of many
# allreduces does not. Five and seven are one and three beyond a power of two, and nodes have one, two and four: what is
# built on the sums differs in neither from three and four. Open MPI differs in how it starts and sends, which three
# ranks show.
BY_SIZE = (
    "(test_allreduce.py or test_collectives.py or test_compressed.py or test_reducer or test_transfer.py"
    " or test_world) and not test_many_may_be"
)
SUMS = (
    "(test_allreduce.py or test_collectives.py or test_sums_are_as_close_as_the_codec or test_world)"
    " and not test_many_may_be"
)
OF_FOUR = f"{BY_SIZE} or test_checkpoint or test_data or test_replicas or test_ring_order or test_training"
SIZES = {
    "mpich": {1: "", 2: "", 3: "", 4: OF_FOUR, 5: SUMS, 7: SUMS},
    "openmpi": {2: BY_SIZE, 3: ""},
}
MOST_RANKS = 7  # too many for the batches of some of the others
# The same for mpitrain.torch and mpitrain.jax, which are skipped where there is no PyTorch, or no JAX. Its groups and
# meshes take 4 ranks. JAX hands its arrays to the collectives that tests/ranks tries, so five ranks show what three do.
# What torch.compile makes of a program does not depend on the number of ranks, and takes each rank some seconds; with
# three, each has two others.
TORCH_BY_SIZE = (
    "(test_collectives or test_groups or test_point_to_point or test_sharded or test_prepare.py) and not compression"
)
NOT_COMPILED = "not test_compiled.py"
FRAMEWORKS = {
    "torch": {1: NOT_COMPILED, 2: NOT_COMPILED, 3: "", 4: TORCH_BY_SIZE},
    "jax": {1: "", 2: "", 5: ""},
}
FRAMEWORKS_TOO = {"torch": {5: ""}, "jax": {3: "", 4: ""}}  # with --full
# The same with arrays on GPUs, which are emulated here; scripts/gpu-check runs them on real ones. With 4 ranks on 2 of
# them come several on each; errors and streams are a matter of one rank or of two.
OF_FOUR_ON_GPUS = (
    "test_transports or test_the_bits_of_the_host or test_weighted_means_of_all_dtypes or test_a_reducers_gradients"
)
EMULATED = {1: "", 2: "", 3: "nccl", 4: OF_FOUR_ON_GPUS}  # NCCL needs a GPU for each rank
EMULATED_GPUS = {1: 1, 2: 2, 3: 3, 4: 2}  # by number of ranks
# The tests that need beds of nodes (mpitrain/testbed), in parts of about the same length. They wait much of the time,
# so they run beside all others. Many start from one snapshot (`provisioned` in tests/conftest.py): the part that needs
# it first makes it. The others have the tests that do without it first, so that they do not wait for it.
ON_NODES = {
    "a cluster": ["tests/cluster/test_cycle.py", "tests/cli/test_cluster_bed.py"],
    "faults of a cluster": ["tests/faults/cluster"],
    "beds, and jobs whose hosts change": [
        "tests/testbed",
        *(f"tests/cluster/test_{name}.py" for name in ("restart_over_hosts", "chaos_over_hosts", "elastic", "joining")),
    ],
    "nodes, and jobs over them": ["tests/cluster"],
}
# The other tests run in a process for each folder that takes long; what is not named here has one process for all. That
# of faults takes longest, and is five parts of about the same length.
FAULTS = {
    "faults, memory and recovery": [
        f"tests/faults/test_{name}.py" for name in ("memory", "memory_of_ranks", "recovery", "recovery_of_programs")
    ],
    "faults, hangs and what is kept": [
        f"tests/faults/test_{name}.py"
        for name in (
            *("hangs", "keep_torch", "keep", "saving", "resume", "checkpoints", "segments"),
            *("recovery_in_trace", "recovery_of_rounds", "recovery_of_shards", "rounds_in_a_loop"),
        )
    ],
    "faults, failures": [
        f"tests/faults/test_{name}.py"
        for name in (
            *("failure", "start_and_end", "leaving", "signals", "exit_code"),
            *("helpers", "start_method", "torch", "examples", "examples_on_gpu"),
        )
    ],
    "faults, restarts": [f"tests/faults/test_{name}.py" for name in ("spares", "restart", "chaos", "kills")],
    "faults, others": ["tests/faults"],
}
LONG_FOLDERS = ["cli", "examples", "serve", "cuda", "training"]
# Such a part waits most of the time, for jobs that start or stand still (measured: docs/log.md). Ranks nap while they
# wait for each other, so theirs does not keep a core busy either. On two cores, six folders run beside one of them.
CORES_OF_A_FOLDER = 0.2
CORES_OF_RANKS = 0.7
# For a first look: what needs neither nodes nor a job of its own, and of the tests on ranks what most others rest on.
QUICK_FOLDERS = ["bench", "diagnostics", "launch", "training", "verify"]
SLOW_FILES = [f"tests/test_{name}.py" for name in ("docs", "everything", "one_of_each", "trace")]
QUICK_RANKS = {2: "test_training or test_checkpoint", 3: BY_SIZE}
# More at once than on so many cores has never been tried.
MOST_CORES = 4
# The slow tests on beds take longer than all others together.
SECONDS_OF_FULL = 3 * 3600.0


def parts(full: bool) -> Iterator[Part]:
    """All of them, the longest first, so that none begins last.

    Those on ranks run beside the folders from the beginning: they use the cores while the folders wait.
    """
    slow = [] if full else ["-m", "not slow"]
    pytest = [sys.executable, "-m", "pytest", "-q", *slow, "--durations=15"]
    on_nodes = [path for paths in ON_NODES.values() for path in paths]
    for name, paths in ON_NODES.items():
        yield Part(name, [*pytest, *paths, *below(paths, on_nodes)], cores=0, again=True)
    in_parts = [*on_nodes, *(path for paths in FAULTS.values() for path in paths)]
    for name, paths in FAULTS.items():
        yield Part(name, [*pytest, *paths, *below(paths, in_parts)], cores=CORES_OF_A_FOLDER, again=True)
    ignored = [f"--ignore={path}" for path in [*ON_RANKS, *in_parts]]
    folders = [
        Part(f"tests/{name}", [*pytest, f"tests/{name}", *ignored], cores=CORES_OF_A_FOLDER, again=True)
        for name in LONG_FOLDERS
    ]
    others = [*pytest, "tests", *ignored, *(f"--ignore=tests/{name}" for name in LONG_FOLDERS)]
    yield Part("other tests", others, cores=CORES_OF_A_FOLDER, again=True)
    yield Part("lint and types", ["scripts/check"], is_pytest=False, cores=CORES_OF_RANKS)
    yield from on_ranks(slow, full)
    yield from folders


def below(paths: list[str], others: list[str]) -> list[str]:
    """Options that leave out what is in one of these paths and has a part of its own among the others."""
    return [f"--ignore={path}" for path in others if path.startswith(tuple(f"{folder}/" for folder in paths))]


def on_ranks(slow: list[str], full: bool) -> Iterator[Part]:
    """The tests that run on all ranks of a job."""
    for vendor, sizes in SIZES.items():
        for size, chosen in sizes.items():
            all_of_it = full and size != MOST_RANKS
            yield of_ranks("ranks", size, "" if all_of_it else chosen, *slow, vendor=vendor)
    for framework, sizes in FRAMEWORKS.items():
        if importlib.util.find_spec(framework) is None:
            print(f"\n=== tests.{framework}_ranks: skipped, {sys.prefix} has no {framework}", flush=True)
            continue
        for size, chosen in (sizes | (FRAMEWORKS_TOO[framework] if full else {})).items():
            yield of_ranks(f"{framework}_ranks", size, "" if full else chosen, *slow)
    for size, chosen in EMULATED.items():
        gpus = f"--emulated={EMULATED_GPUS[size]}"
        yield of_ranks("device_ranks", size, "" if full else chosen, gpus, *slow)


def of_ranks(module: str, size: int, chosen: str, *options: str, vendor: str = "mpich") -> Part:
    """The tests of a module on so many ranks; only those that are chosen, unless that is empty."""
    command = [*mpiexec(size, vendor), str(VENVS[vendor] / "bin/python"), "-m", f"tests.{module}", *options]
    other = "" if vendor == "mpich" else f", {vendor}"
    return Part(f"{module} on {size}{other}", [*command, *(["-k", chosen] if chosen else [])], cores=CORES_OF_RANKS)


def quick_parts() -> Iterator[Part]:
    """A first look, in less than three minutes."""
    yield Part("lint and types", ["scripts/check"], is_pytest=False)
    files = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests").glob("test_*.py"))
    files = [path for path in files if path not in SLOW_FILES]
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "not slow"]
    yield Part("folders", [*pytest, *(f"tests/{name}" for name in QUICK_FOLDERS)])
    yield Part("files", [*pytest, *files])
    for size, chosen in QUICK_RANKS.items():
        yield of_ranks("ranks", size, chosen, "-m", "not slow")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--full", action="store_true", help="the slow tests too")
    amount.add_argument("--quick", action="store_true", help="a first look: lint, types and the fast tests")
    arguments = parser.parse_args()
    chosen = list(quick_parts() if arguments.quick else parts(arguments.full))
    if arguments.full:
        chosen = [dataclasses.replace(part, deadline_seconds=SECONDS_OF_FULL) for part in chosen]
    # A shell script's background process ignores Ctrl-C, and so would all tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Do the same as for Ctrl-C: the parts and all their jobs end too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    shared = shared_memory()
    try:
        with temporary_files(), snapshot():
            counts = run(chosen, min(MOST_CORES, len(os.sched_getaffinity(0))))
    finally:
        for path in shared_memory() - shared:
            path.unlink(missing_ok=True)
    failed_parts = [name for name, count in counts.items() if count["failed"]]
    if failed_parts:
        print(f"\nfailed: {', '.join(failed_parts)}")
    total = sum(counts.values(), Counter[str]())
    print(f"\nskipped, with the reasons above: {total['skipped']}")
    print(f"{total['passed']} passed, {total['failed']} failed", flush=True)
    return 1 if total["failed"] else 0


@contextlib.contextmanager
def temporary_files() -> Iterator[None]:
    """All of the run's are in a folder that goes with it: the MPI libraries and Ansible leave some there.

    Its name is short, because those of UNIX sockets, in folders below, may have about 100 characters.
    """
    with tempfile.TemporaryDirectory(prefix="mt", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield


@contextlib.contextmanager
def snapshot() -> Iterator[None]:
    """Name the snapshot that parts on nodes share, and remove it at the end where one of them has made it."""
    os.environ[SNAPSHOT] = name = f"tests{os.getpid()}"
    try:
        yield
    finally:
        if name in snapshot_names(STATE):
            try:
                forget_snapshot(STATE, name)
            except ConfigError as error:  # a bed is left that stands on it
                print(f"\nleft on this machine: {error}")


def shared_memory() -> set[Path]:
    """The files that MPI keeps in memory, and leaves behind if a test kills its job, but for those that a process has
    mapped."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {line.split()[5] for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    found = {path for pattern in (*SHM_PATTERNS, "sem.mp-*") for path in Path("/dev/shm").glob(pattern)}
    return {path for path in found if not any(one.startswith(str(path)) for one in mapped)}


if __name__ == "__main__":
    sys.exit(main())
