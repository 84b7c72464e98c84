"""Short messages of Python objects between the ranks of a process set, sent and received without waiting."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 21


class Mail:
    """The messages on one communicator, on which there are no others. Those of one sender arrive in order."""

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._any, self._status = MPI.ANY_SOURCE, MPI.Status()
        self._sends: list[tuple[MPI.Request, bytes]] = []  # MPI reads the bytes until the request is complete
        self._incoming: tuple[int, bytearray, MPI.Request] | None = None

    def send(self, value: Any, *ranks: int) -> None:
        """Begin to send an object to these ranks."""
        content = pickle.dumps(value, protocol=5)
        self._sends += [(self._comm.Isend(content, rank, _TAG), content) for rank in ranks]

    def is_sent(self) -> bool:
        """Do what can be done without waiting. True if MPI has taken all that was sent."""
        self._sends = [send for send in self._sends if not send[0].Test()]
        return not self._sends

    def arrived(self) -> Iterator[tuple[int, Any]]:
        """Yield the sender and the object of each message that is here."""
        while True:
            if self._incoming is None:
                message = self._comm.Improbe(self._any, _TAG, self._status)
                if message is None:
                    return
                content = bytearray(self._status.count)
                self._incoming = self._status.source, content, message.Irecv(content)
            source, content, request = self._incoming
            if not request.Test():
                return
            self._incoming = None
            yield source, pickle.loads(content)
