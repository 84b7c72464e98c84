"""A reducer's buckets on a GPU: when each is complete, a stream of their own, and one look at all for NaN and infinity.

    the current stream      ... gradients of bucket 0 | gradients of bucket 1 | ...
                                                  |                       |
    the buckets' stream                           +- check, scale, sum    +- check, scale, sum ...

Nothing here waits for the GPU. What was found not to be finite is copied to the host behind the last bucket's check,
and read when it is there, while the sums go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy

from mpitrain.arrays import Array
from mpitrain.cuda import kernels
from mpitrain.cuda.device import bind, cupy_module
from mpitrain.cuda.memory import pinned
from mpitrain.cuda.streams import happened, make_event, make_stream, working_on
from mpitrain.world import World


class DeviceBuckets:
    """The GPU's side of a GradientReducer. One thread at a time calls it, whichever that is."""

    def __init__(self, world: World, num_buckets: int) -> None:
        """Collective. Raises DeviceError on every rank where one has no GPU."""
        self.gpu = bind(world)
        self._stream = make_stream(self.gpu)
        self._complete = [make_event(self.gpu) for _ in range(num_buckets)]
        self._checked: Any = make_event(self.gpu)
        with working_on(self.gpu, self._stream):
            self._flags: Array = cupy_module().zeros(num_buckets, numpy.int32)
        self._host_flags = pinned(self._flags.nbytes).view(numpy.int32)

    def begin(self) -> None:
        """Begin a step."""
        with working_on(self.gpu, self._stream):
            self._flags.fill(0)

    def complete(self, number: int) -> None:
        """The current stream has been given all that a bucket holds."""
        with self.gpu.current():
            self._complete[number].record(cupy_module().cuda.get_current_stream())

    @contextmanager
    def after(self, number: int) -> Iterator[None]:
        """A block whose work begins on the GPU when a bucket is complete."""
        with working_on(self.gpu, self._stream):
            self._stream.wait_event(self._complete[number])
            yield

    @contextmanager
    def behind(self) -> Iterator[None]:
        """A block whose work is behind the buckets'."""
        with working_on(self.gpu, self._stream):
            yield

    def check(self, number: int, flat: Array) -> None:
        """Look for NaN and infinity in a bucket; within `after`."""
        kernels.all_finite(flat, self._flags[number : number + 1])

    def fetch(self) -> None:
        """Begin to copy what was found to the host."""
        with working_on(self.gpu, self._stream):
            self._flags.get(out=self._host_flags, blocking=False)
            self._checked.record(self._stream)

    @property
    def is_fetched(self) -> bool:
        """Whether that copy is there."""
        return happened(self._checked)

    def first_flagged(self) -> int:
        """The first bucket that is not finite, or -1; once that copy is there."""
        found = numpy.flatnonzero(self._host_flags)
        return int(found[0]) if found.size else -1
