"""Run every check and test, as many side by side as there are cores, and end with one line: `N passed, N failed`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from jobs import REPOSITORY, VENVS, mpiexec
from mpitrain.check.checks.limits import SHM_PATTERNS
from side_by_side import Part, run

# The tests that run on all ranks of a job at once.
ON_RANKS = ["tests/ranks", "tests/device_ranks", "tests/torch_ranks", "tests/jax_ranks"]
# What is chosen of tests/ranks, by MPI library and world size ("": all of them). One rank is alone. Of three, the one
# before is not the one after. With four come what needs a fourth rank, nodes of different size, and what depends on the
# number of ranks in its arithmetic or in the order of its messages, which a queue of many allreduces does not. Five is
# one beyond a power of two: what is built on the sums does not differ from three and four. Open
# MPI differs in how it starts and sends.
SUMS = (
    "(test_allreduce.py or test_collectives.py or test_nano.py or test_simulate.py or test_world"
    " or test_sums_are_as_close_as_the_codec) and not test_many_may_be"
)
BY_SIZE = f"{SUMS} or test_compressed.py or test_reducer or slice"
OF_FOUR = f"{SUMS} or test_compressed.py or slice or test_checkpoint_nodes or majority or test_data.py"
STARTS_AND_SENDS = (
    f"{SUMS} or slice or test_reducer or test_gathered or test_keep or test_node_memory or interrupted"
    " or test_pipeline.py or test_rebuild or test_run_on or test_sharded_sync.py"
)
SIZES = {"mpich": {1: "", 3: "", 4: OF_FOUR, 5: SUMS}, "openmpi": {3: STARTS_AND_SENDS}}
# Two ranks: the one before is also the one after. Seven are three beyond a power of two, and too many for the batches
# of some tests.
NIGHTLY_SIZES = {"mpich": {1: "", 2: "", 3: "", 4: "", 5: "", 7: SUMS}, "openmpi": {2: "", 3: ""}}
# The same for mpitrain.torch and mpitrain.jax, which are skipped where there is no PyTorch, or no JAX. The collectives
# below them are those that tests/ranks tries. Groups of PyTorch and meshes take 4 ranks.
FRAMEWORKS = {"torch": {3: "", 4: "test_groups.py or test_sharded.py"}, "jax": {2: ""}}
NIGHTLY_FRAMEWORKS = {"torch": {1: "", 2: "", 3: "", 4: "", 5: ""}, "jax": {1: "", 2: "", 3: "", 4: "", 5: ""}}
# The same with arrays on GPUs, which are emulated here; scripts/gpu-check runs them on real ones. With 4 ranks on 2 of
# them come several on each.
EMULATED = {2: ""}
NIGHTLY_EMULATED = {1: "", 2: "", 3: "", 4: ""}
EMULATED_GPUS = {1: 1, 2: 2, 3: 3, 4: 2}  # by number of ranks
# The tests that need test beds (testbed/), in two parts. They wait much of the time, so they run beside all others. In
# CI one bed has one life: it is set up, looked at, used, broken and torn down.
ON_NODES = {
    "the life of a cluster": ["tests/cluster", "tests/faults/cluster"],
    "test beds, and an operator": ["tests/nodes", "tests/cli/test_cluster_bed.py"],
}
# The other tests run in a process for each folder that takes long; what is not named here has one process for all. That
# of faults takes longest, and is three parts of about the same length.
FAULTS = {
    "faults, failures": [
        f"tests/faults/test_{name}.py" for name in ("failures", "exits", "processes", "refusals", "launcher", "hangs")
    ],
    "faults, restarts": [
        f"tests/faults/test_{name}.py"
        for name in ("restart", "warm", "memory", "keep", "saving", "resume", "checkpoints", "telling", "told")
    ],
    "faults, others": ["tests/faults"],
}
LONG_FOLDERS = ["cli", "server", "launch", "training", "dashboard", "examples", "cuda"]
# What runs the commands of the pages, and builds the site and the wheel.
DOCUMENTS = [f"tests/test_{name}.py" for name in ("docs", "notebooks", "site", "wheel", "one_of_each", "extras")]
# Such a part waits most of the time, for jobs that start or stand still (measured: benchmarks/log/). Ranks nap while
# they
# wait for each other, so theirs does not keep a core busy either. On two cores, six folders run beside one of them.
CORES_OF_A_FOLDER = 0.2
CORES_OF_RANKS = 0.7
# For a first look: what needs neither nodes nor a job of its own, and of the tests on ranks what most others rest on.
QUICK_FOLDERS = ["tests/check", "tests/verify", "tests/launch/test_policy.py", "tests/launch/test_placement.py"]
SLOW_FILES = [*DOCUMENTS, *(f"tests/test_{name}.py" for name in ("everything", "horovod_negotiation", "trace"))]
QUICK_RANKS = {2: "test_training or test_checkpoint", 3: SUMS}
# More at once than on so many cores has never been tried.
MOST_CORES = 4
# The nightly tests on beds take longer than all others together.
SECONDS_OF_NIGHTLY = 3 * 3600.0
NIGHTLY_RESULT = REPOSITORY / "tests/nightly.txt"


def parts(nightly: bool) -> Iterator[Part]:
    """All of them, the longest first, so that none begins last.

    Those on ranks run beside the folders from the beginning: they use the cores while the folders wait.
    """
    skipped = [] if nightly else ["-m", "not nightly"]
    pytest = [sys.executable, "-m", "pytest", "-q", *skipped, "--durations=15"]
    on_nodes = [path for paths in ON_NODES.values() for path in paths]
    for name, paths in ON_NODES.items():
        yield Part(name, [*pytest, *paths, *below(paths, on_nodes)], cores=0, again=True)
    in_parts = [*on_nodes, *(path for paths in FAULTS.values() for path in paths), *DOCUMENTS]
    for name, paths in FAULTS.items():
        yield Part(name, [*pytest, *paths, *below(paths, in_parts)], cores=CORES_OF_A_FOLDER, again=True)
    yield Part("documents", [*pytest, *DOCUMENTS], cores=CORES_OF_A_FOLDER, again=True)
    ignored = [f"--ignore={path}" for path in [*ON_RANKS, *in_parts]]
    folders = [
        Part(f"tests/{name}", [*pytest, f"tests/{name}", *ignored], cores=CORES_OF_A_FOLDER, again=True)
        for name in LONG_FOLDERS
    ]
    others = [*pytest, "tests", *ignored, *(f"--ignore=tests/{name}" for name in LONG_FOLDERS)]
    yield Part("other tests", others, cores=CORES_OF_A_FOLDER, again=True)
    yield Part("lint and types", ["scripts/check"], is_pytest=False, cores=CORES_OF_RANKS)
    yield from on_ranks(skipped, nightly)
    yield from folders


def below(paths: list[str], others: list[str]) -> list[str]:
    """Options that leave out what is in one of these paths and has a part of its own among the others."""
    return [f"--ignore={path}" for path in others if path.startswith(tuple(f"{folder}/" for folder in paths))]


def on_ranks(skipped: list[str], nightly: bool) -> Iterator[Part]:
    """The tests that run on all ranks of a job."""
    for vendor, sizes in (NIGHTLY_SIZES if nightly else SIZES).items():
        for size, chosen in sizes.items():
            yield of_ranks("ranks", size, chosen, *skipped, vendor=vendor)
    for framework, sizes in (NIGHTLY_FRAMEWORKS if nightly else FRAMEWORKS).items():
        if importlib.util.find_spec(framework) is None:
            print(f"\n=== tests.{framework}_ranks: skipped, {sys.prefix} has no {framework}", flush=True)
            continue
        for size, chosen in sizes.items():
            yield of_ranks(f"{framework}_ranks", size, chosen, *skipped)
    for size, chosen in (NIGHTLY_EMULATED if nightly else EMULATED).items():
        yield of_ranks("device_ranks", size, chosen, f"--emulated={EMULATED_GPUS[size]}", *skipped)


def of_ranks(module: str, size: int, chosen: str, *options: str, vendor: str = "mpich") -> Part:
    """The tests of a module on so many ranks; only those that are chosen, unless that is empty."""
    command = [*mpiexec(size, vendor), str(VENVS[vendor] / "bin/python"), "-m", f"tests.{module}", *options]
    other = "" if vendor == "mpich" else f", {vendor}"
    return Part(
        f"{module} on {size}{other}",
        [*command, *(["-k", chosen] if chosen else [])],
        cores=CORES_OF_RANKS,
        alone=f"scripts/test --ranks {size}" + (f" --mpi {vendor}" if other else ""),
    )


def parts_of(words: list[str], size: int, vendor: str) -> Iterator[Part]:
    """What the words of a command line name: paths of tests, such as tests/test_tree.py::test_a, and pytest's options.

    Tests that run on all ranks of a job get one of so many ranks.
    """
    paths = [word for word in words if os.path.exists(REPOSITORY / word.partition("::")[0])]  # noqa: PTH110
    options = [word for word in words if word not in paths]
    for folder in ON_RANKS:
        below_it = [path for path in paths if path.startswith(folder)]
        if below_it:
            emulated = [f"--emulated={size}"] if folder == "tests/device_ranks" else []
            name = folder.removeprefix("tests/")
            yield of_ranks(name, size, "", *emulated, *options, *below_it, vendor=vendor)
        paths = [path for path in paths if path not in below_it]
    if paths:
        yield Part(" ".join(paths), [sys.executable, "-m", "pytest", "-q", *options, *paths])


def quick_parts() -> Iterator[Part]:
    """A first look, in two minutes on two quiet cores."""
    files = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests").glob("test_*.py"))
    files = [path for path in files if path not in SLOW_FILES]
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "not nightly"]
    yield Part("files", [*pytest, *files])  # the longest
    yield Part("lint and types", ["scripts/check"], is_pytest=False)
    yield Part("folders", [*pytest, *QUICK_FOLDERS], cores=CORES_OF_A_FOLDER)
    for size, chosen in QUICK_RANKS.items():
        yield of_ranks("ranks", size, chosen, "-m", "not nightly")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--nightly", action="store_true", help="the nightly tests too, and all numbers of ranks")
    amount.add_argument("--quick", action="store_true", help="a first look: lint, types and the fast tests")
    parser.add_argument("--ranks", type=int, default=3, help="for PATHs whose tests run on all ranks of a job (3)")
    parser.add_argument("--mpi", choices=list(VENVS), default="mpich", help="for the same (mpich)")
    parser.usage = "scripts/test [--quick | --nightly | [--ranks N] [--mpi LIBRARY] PATH... [option of pytest]...]"
    arguments, words = parser.parse_known_args()
    if words:
        chosen = list(parts_of(words, arguments.ranks, arguments.mpi))
        if not chosen:
            parser.error(f"{' '.join(words)}: no such file or folder; give a path of tests, such as tests/test_tree.py")
    else:
        chosen = list(quick_parts() if arguments.quick else parts(arguments.nightly))
    if arguments.nightly:
        os.environ.setdefault("SOAK_SECONDS", "3600")  # tests/faults/test_soak.py
        chosen = [dataclasses.replace(part, deadline_seconds=SECONDS_OF_NIGHTLY) for part in chosen]
    # A shell script's background process ignores Ctrl-C, and so would all tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Do the same as for Ctrl-C: the parts and all their jobs end too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    shared = shared_memory()
    try:
        with temporary_files():
            counts = run(chosen, min(MOST_CORES, len(os.sched_getaffinity(0))))
    finally:
        for path in shared_memory() - shared:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    failed_parts = [name for name, count in counts.items() if count["failed"]]
    if failed_parts:
        print(f"\nfailed: {', '.join(failed_parts)}")
    total = sum(counts.values(), Counter[str]())
    print(f"\nskipped, with the reasons above: {total['skipped']}")
    if arguments.nightly:
        note(total, failed_parts)
    print(f"{total['passed']} passed, {total['failed']} failed", flush=True)
    return 1 if total["failed"] else 0


def note(total: Counter[str], failed_parts: list[str]) -> None:
    """Keep the result of a nightly run in a file, which is to be committed."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    counts = ", ".join(f"{total[name]} {name}" for name in ("passed", "failed", "skipped"))
    failed = f"failed: {', '.join(failed_parts)}\n" if failed_parts else ""
    NIGHTLY_RESULT.write_text(
        f"scripts/test --nightly, ended {when}, on {commit.stdout.strip()[:8]}\n{counts}\n{failed}"
    )


@contextlib.contextmanager
def temporary_files() -> Iterator[None]:
    """All of the run's are in a folder that goes with it: the MPI libraries and Ansible leave some there.

    Its name is short, because those of UNIX sockets, in folders below, may have about 100 characters.
    """
    with tempfile.TemporaryDirectory(prefix="mt", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield


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
