"""A spare: a process that runs the script up to init(), and waits there until a new attempt of the job needs a rank.

It then gets what mpiexec has told the rank: variables, output, the connection to mpiexec. Its holder is
mpitrain.launch.spares. What libraries read when they are imported cannot be given later, so a spare whose rank would
have other variables does not become a rank.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mpitrain.context import (
    JOB,
    LAUNCHER,
    OF_MPIEXEC,
    PREFIX,
    SPARE_FOLDER,
    SPARE_LINE,
    SPARE_OUTPUT,
    SPARE_ROOM,
)
from mpitrain.early import is_helper
from mpitrain.errors import LaunchError

_MESSAGE_BYTES = 1024
# A spare has it, so that a script's own `from mpi4py import MPI` does not start MPI.
_MPI4PY = "MPI4PY_RC_INITIALIZE"
# What differs from one login to the next: over several hosts, mpiexec starts each attempt by ssh, or by a step of
# Slurm.
_OF_LOGIN = ("SSH_", "XDG_SESSION_", "SLURM_")
# An attempt on one host has other settings of the network than one on several hosts. MPICH, UCX, libfabric, NCCL and
# Gloo read them when they first communicate, not when they are imported.
_OF_NETWORK = ("MPIR_CVAR_", "UCX_", "FI_", "NCCL_", "GLOO_")
_STDLIB = os.path.dirname(os.__file__)  # noqa: PTH120 (a prefix)
# The variables in which mpiexec gives a process its rank.
_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")


@dataclass(frozen=True)
class TakenPlace:
    """The place of a rank that a spare has taken.

    Attributes:
        stub: the process that mpiexec takes for the rank; 0: this process itself.
        starter: the process of mpiexec that has started the rank; 0: the parent of this process.
    """

    stub: int = 0
    starter: int = 0


def wait_if_spare(load: Callable[[], object]) -> TakenPlace:
    """If this process is a spare, wait until it is a rank. A spare that is not needed ends here.

    Args:
        load: loads ahead of time what init() needs.

    Raises:
        LaunchError: a spare has started this process.
    """
    given = os.environ.get(SPARE_LINE)
    if given is None:
        return TakenPlace()
    number, holder = (int(word) for word in given.split())
    if is_helper() or os.getppid() != holder:
        raise LaunchError(
            f"on {socket.gethostname()}: init() was called in a process that a spare has started, which is not a rank. "
            "Call init() in the process that runs the script, or leave out --spares"
        )
    os.set_inheritable(number, False)
    with socket.socket(fileno=number) as line:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized():
            _refuse(line, "the script starts MPI before it calls init()")
        _load(load)
        code = _code()
        line.sendall(b"ready")
        message, extra, _, _ = line.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(4 * 4))
        if not message:
            os._exit(0)
        rights = array.array("i")
        for _, _, numbers in extra:
            rights.frombytes(numbers)
        told = json.loads(message)
        _take(line, rights.tolist(), code)
        return TakenPlace(told["stub"], told["starter"])


def _load(load: Callable[[], object]) -> None:
    """Import what a rank imports later. What cannot be imported is the rank's to report."""
    with suppress(Exception):
        load()
    package = sys.modules["mpitrain"]
    for name in (*package.__all__, *(("TorchModule",) if "torch" in sys.modules else ())):
        with suppress(Exception):
            getattr(package, name)


def _take(line: socket.socket, given: list[int], code: dict[str, float]) -> None:
    """Become the rank whose place is given: its folder, cores and variables, stdout, stderr, connection to mpiexec."""
    place, output, errors, *connection = given
    folder, cores, *variables = Path(f"/proc/self/fd/{place}").read_bytes().split(b"\0")
    os.close(place)
    block, at = _environment_block()
    told, before = _variables(variables), _variables(block.split(b"\0"))
    for name in sorted(told.keys() | before.keys()):
        if not may_differ(name) and told.get(name) != before.get(name):
            _refuse(line, f"its {name} in the environment is not that of the rank")
    if cores != ",".join(map(str, sorted(os.sched_getaffinity(0)))).encode():
        _refuse(line, f"mpiexec has bound the rank to the cores {cores.decode()}")
    if folder != os.fsencode(before[SPARE_FOLDER]):
        _refuse(line, f"the folder of the job is {os.fsdecode(folder)} now")
    for path, seconds in _code().items():
        if code.get(path, seconds) != seconds:
            _refuse(line, f"{path} has changed")
    for name in before.keys() - told.keys():
        os.environ.pop(name, None)
    os.environ.update((name, value) for name, value in told.items() if may_differ(name))
    if connection:
        os.environ["PMI_FD"] = str(connection[0])
    _mark(block, at)
    line.sendall(b"taken")
    for stream, descriptor in ((1, output), (2, errors)):
        _redirect(stream, descriptor)


def _refuse(line: socket.socket, why: str) -> NoReturn:
    """End this spare; a process of its own becomes the rank."""
    line.sendall(why.encode(errors="replace")[:_MESSAGE_BYTES])
    os._exit(1)


def may_differ(name: str) -> bool:
    """Whether a spare can get another value of this variable when it becomes a rank."""
    return name.startswith((PREFIX, *OF_MPIEXEC, *_OF_LOGIN, *_OF_NETWORK, _MPI4PY))


def _variables(words: Iterable[bytes]) -> dict[str, str]:
    pairs = (os.fsdecode(word).partition("=") for word in words if word)
    return {name: value for name, _, value in pairs}


def _environment_block() -> tuple[bytes, int]:
    """Return the environment with which this process was started, and its address: what /proc/PID/environ shows."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    begin, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5)
    return ctypes.string_at(begin, end - begin), begin


def _mark(block: bytes, at: int) -> None:
    """Write the marks of the rank's job to where the guards look: into the room that the holder has left for them."""
    marks = [f"{name}={os.environ[name]}" for name in (JOB, LAUNCHER, *_RANK) if name in os.environ]
    text = "\0".join(marks).encode()
    begin = block.index(f"{SPARE_ROOM}=".encode())
    size = block.index(b"\0", begin) - begin
    assert len(text) <= size, "a host's name has 64 bytes at most"
    ctypes.memmove(at + begin, text.ljust(size, b"\0"), size)


def _redirect(stream: int, descriptor: int) -> None:
    """Write from now on to where the rank writes; first what the script has written so far."""
    if str(Path(f"/proc/self/fd/{stream}").readlink()).startswith(f"/memfd:{SPARE_OUTPUT} "):
        with suppress(OSError, ValueError, AttributeError):
            (sys.stdout if stream == 1 else sys.stderr).flush()
        written = os.pread(stream, os.fstat(stream).st_size, 0)
        os.dup2(descriptor, stream)
        while written:
            written = written[os.write(stream, written) :]
    os.close(descriptor)  # otherwise the script itself has sent its output elsewhere


def _code() -> dict[str, float]:
    """Return when each file of code was last written, but for the files of Python and of installed packages."""
    seconds = {}
    for module in tuple(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and not path.startswith(_STDLIB) and "-packages/" not in path:
            with suppress(OSError):
                seconds[path] = Path(path).stat().st_mtime
    return seconds
