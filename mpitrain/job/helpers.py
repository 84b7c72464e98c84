"""The processes that a rank starts by multiprocessing, such as a DataLoader's workers: they are not ranks.

They end when their rank ends, for any reason.

They are forked, as in a program without MPI. So they have everything that the program has, even lambdas and nested
functions, and the script needs no guard. A forked process shares MPI with its rank, and must never call MPI, which
Control.check enforces.

A fork is a problem if a device reads and writes the pages of a rank by address, as RDMA, XPMEM and GPUs do. After a
fork, the rank's next write to such a page moves the rank to a copy, and the device continues with the old page:
arriving data is lost. (Newer kernels keep the page with the rank if the driver has pinned it, but not all drivers do.)
So a rank with a device open starts its helpers by forkserver, from a small process without MPI. Their arguments must be
picklable.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from functools import cached_property, partial
from multiprocessing import context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from mpitrain.early import helpers_end_with_this

# Major numbers from the kernel's Documentation/admin-guide/devices.txt: memory, such as /dev/null, and most terminals.
# isatty() recognises all consoles, of which there are many kinds.
_HARMLESS = {1, 4, 5, *range(136, 144)}


class StartMethod(BaseContext):
    """Python's default start method, or forkserver if a fork is unsafe. The program's own choice takes precedence.

    It is decided when the program first uses multiprocessing, because a GPU may be opened after init().
    """

    def __init__(self, usual: Any, name: str) -> None:
        """`usual` is Python's default. `name` of the rank begins the line with the reason; "": print no line."""
        self._usual = usual
        self._rank_name = name

    @cached_property
    def _decided(self) -> Any:
        reason = unsafe_because() if self._usual.get_start_method() == "fork" else ""
        if not reason:
            return self._usual
        if self._rank_name:
            text = (
                f"mpitrain: {self._rank_name}: multiprocessing starts processes by forkserver, because "
                f"{reason}. So the arguments of a DataLoader, Pool or Process must be picklable (no lambda, no "
                "function inside a function), and the code that the script runs belongs under if __name__ == "
                "'__main__':"
            )
            print(text, file=sys.stderr, flush=True)
        return self._usual.get_context("forkserver")

    # The attributes of a context that multiprocessing uses besides the methods.
    @property
    def _name(self) -> str:
        return str(self._decided.get_start_method())

    @property
    def Process(self) -> Any:  # noqa: N802 - multiprocessing's name
        """The class of the context's processes."""
        return self._decided.Process


def prepare_for_helpers(name: str) -> None:
    """Make this rank's processes start as StartMethod decides, unless the program chooses a start method itself.

    Earlier use of multiprocessing by the program counts as a choice: a Lock made for forked processes is useless to
    others.

    Args:
        name: name of the rank, printed on stderr in front of the reason; "": print nothing.
    """
    defaults: Any = context._default_context
    settled = defaults._actual_context
    if name and settled is not None and settled.get_start_method() == "fork" and (reason := unsafe_because()):
        text = (
            f"mpitrain: {name}: multiprocessing forks processes, though {reason}. The program chose that before "
            "init(), or used a Lock, a Queue or tqdm before init(), which chooses it. Call init() before these"
        )
        print(text, file=sys.stderr, flush=True)
    if not isinstance(defaults._default_context, StartMethod):
        defaults._default_context = StartMethod(defaults._default_context, name)
        os.register_at_fork(after_in_child=partial(_hang_up, os.environ.get("PMI_FD", "")))
        helpers_end_with_this()


def unsafe_because() -> str:
    """Return why this process must not be forked; "": it may be."""
    if "jax" in sys.modules:
        return "JAX has threads, which a fork would stop in the middle of their work"
    device = open_device()
    return f"{device} is open, and a device must not lose the memory that it writes into" if device else ""


def open_device() -> str:
    """Return the first open file of this process that is a device with possible access to the process's memory."""
    for descriptor in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
        with suppress(OSError):  # the descriptor of the folder itself is closed by now
            status = descriptor.stat()
            if not stat.S_ISCHR(status.st_mode) or os.major(status.st_rdev) in _HARMLESS:
                continue
            if not os.isatty(int(descriptor.name)):
                return str(descriptor.readlink())
    return ""


def _hang_up(connection: str) -> None:
    """Close the rank's connection to MPICH's mpiexec, which considers a rank alive while any process holds it."""
    with suppress(ValueError, OSError):
        descriptor = int(connection)
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
