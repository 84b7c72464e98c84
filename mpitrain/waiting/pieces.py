"""Arrays from rank to rank in pieces: several at a time, in both directions at once, without large messages.

Over TCP, MPI libraries send large messages one way at a time (docs/how-to/troubleshooting.md), and none takes more
than 2^31 bytes
everywhere. Pieces avoid both limits, and let additions overlap with transfers.

Mover.run is the only loop that sends and receives pieces, for arrays on the CPU and on a GPU:

    sends      0 1 2 3 | 4 5 6 ...      at most `ahead` under way; each may wait for receives (after)
    receives   0 1 2 3 | 4 5 6 ...      at most `ahead` posted; each may wait for sends (after)
    a receive is ready when its data is in place, or has been added there
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy

from mpitrain.watching.activity import count_moved

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE_BYTES = 2**18
AHEAD = 4  # pieces posted for receiving at one time, and the most pieces in sending

# How long a rank sleeps between two polls of the network. Linux adds some 50 us to any sleep. Measured
# (benchmarks/log/): at 1 Gbit/s naps cost no time and save nine tenths of a core; at 10 Gbit/s any nap leaves the link
# idle. Naps do not grow with the time of a piece: if a rank waits for one that is late, the link would seem slow.
_SHORTEST_NAP, _LONGEST_NAP = 100e-6, 200e-6
_NAPS_A_PIECE = 4
# A shorter exchange ends before a nap would pay.
_LEAST_BYTES = 256 * 1024
# The bytes that switches and sockets buffer tell nothing about the rate of the link.
_BUFFERED_BYTES = 256 * 1024
_FORGET = 0.99  # of the best rate, for each exchange; one in so many runs without naps, to measure it again
_WITHOUT_NAPS = 32

# The other rank, and the array for it or from it: flat and contiguous.
Part: TypeAlias = tuple[int, numpy.ndarray]
# Combines two arrays into the first one. If the work continues after the call, a function is returned that tells
# whether the work is over.
Combine: TypeAlias = Callable[[Any, Any], "Callable[[], bool] | None"]

_NOTHING = numpy.empty(0, numpy.uint8)  # in place of an empty array on a GPU, which has no address


# One message to another rank: the rank; the bytes, which must not change before the message is complete; the number of
# receives that must be ready before it is sent. Plain tuples, because a short exchange takes only tens of microseconds.
Send: TypeAlias = tuple[int, Any, int]
# One message from another rank: the rank; the place to overwrite, as bytes, or to add to, in its dtype; whether the
# data is added; the number of sends that must be complete before that place changes. Receives that add come first.
Receive: TypeAlias = tuple[int, Any, bool, int]


def add(total: numpy.ndarray, arrived: numpy.ndarray) -> None:
    """`total` becomes the sum."""
    # Infinity is a value like any other here; the caller checks the sum if it must be finite.
    with numpy.errstate(all="ignore"):
        numpy.add(total, arrived, out=total)


class Pace:
    """Computes naps from the time that a piece takes at the best rate so far.

    The time between arrivals is not a measure: it grows with the naps, and while other processes use the cores.
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self._begun = 0
        self._started = 0.0
        self._num_bytes = 0
        self._nap = 0.0

    def begin(self, num_bytes: int, piece_bytes: int) -> None:
        """Begin an exchange in which this rank receives `num_bytes` bytes, in pieces of `piece_bytes`."""
        self._num_bytes = num_bytes
        if num_bytes < _LEAST_BYTES:
            self._nap = 0.0
            return
        self._begun += 1
        self._started = time.perf_counter()
        if not self._rate or self._begun % _WITHOUT_NAPS == 0:
            self._nap = 0.0
            return
        nap = piece_bytes / self._rate / _NAPS_A_PIECE
        self._nap = 0.0 if nap < _SHORTEST_NAP else min(nap, _LONGEST_NAP)

    def nap(self) -> float:
        """The number of seconds to sleep. 0: poll again at once."""
        return self._nap

    def end(self) -> None:
        """End the exchange."""
        if self._num_bytes >= _LEAST_BYTES:
            rate = (self._num_bytes - _BUFFERED_BYTES) / (time.perf_counter() - self._started)
            self._rate = max(rate, self._rate * _FORGET)


