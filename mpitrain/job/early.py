"""Before init(): a rank that fails must not leave the others waiting for ever in MPI_Init, or in init().

`import mpitrain` installs this in processes that an MPI launcher started. In init(), the Job (job.py) takes over.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from fcntl import F_GETFL, F_SETFL, F_SETOWN, F_SETSIG, fcntl
from types import TracebackType
from typing import TYPE_CHECKING

from mpitrain.job.context import SPARE_LINE

if TYPE_CHECKING:
    from mpi4py import MPI


# The process that the launcher started. Its helpers inherit the launcher's variables, but are no ranks.
# (config.read_config would refuse a name that begins with MPITRAIN_.)
_RANK_PID = "_MPITRAIN_RANK_PID"
# The time for the launcher to read a rank's output: it drops the rest when the job ends.
_READING_SECONDS = 0.1


def watch() -> None:
    """End the job at an uncaught exception of this process, if it is a rank, or a spare that may become one."""
    if not {"PMI_RANK", "PMIX_RANK", SPARE_LINE} & os.environ.keys():
        return
    os.environ.setdefault(_RANK_PID, str(os.getpid()))
    if is_helper():
        helpers_end_with_this()
    else:
        sys.excepthook = _uncaught


def helpers_end_with_this() -> None:
    """Let every process that multiprocessing starts from this process end when this process ends, for any reason.

    Otherwise the helper of a killed rank lives on and keeps the rank's output open. Open MPI's mpiexec takes a rank for
    alive as long as any process can write to its output.
    """
    from multiprocessing import util

    util.register_after_fork(_end_with_parent, _end_with_parent)


def _end_with_parent(_: object) -> None:
    """Let the kernel kill this process when the other end of a pipe is closed.

    Its parent has the end open, and so have later children of the parent, which end with it too.
    """
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None
    pipe = parent.sentinel
    fcntl(pipe, F_SETOWN, os.getpid())
    fcntl(pipe, F_SETSIG, signal.SIGKILL)
    fcntl(pipe, F_SETFL, fcntl(pipe, F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # it ended before the pipe was watched
        os.kill(os.getpid(), signal.SIGKILL)


def is_helper() -> bool:
    """True if a rank has started or forked this process."""
    return os.environ.get(_RANK_PID, str(os.getpid())) != str(os.getpid())


def abort(comm: MPI.Comm, code: int) -> None:
    """End all processes of the job. Suppress what MPICH would add, so that the failure's report stays last."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    comm.Abort(code)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    time.sleep(_READING_SECONDS)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        if not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
            sys.stdout.flush()
            abort(mpi.COMM_WORLD, 1)
    elif os.environ.get("PMI_SIZE", "1") != "1":
        # Hydra (MPICH, Intel MPI) ignores an exit code before MPI_Init, and lets the others wait there. An end by a
        # signal makes Hydra end all ranks.
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
