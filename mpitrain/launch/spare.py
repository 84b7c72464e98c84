"""One spare: a process that runs the job's script, and waits in init() to become a rank. See spares.py.

Sent to its host as text. So this module imports only the modules that come with it, and must run with old Pythons.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence

from mpitrain.job.context import (
    JOB,
    LAUNCHER,
    OF_MPIEXEC,
    SPARE,
    SPARE_FOLDER,
    SPARE_LINE,
    SPARE_OUTPUT,
    SPARE_ROOM,
)

# STARTING: it has not come to init() yet. READY: it waits there. ASKED: it has been given the place of a rank. RANK: it
# has taken that place. REFUSED: it cannot become a rank.
STARTING, READY, ASKED, RANK, REFUSED = range(5)

_ROOM_BYTES = 512
_TAIL_BYTES = 4096
_PR_SET_PDEATHSIG = 1


class Spare:
    """A spare.

    Attributes:
        process: its process.
        line: a socket: it sends "ready", "taken", or why it cannot become a rank.
        state: see above.
        stub: the line to the stub whose place it has; None: it has none.
        asked_at: when it was asked, by time.monotonic().
        is_late: it did not answer in time.
    """

    def __init__(self, program: Sequence[str], place: Sequence[bytes], token: str) -> None:
        """Start it.

        Args:
            program: the command of a rank.
            place: folder, cores and variables of a rank.
            token: marks the spares of this holder.

        Raises:
            OSError, subprocess.SubprocessError: it cannot be started.
        """
        folder, _, *variables = place
        environment = dict(variable.split(b"=", 1) for variable in variables)
        # It must not take itself for a rank before it is one.
        told = tuple(prefix.encode() for prefix in (*OF_MPIEXEC, JOB, LAUNCHER))
        environment = {name: value for name, value in environment.items() if not name.startswith(told)}
        self.line, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.setblocking(False)
        own = {
            SPARE: token,
            SPARE_FOLDER: os.fsdecode(folder),
            SPARE_LINE: f"{far_end.fileno()} {os.getpid()}",
            SPARE_ROOM: "." * _ROOM_BYTES,
            "MPI4PY_RC_INITIALIZE": "0",  # a script's own `from mpi4py import MPI` must not start MPI in a spare
        }
        environment.update((name.encode(), os.fsencode(value)) for name, value in own.items())
        output, self._errors = os.memfd_create(SPARE_OUTPUT), os.memfd_create(SPARE_OUTPUT)
        self.state = STARTING
        self.stub: socket.socket | None = None
        self.asked_at = 0.0
        self.is_late = False
        try:
            self.process = subprocess.Popen(
                program,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=self._errors,
                pass_fds=[far_end.fileno()],
                preexec_fn=_as_spare(),  # noqa: PLW1509 (there are no threads)
            )
        except BaseException:
            self.close()
            raise
        finally:
            far_end.close()
            os.close(output)

    def last_words(self) -> str:
        """Return the last line that it has written to stderr."""
        size = os.fstat(self._errors).st_size
        text = os.pread(self._errors, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
        return "".join(text.strip().splitlines()[-1:])

    def close(self) -> None:
        """Close all that belongs to it."""
        self.line.close()
        os.close(self._errors)
        if self.stub is not None:
            self.stub.close()


def _as_spare() -> Callable[[], None]:
    """Return what a spare runs before its program: it ends with the holder, and has a session of its own."""
    holder = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != holder:
            os._exit(1)
        os.setsid()

    return in_child
