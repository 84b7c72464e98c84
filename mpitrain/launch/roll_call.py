"""How far each rank has come: mpiexec's exit code does not tell.

MPICH's returns 0 where a rank leaves by os._exit(0), and ends the others, which wait for it, without a word. So
`mpitrain run` gives the ranks of each host a file, in which each signs when it calls init(), when init() returns and
when its program is over; in a job over several hosts also when it starts. The guard of the host reads it.
"""

from __future__ import annotations

import os
from contextlib import suppress

ROLL_CALL = "MPITRAIN_ROLL_CALL"  # the file's path; set by `mpitrain run` for every rank it starts

STARTED, CALLED, BEGUN, DONE = "started", "called", "begun", "done"


_begun_by = 0  # the process that signed BEGUN


def sign(path: str, word: str, rank: int, note: str = "") -> None:
    """Add a line, in one write, so that the ranks' lines do not mix. DONE from a forked child says nothing."""
    global _begun_by  # noqa: PLW0603 - a process is one rank
    if word == BEGUN:
        _begun_by = os.getpid()
    elif word == DONE and os.getpid() != _begun_by:  # it inherited the rank's atexit handlers
        return
    # Not created: on another machine the path leads nowhere, or the launcher has gone.
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, f"{word} {rank} {note}".rstrip().encode() + b"\n")
        os.close(descriptor)


class Signatures:
    """Who has signed what, and when that was seen.

    Attributes:
        when: by word, then by rank.
    """

    def __init__(self) -> None:
        self.when: dict[str, dict[int, float]] = {word: {} for word in (STARTED, CALLED, BEGUN, DONE)}

    def add(self, line: str, now: float) -> tuple[str, int]:
        """Take in a line of a roll call; returns its word and rank."""
        word, rank, *_ = line.split()
        self.when[word].setdefault(int(rank), now)
        return word, int(rank)

    def missing(self) -> list[int]:
        """The ranks that began and did not come to their end, in increasing order."""
        return sorted(self.when[BEGUN].keys() - self.when[DONE].keys())