class Mover:
    """Moves arrays over one communicator. Allocates its scratch memory once; the memory grows to `ahead` pieces."""

    def __init__(self, comm: MPI.Comm, tag: int, ahead: int = AHEAD, slots: Sequence[Any] | None = None) -> None:
        """`slots`: for arrays on a GPU, `ahead` byte arrays there, each as long as the longest piece."""
        self._comm = comm
        self._tag = tag
        self._ahead = ahead
        self._slots: Sequence[Any] = slots or [_NOTHING] * ahead
        self._pace = Pace()

    def move(
        self,
        sends: Sequence[Part],
        receives: Sequence[Part],
        *,
        add: Combine | None = None,
        same: bool = False,
        forward: bool = False,
    ) -> Iterator[float]:
        """Send and receive all of these, in this order on each side. Yields while it must wait.

        Args:
            sends: which array goes to which rank; read until the end.
            receives: which array comes from which rank; overwritten.
            add: called for each piece with the values there and the values that came, instead of overwriting.
            same: the arrays added to are also the arrays sent. A piece must be sent before it is added to.
            forward: the arrays sent are the arrays received.
        """
        to_send = [
            (target, piece.view(numpy.uint8), number if forward else 0)
            for number, (target, piece) in enumerate(_cut(sends), 1)
        ]
        to_receive = [
            (source, piece if add else piece.view(numpy.uint8), add is not None, number if same else 0)
            for number, (source, piece) in enumerate(_cut(receives), 1)
        ]
        return self.run(to_send, to_receive, add)

    def run(self, sends: Sequence[Send], receives: Sequence[Receive], add: Combine | None = add) -> Iterator[float]:
        """Exchange all these messages, in this order on each side, on the CPU or on a GPU. Yields while it must wait.

        Args:
            sends, receives: at most a piece each. A rank receives the messages to it in the order of their sends.
            add: called for each receive that adds, with its place and the values that came.
        """
        comm, tag, ahead = self._comm, self._tag, self._ahead
        num_sends, num_receives = len(sends), len(receives)
        sizes = [part.nbytes for _, part, _, _ in receives]
        longest = max(sizes, default=0)
        slots = self._slots
        if longest > slots[0].nbytes and receives[0][2]:
            slots = self._slots = _make_slots(longest, ahead)
        sending: deque[MPI.Request] = deque()
        receiving: deque[MPI.Request] = deque()
        adding: deque[Callable[[], bool] | None] = deque()  # tells whether the addition is over; None: it is
        started = posted = arrived = 0
        sent = ready = 0  # number of complete sends; of receives whose values are in place
        self._pace.begin(sum(sizes), longest)
        while ready < num_receives or sent < num_sends:
            while posted < num_receives and posted < ready + ahead:
                source, into, adds, after = receives[posted]
                if adds:
                    into = slots[posted % ahead][: sizes[posted]]
                elif after > sent:
                    break
                receiving.append(comm.Irecv(into if into.size else _NOTHING, source, tag))
                posted += 1
            while started < num_sends and started < sent + ahead and sends[started][2] <= ready:
                target, part, _ = sends[started]
                sending.append(comm.Isend(part if part.size else _NOTHING, target, tag))
                started += 1
            progress = False
            while sending and sending[0].Test():
                sending.popleft()
                sent += 1
                progress = True
            if receiving and receives[arrived][3] <= sent and receiving[0].Test():
                receiving.popleft()
                _, total, adds, _ = receives[arrived]
                over = None
                if adds and add is not None and total.size:
                    over = add(total, slots[arrived % ahead][: sizes[arrived]].view(total.dtype))
                adding.append(over)
                arrived += 1
                progress = True
            while adding and (adding[0] is None or adding[0]()):
                adding.popleft()
                ready += 1
                progress = True
            if progress:
                count_moved()
            else:
                yield self._pace.nap()
        self._pace.end()


def _make_slots(nbytes: int, number: int) -> list[numpy.ndarray]:
    each = -(-nbytes // 64) * 64  # so that every one is aligned
    scratch = numpy.empty(number * each, numpy.uint8)
    return [scratch[i * each : (i + 1) * each] for i in range(number)]


def _cut(parts: Sequence[Part]) -> list[Part]:
    return [
        (rank, whole[begin : begin + length])
        for rank, whole in parts
        for length in [max(1, PIECE_BYTES // whole.itemsize)]
        for begin in range(0, whole.size, length)
    ]
