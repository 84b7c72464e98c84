"""What a job would find with this Python on this host: its code, its packages, its MPI. Printed as JSON.

Sent as text to every host and run there by the job's own Python (`python -c TEXT SCRIPT`), before mpitrain is known to
be installed. So this module must not import other modules of mpitrain. It prints two lines, because loading a broken
MPI may kill the process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

# The script's folder may hold half a disk.
_MAX_FILES = 2000
_MAX_BYTES = 32 << 20
_MAX_FOLDERS = 2000
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


def python_files(root: Path) -> dict[str, str]:
    """Return the hash of every .py file in `root` and below, by relative path; bounded, in a fixed order."""
    hashes: dict[str, str] = {}
    num_bytes = 0
    for num_folders, (folder, folders, names) in enumerate(os.walk(root)):
        if num_folders >= _MAX_FOLDERS:
            break
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            # os.path, because Path.exists() raises for a folder that this user may not enter.
            if not name.startswith(".") and name not in _SKIPPED and not os.path.exists(here / name / "pyvenv.cfg")  # noqa: PTH110
        )
        for name in sorted(name for name in names if name.endswith(".py")):
            try:
                content = (here / name).read_bytes()
            except OSError as error:
                content = str(error.strerror).encode()
            hashes[str((here / name).relative_to(root))] = hashlib.sha256(content).hexdigest()
            num_bytes += len(content)
            if len(hashes) >= _MAX_FILES or num_bytes >= _MAX_BYTES:
                return hashes
    return hashes


def packages(path: list[str]) -> dict[str, str]:
    """Return the version of every installed package, from the folder names that installers write."""
    versions: dict[str, str] = {}
    for folder in path:
        try:
            names = [path.name for path in Path(folder or ".").iterdir()]
        except OSError:
            continue
        for name in names:
            parts = re.fullmatch(r"(.+)-([^-]+)\.dist-info", name)
            if parts:
                versions.setdefault(re.sub(r"[-_.]+", "-", parts[1]).lower(), parts[2])
    return versions


def main(script: Path) -> None:
    """Print the facts."""
    spec = importlib.util.find_spec("mpitrain")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = python_files(script.parent)
    files[script.name] = hashlib.sha256(script.read_bytes()).hexdigest()  # its name need not end in .py
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": packages(sys.path),
        "mpitrain": hashlib.sha256(json.dumps(python_files(Path(folders[0]))).encode()).hexdigest()
        if folders
        else None,
        "files": files,
    }
    print(json.dumps(facts), flush=True)
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except Exception as error:
        print(json.dumps({"mpi_error": f"{type(error).__name__}: {error}".splitlines()[0]}), flush=True)
        return
    version = MPI.Get_library_version().strip("\0\n ").splitlines()[0]
    print(json.dumps({"mpi": re.sub(r"\s+", " ", version.split(", package:")[0])}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
