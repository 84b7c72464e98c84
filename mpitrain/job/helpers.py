"""The processes that a rank starts by multiprocessing, such as the workers of a DataLoader: they are no ranks.

They are forked, as in a program without MPI. So they have all that the program has, lambdas and functions inside of
functions too, and the script needs no guard. A forked process shares MPI with its rank, and must never call it:
Control.check sees to that.

Memory that a device knows by its place is another matter: RDMA, XPMEM and GPUs read and write the pages of a rank.
After a fork, the rank's next write to such a page moves the rank to a copy, and the device goes on with the old page:
what arrives is lost. (Newer kernels leave the page to the rank if the driver has pinned it, which not all drivers do.)
A rank with a device open starts its helpers by forkserver, from a small process without MPI, and they get what can be
pickled.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from functools import cached_property
from multiprocessing import context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

# Major numbers of the kernel's Documentation/admin-guide/devices.txt: memory, such as /dev/null, and most terminals.
# isatty() knows all consoles, of which there are many kinds.
_HARMLESS = {1, 4, 5, *range(136, 144)}


class StartMethod(BaseContext):
    """Python's default start method, or forkserver where a fork is unsafe; any other choice of the program comes first.

    It is decided when the program first uses multiprocessing: a GPU may be opened after init().
    """

    def __init__(self, usual: Any, name: str) -> None:
        """`usual` is Python's. `name` of the rank begins the line that says why it is not used; "": nothing is said."""
        self._usual = usual
        self._rank_name = name

    @cached_property
    def _decided(self) -> Any:
        reason = unsafe_because() if self._usual.get_start_method() == "fork" else ""
        if not reason:
            return self._usual
        if self._rank_name:
            text = (
                f"mpitrain: {self._rank_name}: multiprocessing starts processes by forkserver, because {reason}. So a "
                "DataLoader, Pool or Process can only be given what can be pickled (no lambda, no function inside of a "
                "function), and what the script does belongs under if __name__ == '__main__':"
            )
            print(text, file=sys.stderr, flush=True)
        return self._usual.get_context("forkserver")

    # What multiprocessing asks a context for besides its methods.
    @property
    def _name(self) -> str:
        return str(self._decided.get_start_method())

    @property
    def Process(self) -> Any:  # noqa: N802 - multiprocessing's name
        """The class of its processes."""
        return self._decided.Process


def prepare_for_helpers(name: str) -> None:
    """From now on this rank's processes start as StartMethod decides, unless the program has chosen or chooses.

    What the program has used of multiprocessing until now counts as a choice: a Lock made for forked processes is of no
    use to others.

    Args:
        name: of the rank, at the begin of what is said on stderr about it; "": nothing is said.
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
        os.register_at_fork(after_in_child=_hang_up)


def unsafe_because() -> str:
    """Why this process must not be forked; "": it may be."""
    if "jax" in sys.modules:
        return "JAX has threads, which a fork would cut off in the middle of their work"
    device = open_device()
    return f"{device} is open, and a device must not lose the memory that it writes into" if device else ""


def open_device() -> str:
    """The first file that this process has open of a device that may have access to its memory."""
    for descriptor in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
        with suppress(OSError):  # that of the folder itself has gone by now
            status = descriptor.stat()
            if not stat.S_ISCHR(status.st_mode) or os.major(status.st_rdev) in _HARMLESS:
                continue
            if not os.isatty(int(descriptor.name)):
                return str(descriptor.readlink())
    return ""


def _hang_up() -> None:
    """MPICH's mpiexec takes a rank for alive as long as any process holds the rank's connection."""
    with suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ["PMI_FD"])
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
