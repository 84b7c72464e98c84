"""scripts/gpu-check: every check of mpitrain that needs a GPU, one after the other, and one table of what came out.

Standard library only: it must be able to say what is missing where nothing is there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from carried import FOLDER, Mpi, mpi_of, unpacked

REPOSITORY = Path(__file__).parents[2]
# `check.py --quick [PART...]` tries this program itself: small buffers, few rounds, and of the parts those of these
# names. Its GPU may be an emulated one on a busy machine, so its limits only guard against a hang.
QUICK = sys.argv[1:2] == ["--quick"]
CHOSEN = sys.argv[2:]
PATIENCE = 10.0 if QUICK else 1.0
BUDGET_SECONDS = PATIENCE * 460.0  # of all parts together
QUESTION_SECONDS = PATIENCE * 60.0
START_SECONDS = PATIENCE * 30.0  # of two ranks that do nothing
RANKS = (1, 2, 4)  # several on one GPU where there are fewer
# pytest's last line, and what it skipped.
SUMMARY = re.compile(r"^=*\s*((?:\d+ \w+,? ?)+in [\d.]+s.*?)\s*=*$", re.MULTILINE)
# The beginnings of lines with results: of the benchmarks, and of doctor on GPUs.
RESULTS = ("|", "copies within", "models.", "CUDA", "CuPy", "transport ")
SKIPPED = re.compile(r"^SKIPPED \[\d+\] \S+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """A command; `mpi` is the library that its processes load, `ranks` how many it starts, 0: the command alone."""

    name: str
    command: list[str]
    seconds: float
    mpi: Mpi | None = None
    ranks: int = 0
    needs_mpi: bool = True


@dataclass
class Outcome:
    """The outcome of a part."""

    name: str
    result: str  # passed, FAILED, not run
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mpitrain-gpu-check-") as folder:
        gpu_problem = why_no_gpu()
        libraries, mpi_problem = mpi_libraries(Path(folder))
        outcomes = [Outcome("GPU", "not run" if gpu_problem else "passed", details=[gpu_problem or gpus()])]
        name = ", ".join(one.name for one in libraries)
        outcomes.append(Outcome("MPI", "passed" if libraries else "not run", details=[name or mpi_problem]))
        for part in parts(libraries, QUICK):
            if CHOSEN and part.name not in CHOSEN:
                continue
            left = BUDGET_SECONDS - (time.monotonic() - started)
            if gpu_problem:
                outcomes.append(Outcome(part.name, "not run", details=["no usable GPU"]))
            elif part.needs_mpi and part.mpi is None:
                outcomes.append(Outcome(part.name, "not run", details=[mpi_problem]))
            elif left < 5:
                used_up = f"{BUDGET_SECONDS:.0f} s were used up before it"
                outcomes.append(Outcome(part.name, "not run", details=[used_up]))
            else:
                print(f"\n=== {part.name}", flush=True)
                outcomes.append(run(part, min(PATIENCE * part.seconds, left), Path(folder)))
    print_table(outcomes, time.monotonic() - started)
    return 1 if any(outcome.result == "FAILED" for outcome in outcomes) else 0


def parts(libraries: list[Mpi], quick: bool) -> list[Part]:
    """The parts in the order of their importance, because time may run out."""
    python = sys.executable
    first = libraries[0] if libraries else None
    # Settings of its own: pyproject.toml's want plugins, and make errors of warnings that a new CuPy may have.
    settings = ["-c", "tests/gpu/pytest.ini", "--rootdir", ".", "-rs"]
    chosen = ["-k", "sgd or (sum_is_exact and float32)"] if quick else []
    small = ["--mib", "0.01", "--rounds", "2"] if quick else []
    copies = ["--copy-mib", "1"] if quick else []
    step = [python, "benchmarks/step_overhead.py", "--device", "cuda", "--data", "digits"]

    def suite(mpi: Mpi | None, count: int, *options: str) -> Part:
        name = f"transports, training, {count} ranks, {mpi.name if mpi else 'no MPI'}"
        return Part(name, [python, "-m", "tests.device_ranks", *settings, *chosen, *options], 100, mpi, count)

    kernels = [python, "-m", "pytest", "-q", *settings, *chosen, "tests/gpu/test_kernels.py"]
    found = [Part("kernels against NumPy", kernels, 120, first, needs_mpi=False)]
    found.append(suite(first, 2))
    speed = [python, "benchmarks/gpu_kernels.py", *small]
    found.append(Part("speed of kernels", speed, 60, first, needs_mpi=False))
    for count in (2,) if quick else (2, 4):
        command = [python, "benchmarks/gpu_allreduce.py", *small, *copies]
        found.append(Part(f"speed of allreduce, {count} ranks", command, 60, first, count))
    found.append(Part("a training step", [*step, *(["--rounds", "2"] if quick else [])], 60, first))
    found += [suite(first, count) for count in RANKS if count != 2 and not quick]
    found.append(Part("doctor", [python, "-m", "mpitrain", "doctor"], 60, first))
    # What another library may have that the first has not: messages of GPU memory.
    found += [suite(mpi, 2, *([] if quick else ["-k", "aware"])) for mpi in libraries[1:]]
    return found


def why_no_gpu() -> str:
    """Empty where CuPy can compute. Importing it proves nothing."""
    program = "import cupy; raise SystemExit(0 if cupy.is_available() else 'CuPy finds no usable GPU; see nvidia-smi')"
    done = output_of([sys.executable, "-c", program])
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["CuPy failed"])[-1]


def gpus() -> str:
    """The devices and the versions of what drives them."""
    program = (
        "import cupy; r = cupy.cuda.runtime; n = r.getDeviceCount();"
        "print(cupy.__version__, r.driverGetVersion(), r.runtimeGetVersion(), n,"
        " *{r.getDeviceProperties(i)['name'].decode() for i in range(n)}, sep='|')"
    )
    done = output_of([sys.executable, "-c", program])
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["they could not be asked"])[-1]
    version, driver, runtime, count, *names = done.stdout.strip().split("|")
    return f"{count} x {', '.join(names)}; CuPy {version}, CUDA of the driver {driver}, of the runtime {runtime}"


def mpi_libraries(folder: Path) -> tuple[list[Mpi], str]:
    """The ones that start two ranks here: what this machine has, then what was carried along; or why there is none."""
    beside = Path(sys.executable).with_name("mpiexec")
    here = str(beside) if beside.exists() else shutil.which("mpiexec")
    candidates = []
    if here:
        words = output_of([here, "--version"]).stdout
        candidates.append(mpi_of("openmpi" if re.search("Open MPI|OpenRTE|PRTE", words) else "mpich", here, {}))
    if FOLDER.is_dir():
        candidates += unpacked(folder)
    problems, usable = [], {}
    for mpi in candidates:
        program = "from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2; print(MPI.Get_library_version())"
        asked = Part("", [sys.executable, "-c", program], START_SECONDS, mpi, 2)
        outcome = run(asked, START_SECONDS, folder, show=False)
        if outcome.result == "passed":
            usable.setdefault(mpi.name, mpi)
        else:
            problems.append(f"{mpi.mpiexec[0]}: {' '.join(outcome.details[-1:])}")
    nothing = (
        "no mpiexec on this machine and no .gpu-check/; where there are package registries: scripts/gpu-check --carry"
    )
    return list(usable.values()), "; ".join(problems) or nothing


def output_of(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    try:
        return subprocess.run(
            command, check=False, capture_output=True, text=True, env=environment(None), timeout=QUESTION_SECONDS
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"it did not end within {QUESTION_SECONDS:.0f} s")


def environment(mpi: Mpi | None) -> dict[str, str]:
    """The environment of a part."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPOSITORY)]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(mpi.environment if mpi else {})}


