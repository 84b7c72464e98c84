"""Which of some processes of this machine ended first, to the microsecond, and which have lost their parent.

The first is the culprit: mpiexec ends the others within a millisecond, and may then name any of them (MPICH's does so
now and then). A pidfd becomes readable when its process ends, and epoll gives what is ready in the order in which it
became so (Linux, epoll(7), pidfd_open(2)).

Sent to the guards as text, so it imports nothing of ours and does with an old Python.
"""

from __future__ import annotations

import os
import select
from pathlib import Path


class Orphans:
    """Ranks whose parent has ended. Where the daemon of mpiexec is killed they live on, and mpiexec waits for them."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[int, int]] = {}  # process and parent, by rank
        self._before: set[int] = set()

    def watch(self, rank: int, pid: int, parent: int) -> None:
        """From now on look at this rank, which `parent` has started."""
        self._watched[rank] = pid, parent

    def look(self) -> list[int]:
        """Those that were orphans at the look before too: at a job's end all are, for a moment."""
        now = set()
        for rank, (pid, parent) in tuple(self._watched.items()):
            try:
                # "pid (name) state parent ...", where the name may hold spaces and brackets.
                state, its_parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
            except OSError:
                state = b"X"
            if state in (b"Z", b"X"):  # it has ended, and its number may come to be another's
                del self._watched[rank]
            elif int(its_parent) != parent:
                now.add(rank)
        found, self._before = sorted(now & self._before), now
        return found


class Deaths:
    """Looks at processes until the first one ends."""

    def __init__(self) -> None:
        self._ready = select.epoll()
        self._names: dict[int, int] = {}  # by descriptor
        self._seen: set[int] = set()
        self._first: int | None = None
        self._is_sure = True

    def watch(self, name: int, pid: int) -> None:
        """From now on look at process `pid`, called `name`; the first call for a name counts."""
        if name in self._seen:
            return
        self._seen.add(name)
        try:
            descriptor = os.pidfd_open(pid)
        except (OSError, AttributeError):  # it has ended already, perhaps before the others; or this is Python 3.8
            self._is_sure = False
            return
        if select.select([descriptor], [], [], 0)[0]:  # so has this one, and its parent has not noticed yet
            self._is_sure = False
            os.close(descriptor)
            return
        self._names[descriptor] = name
        self._ready.register(descriptor, select.EPOLLIN)

    def fileno(self) -> int:
        """For select: readable when a process has ended, until `first` is called."""
        return self._ready.fileno()

    def first(self) -> int | None:
        """Who ended first; None: nobody yet, or it is not known."""
        for descriptor, _ in self._ready.poll(0, max(1, len(self._names))):
            name = self._names.pop(descriptor)
            self._first = name if self._first is None else self._first
            os.close(descriptor)  # which takes it out of epoll too
        return self._first if self._is_sure else None

    def close(self) -> None:
        """Look no more."""
        for descriptor in self._names:
            os.close(descriptor)
        self._ready.close()
