"""Activations and their gradients on the way between two ranks of a pipeline: arrays, without pickle.

A message says dtype and shape before the values, because micro-batches may have different numbers of samples. A send
does not wait. No MPI library moves a large message while its sender computes, so a thread calls MPI meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy

from mpitrain.allreduce.algorithm import BFLOAT16, FLOATS
from mpitrain.arrays import Array, is_device_array
from mpitrain.errors import ConfigError
from mpitrain.exchange.driver import allows_threads, make_driver
from mpitrain.waiting.control import until
from mpitrain.waiting.pace import patient_naps
from mpitrain.watching.activity import count_moved
from mpitrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_HEADER = 16  # numbers of 8 bytes: the dtype, whether bfloat16 travels, the number of dimensions, the dimensions
_MOST_DIMENSIONS = _HEADER - 3
# Shorter messages leave at once, whoever calls MPI (the libraries' limits are 4 to 64 KiB).
_LONG_BYTES = 4096
_NAP_SECONDS = 300e-6


class Activations:
    """The messages of one rank. Making it is collective, and so is `close`.

    Attributes:
        apart: the same ranks, with a communicator for these messages and for those of `send` and `receive`.
    """

    def __init__(self, world: World, *, narrow: bool) -> None:
        """With `narrow`, float32 and float64 values travel as bfloat16, rounded to nearest."""
        self._world, self._narrow = world, narrow
        self.apart = world.apart()
        self._sent: list[tuple[MPI.Request, numpy.ndarray]] = []
        self._driver = make_driver(world, self._progress, allows_threads())

    def send(self, array: Array, to: int, tag: int) -> None:
        """Begin to send a floating array to a rank. The array may change after the call. Arrays of a tag stay in order.

        Raises:
            ConfigError: the array is of another dtype, or has more than 13 dimensions.
        """
        host = array.get() if is_device_array(array) else array
        kind = FLOATS.index(host.dtype) if host.dtype in FLOATS else -1
        if kind < 0 or host.ndim > _MOST_DIMENSIONS:
            raise ConfigError(
                f"{self._world.name()}: a layer gives {host.dtype} {host.shape} to the next stage; allowed are "
                f"floating arrays of at most {_MOST_DIMENSIONS} dimensions. Cut the model where one such array passes"
            )
        travels = BFLOAT16 if self._narrow and host.dtype.itemsize > 2 else host.dtype
        message = numpy.empty(8 * _HEADER + host.size * travels.itemsize, numpy.uint8)
        header = message[: 8 * _HEADER].view(numpy.int64)
        header[:3] = kind, travels == BFLOAT16, host.ndim
        header[3 : 3 + host.ndim] = host.shape
        message[8 * _HEADER :].view(travels).reshape(host.shape)[...] = host
        self._pause()
        self._sent.append((self.apart.comm.Isend(message, to, tag), message))
        count_moved()
        self._resume()

    def receive(self, source: int, tag: int) -> numpy.ndarray:
        """Wait for the next array of a rank with this tag: a new one on the host, in the dtype that was sent."""
        from mpi4py import MPI

        control, status = self._world.control, MPI.Status()
        message: MPI.Message | None = None
        self._pause()

        def arrived() -> bool:
            nonlocal message
            message = self.apart.comm.Improbe(source, tag, status)
            return message is not None

        doing = f"activations from {self._world.name(source)}"
        control.wait(until(arrived, patient_naps()), doing, (source,))
        assert message is not None
        content = numpy.empty(status.Get_count(MPI.BYTE), numpy.uint8)
        request = message.Irecv(content)
        control.wait(until(request.Test), doing, (source,))
        count_moved()
        self._resume()
        kind, is_narrow, ndim = content[: 8 * _HEADER].view(numpy.int64)[:3].tolist()
        shape = content[24 : 24 + 8 * ndim].view(numpy.int64).tolist()
        values: numpy.ndarray = content[8 * _HEADER :].view(BFLOAT16 if is_narrow else FLOATS[kind]).reshape(shape)
        return values.astype(FLOATS[kind], copy=False)

    def finish(self) -> None:
        """Wait until everything has left."""
        self._pause()
        self._world.control.wait(until(self._is_empty, patient_naps()), "activations to the next stages")

    def close(self) -> None:
        """Give back the thread and the communicator. Collective; in a broken World only the thread ends."""
        if self._driver:
            self._driver.stop()
            self._driver.close()
        if not self._world.control.is_broken:
            self.apart.queue.finish()
            self.apart.free()

    def _is_empty(self) -> bool:
        self._sent = [(request, message) for request, message in self._sent if not request.Test()]
        return not self._sent

    def _progress(self) -> float | None:
        """Is called by the thread, while this rank computes."""
        return None if self._is_empty() else _NAP_SECONDS

    def _pause(self) -> None:
        if self._driver:
            self._driver.stop()

    def _resume(self) -> None:
        if self._driver and any(message.nbytes > _LONG_BYTES for _, message in self._sent):
            self._driver.start()
