"""Memory that all ranks of one node see: what one of them writes, the others read without a copy.

Each rank makes anonymous memory (memfd_create(2)) and maps the memory of the others through /proc. Unlike an MPI
window, the memory is freed when the last array in it is gone, without a collective call. Unlike a file in /dev/shm, it
leaves nothing behind when the job is killed, and the size of /dev/shm, 64 MB in a container, does not limit it.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import os
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from mpitrain.allreduce.algorithm import Progress
from mpitrain.allreduce.group import Group
from mpitrain.errors import MismatchError, MpitrainError, everywhere
from mpitrain.waiting.control import until

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG, _MEET_TAG = 30, 31
_MARK_BYTES = 8


class NodeMemory:
    """The shared arrays of one algorithm. Arrays with the same number have the same size on every rank of the node."""

    def __init__(self, mates: Group) -> None:
        self._mates = mates
        self._begins: list[int] = []  # addresses of this rank's arrays, ascending
        # The lengths of these arrays, and the others' arrays by their place on the node.
        self._others: list[tuple[int, dict[int, numpy.ndarray]]] = []

    def allocate(self, num_bytes: int) -> Generator[float | None, None, numpy.ndarray]:
        """Work that ends with this rank's part, uninitialised bytes. All ranks of the node run it, for the same array.

        Raises:
            MismatchError: the ranks of the node ask for different numbers of bytes; raised on all of them.
            MpitrainError: the others' memory cannot be mapped, for instance because two containers on one machine have
                the same host name; raised on all of them.
        """
        mates = self._mates
        descriptor = os.memfd_create("mpitrain")
        try:
            os.ftruncate(descriptor, max(num_bytes, _MARK_BYTES))
            # In another container, these numbers may belong to a different process and file.
            mark = os.urandom(_MARK_BYTES)
            os.pwrite(descriptor, mark, 0)
            own = numpy.array([os.getpid(), descriptor, num_bytes, int.from_bytes(mark, "little", signed=True)])
            of_all = numpy.empty((mates.size, own.size), numpy.int64)
            yield from _tell(mates, own, of_all)
            code, maps = 0, []
            try:
                maps = [_map(pid, number, length, mark) for pid, number, length, mark in of_all.tolist()]
            except OSError as error:
                code = error.errno or errno.EIO
            # No rank closes its memory before all have mapped it.
            codes = numpy.empty((mates.size, 1), numpy.int64)
            yield from _tell(mates, numpy.array([code]), codes)
        finally:
            os.close(descriptor)
        lengths = of_all[:, 2].tolist()
        if len(set(lengths)) > 1:
            other = next(index for index, length in enumerate(lengths) if length != lengths[0])
            raise self._by_all(
                MismatchError(
                    f"rank {mates.members[other]} allocates {lengths[other]} bytes that the ranks of a node share, "
                    f"rank {mates.members[0]} on the same node allocates {lengths[0]}; "
                    "do all ranks allocate the same sizes, in the same order?"
                )
            )
        if codes.any():
            index = int(codes.ravel().nonzero()[0][0])
            raise self._by_all(
                MpitrainError(
                    f"rank {mates.members[index]} cannot map the memory of the ranks on its node: "
                    f"{os.strerror(int(codes[index, 0]))}. Run the ranks as one user, and in one container or with "
                    "--pid=host. If MPI itself works without such memory, send messages instead: "
                    "MPITRAIN_ALGORITHM=ring, no compression"
                )
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
        """Return the same place in the memory of every rank of the node, in their order; None for other memory."""
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

    def _by_all(self, error: MpitrainError) -> MpitrainError:
        """Return an error for all ranks of the node to raise, after their last message."""
        return everywhere(error, self._mates.size == self._mates.comm.size)

    def _forget(self, address: int) -> None:
        place = self._begins.index(address)
        del self._begins[place], self._others[place]


def _address(array: numpy.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def meet(mates: Group, tag: int = _MEET_TAG) -> Progress:
    """A barrier of the node's ranks: values written by any rank before it are seen by all ranks after it.

    Dissemination: in round k each rank tells the rank 2^k places on (Hensgen, Finkel and Manber, Two algorithms for
    barrier synchronization, Int. J. Parallel Program. 17 (1988) 1-17). A message orders the memory as well.
    """
    distance = 1
    while distance < mates.size:
        send = mates.comm.Isend(_NOTHING, mates.rank(distance), tag)
        receive = mates.comm.Irecv(_NOTHING, mates.rank(-distance), tag)
        while not receive.Test():
            yield None
        while not send.Test():
            yield None
        distance *= 2


_NOTHING = numpy.empty(0, numpy.uint8)


def _tell(mates: Group, own: numpy.ndarray, of_all: numpy.ndarray) -> Progress:
    """Return every rank's numbers, by the place of the rank."""
    requests: list[MPI.Request] = []
    of_all[mates.index] = own
    for offset in range(1, mates.size):
        requests.append(mates.comm.Isend(own, mates.rank(offset), _TAG))
        requests.append(mates.comm.Irecv(of_all[(mates.index - offset) % mates.size], mates.rank(-offset), _TAG))
    for request in requests:
        yield from until(request.Test)


def _map(pid: int, descriptor: int, num_bytes: int, mark: int) -> numpy.ndarray:
    with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b", buffering=0) as file:
        if int.from_bytes(os.pread(file.fileno(), _MARK_BYTES, 0), "little", signed=True) != mark:
            raise ProcessLookupError(errno.ESRCH, "this is the file of another process")
        return numpy.frombuffer(mmap.mmap(file.fileno(), max(num_bytes, _MARK_BYTES)), numpy.uint8)
