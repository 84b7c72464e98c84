"""Which ranks began, and which came to their end: mpiexec's exit code does not tell.

MPICH's returns 0 where a rank leaves by os._exit(0), and ends the others, which wait for it, without a word. So
`mpitrain run` gives the ranks a file, in which each signs when init() returns and when its program is over.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

ROLL_CALL = "MPITRAIN_ROLL_CALL"  # the file's path; set by `mpitrain run` for every rank it starts

BEGUN, DONE = "begun", "done"


_begun_by = 0  # the process that signed BEGUN


def sign(path: str, word: str, rank: int) -> None:
    """Add a line, in one write, so that the ranks' lines do not mix. DONE from a forked child says nothing."""
    global _begun_by  # noqa: PLW0603 - a process is one rank
    if word == BEGUN:
        _begun_by = os.getpid()
    elif os.getpid() != _begun_by:  # it inherited the rank's atexit handlers
        return
    # Not created: on another machine the path leads nowhere, or the launcher has gone.
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, f"{word} {rank}\n".encode())
        os.close(descriptor)


class RollCall:
    """The launcher's side: the file exists inside `with`.

    Attributes:
        is_gone: `missing` did not find the file: somebody else removed it.
    """

    is_gone = False

    def __enter__(self) -> RollCall:
        descriptor, path = tempfile.mkstemp(prefix="mpitrain-roll-call-")
        os.close(descriptor)
        self.path = Path(path)
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)

    def missing(self) -> list[int]:
        """The ranks that began and did not come to their end, in increasing order; none where the file has gone."""
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            self.is_gone = True
            return []
        lines = [line.split() for line in text.splitlines()]
        signed = {word: {int(rank) for found, rank in lines if found == word} for word in (BEGUN, DONE)}
        return sorted(signed[BEGUN] - signed[DONE])
