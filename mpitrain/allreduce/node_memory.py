"""Memory that all ranks of one node see: what one of them writes, the others read without a copy.

Each rank makes anonymous memory of its own (memfd_create(2)) and maps that of the others through /proc. Unlike an MPI
window, it is freed when the last array in it is gone, so nobody has to free it together; unlike a file in /dev/shm, it
leaves nothing behind when the job is killed, and the size of /dev/shm, 64 MB in a container, is no limit.
"""

from __future__ import annotations

import bisect
import mmap
import os
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from mpitrain.allreduce.algorithm import Progress
from mpitrain.allreduce.group import Group
from mpitrain.control import until
from mpitrain.errors import MpitrainError

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG, _MEET_TAG = 30, 31


class NodeMemory:
    """The shared arrays of one algorithm. Those of one number are of equal size on every rank of the node."""

    def __init__(self, mates: Group) -> None:
        self._mates = mates
        self._begins: list[int] = []  # addresses of this rank's arrays, ascending
        # As many: their length, and the others' arrays by their place on the node.
        self._others: list[tuple[int, dict[int, numpy.ndarray]]] = []

    def allocate(self, num_bytes: int) -> Generator[float | None, None, numpy.ndarray]:
        """Work that ends with this rank's part, as bytes, uninitialised. All ranks of the node do it, for one number.

        Raises:
            MpitrainError: the others' memory cannot be mapped, for instance because two containers on one machine
                call themselves one host.
        """
        descriptor = os.memfd_create("mpitrain")
        try:
            os.ftruncate(descriptor, max(num_bytes, 1))
            mine = numpy.array([os.getpid(), descriptor], numpy.int64)
            theirs = numpy.empty((self._mates.size, 2), numpy.int64)
            yield from _tell(self._mates, mine, theirs)
            problem, maps = None, []
            try:
                maps = [_map(pid, number, num_bytes) for pid, number in theirs.tolist()]
            except OSError as error:
                problem = error
            # Nobody closes before all have mapped.
            codes = numpy.empty((self._mates.size, 1), numpy.int64)
            yield from _tell(self._mates, numpy.array([problem.errno if problem else 0], numpy.int64), codes)
        finally:
            os.close(descriptor)
        if codes.any():
            code = int(codes[codes != 0][0])
            raise MpitrainError(
                f"the ranks of this node cannot map each other's memory: {os.strerror(code)}. Do they run as one user, "
                "and in one container? Otherwise choose another algorithm: MPITRAIN_ALGORITHM=ring"
            )
        others = dict(enumerate(maps))
        own = others.pop(self._mates.index)
        address = _address(own)
        place = bisect.bisect(self._begins, address)
        self._begins.insert(place, address)
        self._others.insert(place, (len(own), others))
        weakref.finalize(own, self._forget, address).atexit = False
        return own[:num_bytes]

    def find(self, flat: numpy.ndarray) -> list[numpy.ndarray] | None:
        """The same place in the memory of every rank of the node, in their order; None for memory that is not ours."""
        address = _address(flat)
        place = bisect.bisect(self._begins, address) - 1
        if place < 0:
            return None
        begin, (length, others) = self._begins[place], self._others[place]
        part = slice(address - begin, address - begin + flat.nbytes)
        if part.stop > length:
            return None
        arrays = [flat] * self._mates.size
        for index, other in others.items():
            arrays[index] = other[part].view(flat.dtype)
        return arrays

    def _forget(self, address: int) -> None:
        place = self._begins.index(address)
        del self._begins[place], self._others[place]


def _address(array: numpy.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def meet(mates: Group) -> Progress:
    """A barrier of the node's ranks: what each wrote before it, all others see after it.

    Dissemination: in round k each rank tells the one 2^k places on (Hensgen, Finkel and Manber, Two algorithms for
    barrier synchronization, Int. J. Parallel Program. 17 (1988) 1-17). A message orders the memory as well.
    """
    distance = 1
    while distance < mates.size:
        send = mates.comm.Isend(_NOTHING, mates.rank(distance), _MEET_TAG)
        yield from until(mates.comm.Irecv(_NOTHING, mates.rank(-distance), _MEET_TAG).Test)
        yield from until(send.Test)
        distance *= 2


_NOTHING = numpy.empty(0, numpy.uint8)


def _tell(mates: Group, mine: numpy.ndarray, everything: numpy.ndarray) -> Progress:
    """Every rank's numbers, by the place of the rank."""
    requests: list[MPI.Request] = []
    everything[mates.index] = mine
    for offset in range(1, mates.size):
        requests.append(mates.comm.Isend(mine, mates.rank(offset), _TAG))
        requests.append(mates.comm.Irecv(everything[(mates.index - offset) % mates.size], mates.rank(-offset), _TAG))
    for request in requests:
        yield from until(request.Test)


def _map(pid: int, descriptor: int, num_bytes: int) -> numpy.ndarray:
    with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b", buffering=0) as file:
        return numpy.frombuffer(mmap.mmap(file.fileno(), max(num_bytes, 1)), numpy.uint8)