def run(part: Part, seconds: float, folder: Path, show: bool = True) -> Outcome:
    """Run a part to its end or its deadline; nothing of it outlives this."""
    command = [*part.mpi.mpiexec, "-n", str(part.ranks), *part.command] if part.mpi and part.ranks else part.command
    started = time.monotonic()
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=environment(part.mpi),
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    if show:
        print(text, end="", flush=True)
    outcome = Outcome(part.name, "passed" if code == 0 else "FAILED", time.monotonic() - started)
    outcome.details = [line for line in text.splitlines() if line.startswith(RESULTS)]
    if summary := SUMMARY.findall(text):
        outcome.details.append(summary[-1])
        outcome.details += [f"skipped: {reason}" for reason in dict.fromkeys(SKIPPED.findall(text))]
    if code is None:
        outcome.details.append(f"did not end within {seconds:.0f} s")
    elif code:
        outcome.details += [f"exit code {code}", *text.strip().splitlines()[-1:]]
    return outcome


def print_table(outcomes: list[Outcome], seconds: float) -> None:
    """Print the table that a person reads, and pastes into a report."""
    width = max(len(outcome.name) for outcome in outcomes)
    print("\n" + "=" * 100)
    for outcome in outcomes:
        first, *rest = outcome.details or [""]
        print(f"{outcome.name:<{width}}  {outcome.result:<8} {outcome.seconds:5.0f} s  {first}")
        for line in rest:
            print(f"{'':<{width}}  {line}")
    bad = [outcome.name for outcome in outcomes if outcome.result != "passed"]
    print(f"{seconds:.0f} s; {'everything ran and passed' if not bad else 'not passed: ' + '; '.join(bad)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
