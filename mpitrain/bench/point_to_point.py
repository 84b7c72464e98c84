"""Latency and bandwidth of every ordered pair, in rounds in which each rank has one partner.

The rounds are those of a tournament by the circle method: one rank stays, the others rotate. With four ranks:

    0-3 1-2     0-2 3-1     0-1 2-3

With an odd number of ranks, one rests in each round. All pairs of a round measure at once. A switch should carry all of
them at the full rate; if it does not, a job will find the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy

if TYPE_CHECKING:
    from mpi4py import MPI

_ROUND_TRIPS = 100
_WARM_UP = 10
_MESSAGE_BYTES = 2**20
_IN_FLIGHT = 4
_FEWEST, _MOST = 8, 512  # messages for the bandwidth
_SECONDS = 0.1  # approximate time for them
_TAG = 1


class Pairs(NamedTuple):
    """The measurements, by the sender's rank, then by the receiver's; the diagonal is 0."""

    latency_us: list[list[float]]  # half the round trip of one byte, median
    bytes_per_second: list[list[float]]  # messages of 1 MiB, several in flight


def circle_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each round; every two of `size` meet in exactly one round."""
    seats: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        drawn = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(a, b) for a, b in drawn if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure_pairs(comm: MPI.Comm, tell: Callable[[str], object] = lambda text: None) -> Pairs:
    """Measure every ordered pair of `comm`'s ranks. All ranks get the complete result. Collective over `comm`."""
    latency, rate = (numpy.zeros((comm.size, comm.size)) for _ in range(2))
    rounds = circle_rounds(comm.size)
    for number, pairs in enumerate(rounds):
        tell(f"point to point: round {number + 1} of {len(rounds)}")
        partner = next((b if comm.rank == a else a for a, b in pairs if comm.rank in (a, b)), None)
        for lower_first in (True, False):
            comm.Barrier()
            if partner is None:
                continue
            if (comm.rank < partner) == lower_first:
                latency[comm.rank, partner] = _round_trip(comm, partner) / 2
                rate[comm.rank, partner] = _send_many(comm, partner)
            else:
                _answer(comm, partner)
                _receive_many(comm, partner)
    # Each rank has filled in its own row, and zeros elsewhere.
    latency, rate = (sum(comm.allgather(table)) for table in (latency, rate))
    return Pairs((latency * 1e6).tolist(), rate.tolist())


def _round_trip(comm: MPI.Comm, partner: int) -> float:
    """Median seconds."""
    byte = numpy.zeros(1, numpy.uint8)
    seconds = []
    for _ in range(_WARM_UP + _ROUND_TRIPS):
        started = time.perf_counter()
        comm.Send(byte, partner, _TAG)
        comm.Recv(byte, partner, _TAG)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[_WARM_UP:])


def _answer(comm: MPI.Comm, partner: int) -> None:
    byte = numpy.zeros(1, numpy.uint8)
    for _ in range(_WARM_UP + _ROUND_TRIPS):
        comm.Recv(byte, partner, _TAG)
        comm.Send(byte, partner, _TAG)


def _send_many(comm: MPI.Comm, partner: int) -> float:
    """Return bytes per second, from the first send to the reply that all messages have arrived."""
    message = numpy.zeros(_MESSAGE_BYTES, numpy.uint8)
    number, rate = _FEWEST, 0.0
    for _ in range(2):  # the first pass finds how many messages fill the time
        comm.send(number, partner, _TAG)
        comm.recv(None, partner, _TAG)
        started = time.perf_counter()
        sends: list[MPI.Request] = []
        for _ in range(number):
            if len(sends) == _IN_FLIGHT:
                sends.pop(0).Wait()
            sends.append(comm.Isend(message, partner, _TAG))
        for send in sends:
            send.Wait()
        comm.recv(None, partner, _TAG)
        rate = number * _MESSAGE_BYTES / (time.perf_counter() - started)
        number = max(_FEWEST, min(_MOST, int(_SECONDS * rate / _MESSAGE_BYTES)))
    return rate


def _receive_many(comm: MPI.Comm, partner: int) -> None:
    messages = [numpy.empty(_MESSAGE_BYTES, numpy.uint8) for _ in range(_IN_FLIGHT)]
    for _ in range(2):
        number = comm.recv(None, partner, _TAG)
        posted = [comm.Irecv(messages[index], partner, _TAG) for index in range(min(_IN_FLIGHT, number))]
        comm.send(None, partner, _TAG)
        for index in range(number):
            posted[index % _IN_FLIGHT].Wait()
            if index + _IN_FLIGHT < number:
                posted[index % _IN_FLIGHT] = comm.Irecv(messages[index % _IN_FLIGHT], partner, _TAG)
        comm.send(None, partner, _TAG)
