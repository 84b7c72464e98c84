"""Check whether the MPI library accepts addresses of GPU memory. A child process tries it, because a failure kills the
process.

The child sends a GPU array to itself. The result is kept in a file (~/.cache/mpitrain/cuda_aware.json), by a hash of
the MPI library's content and of the settings that make it CUDA-aware or not. So each combination is tried once.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mpitrain.cuda.device import cupy_module
from mpitrain.errors import DataError
from mpitrain.reading import json_of, read_file
from mpitrain.state_files import cache_folder

_SECONDS = 60.0
# Settings that may change the result for the same library.
_SETTINGS = (
    "OMPI_MCA_",
    "PRTE_MCA_",
    "UCX_",
    "I_MPI_",
    "MPIR_CVAR_",
    "MPICH_",
    "MV2_",
    "FI_",
    "LD_LIBRARY_PATH",
    "CUDA_",
)
# The launcher's variables would make the child a rank of this job.
_LAUNCHERS = ("PMI", "PMIX", "OMPI_COMM", "OMPI_UNIVERSE", "PRTE_", "HYDRA", "MPI_LOCAL", "SLURM_", "MPITRAIN_")
_LIBRARIES = ("/libmpi", "/libucp", "/libuct", "/libfabric", "/libopen-pal")

_PROBE = """
import sys
import cupy
cupy.cuda.Device(int(sys.argv[1])).use()
from mpi4py import MPI
count = 100_000  # more than libraries send together with the envelope
sent, received = cupy.full(count, 7, cupy.int32), cupy.zeros(count, cupy.int32)
cupy.cuda.get_current_stream().synchronize()
print("asking", flush=True)
MPI.COMM_SELF.Sendrecv(sent, 0, 0, received, 0, 0)
print("right" if int(received.sum()) == 7 * count else "wrong")
"""


def why_not_aware(gpu_number: int) -> str:
    """Return why MPI does not accept GPU memory here, or "". Not collective."""
    try:
        cache = cache_folder() / "cuda_aware.json"
    except DataError:  # this user has no home folder, so each job tries it again
        return _ask(gpu_number)[0]
    known = _read(cache)
    key = fingerprint(os.environ)
    if key not in known:
        answer, is_sure = _ask(gpu_number)
        if not is_sure:
            return answer
        known[key] = answer
        _write(cache, known)
    return known[key]


def fingerprint(environ: Mapping[str, str]) -> str:
    """Return a hash of the content of this process's MPI libraries, of CuPy, the driver and the relevant settings."""
    cupy = cupy_module()
    versions = (sys.executable, cupy.__file__, cupy.__version__, cupy.cuda.runtime.driverGetVersion())
    digest = hashlib.sha256(repr(versions).encode())
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    for path in sorted(path for path in paths if any(name in path for name in _LIBRARIES)):
        with Path(path).open("rb") as file:
            digest.update(path.encode() + hashlib.file_digest(file, "sha256").digest())
    for name in sorted(environ):
        if name.startswith(_SETTINGS) and not _is_launchers(name):
            digest.update(f"{name}={environ[name]}\n".encode())
    return digest.hexdigest()


def _ask(gpu_number: int) -> tuple[str, bool]:
    """Return why MPI does not accept GPU memory, or ""; and whether the result will be the same the next time."""
    environment = {name: text for name, text in os.environ.items() if not _is_launchers(name)}
    # -P: a child of Python's -c must not import files of the working folder.
    command = [sys.executable, "-P", "-c", _PROBE, str(gpu_number)]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a process that sent GPU memory to itself through MPI did not end within {_SECONDS:g} s", False
    except OSError as error:
        return f"the process to try it in cannot be started: {error}", False
    words = done.stdout.decode(errors="replace").split()
    if done.returncode == 0:
        return ("", True) if words[-1:] == ["right"] else ("MPI changed the data in GPU memory", True)
    said = done.stderr.decode(errors="replace").strip().splitlines()
    reason = signal.Signals(-done.returncode).name if done.returncode < 0 else said[-1] if said else "no word"
    if words[-1:] == ["asking"]:
        return f"the MPI library is not CUDA-aware: a process that sent GPU memory with it ended with {reason}", True
    return f"whether the MPI library is CUDA-aware could not be tried: the process for it ended with {reason}", False


def _is_launchers(name: str) -> bool:
    # PMIX_PREFIX and similar variables locate a moved library. The child needs them too.
    return name.startswith(_LAUNCHERS) and not name.endswith("_PREFIX")


def _read(path: Path) -> dict[str, str]:
    """Read the known results; none if the file cannot be read, so that they are tried again."""
    try:
        verdict = json_of(read_file(path, ValueError), ValueError, str(path))
    except ValueError:
        return {}
    return {key: str(text) for key, text in verdict.items()}


def _write(path: Path, known: Mapping[str, str]) -> None:
    """Write the file completely or not at all. If the folder is not writable, the next run only tries again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(known, file, indent=1)
        Path(file.name).replace(path)
    except OSError:
        return
