"""A reducer's buckets, in CPU memory or on a GPU: stores gradients, and checks whether they are finite.

On a GPU: when each bucket is complete, a stream for their work, and one check for NaN and infinity.

    the current stream      ... gradients of bucket 0 | gradients of bucket 1 | ...
                                                  |                       |
    the buckets' stream                           +- check, scale, sum    +- check, scale, sum ...

Nothing here waits for the GPU. After the last bucket's check, the results of the checks are copied to the CPU. They are
read when the copy has arrived, while the sums continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy

from mpitrain.arrays import Array, copy_to_host, is_device_array
from mpitrain.cuda import kernels
from mpitrain.cuda.device import bind, cupy_module
from mpitrain.cuda.memory import allocating, pinned
from mpitrain.cuda.streams import happened, make_event, make_stream, mark, working_on
from mpitrain.errors import GradientError
from mpitrain.reducer.bucket import Bucket, Layout
from mpitrain.reducer.checks import all_finite
from mpitrain.world.world import World


class HostBuckets:
    """Stores gradients, and checks whether they are finite. Only one thread at a time may call it.

    Attributes:
        gradients: views of the flat buffers, by parameter.
        flats: the part of a flat buffer for each bucket.
    """

    def __init__(self, layout: Layout, buckets: Sequence[Bucket], flats: dict[numpy.dtype, Array]) -> None:
        self.gradients: list[Array] = layout.views(flats)
        self.flats = [flats[bucket.dtype][bucket.begin : bucket.end] for bucket in buckets]
        self._buckets = buckets
        self._non_finite = -1

    def begin(self) -> None:
        """Begin a step: nothing has been checked."""
        self._non_finite = -1

    def take_in(self, index: int, gradient: Array) -> None:
        """Copy a gradient, of its parameter's shape and dtype, from any memory to its place."""
        copy_to_host(gradient, self.gradients[index])

    def came(self) -> None:
        """Note that a gradient has arrived."""

    def complete(self, number: int) -> None:
        """Note that a bucket is complete."""

    def after(self, number: int) -> AbstractContextManager[None]:
        """A block whose work begins when a bucket is complete."""
        return nullcontext()

    def behind(self) -> AbstractContextManager[None]:
        """A block whose work comes after the buckets' work."""
        return nullcontext()

    def check(self, number: int) -> None:
        """Check a bucket for NaN and infinity."""
        if self._non_finite >= 0 or all_finite(self.flats[number]):
            return
        self._non_finite = next(
            index for index in self._buckets[number].members if not numpy.isfinite(self.gradients[index]).all()
        )

    def fetch(self) -> None:
        """Begin to fetch the results."""

    @property
    def is_fetched(self) -> bool:
        """True if the results have arrived."""
        return True

    def non_finite(self) -> int:
        """Return a finding for `parameter_of`; -1: everything is finite."""
        return self._non_finite

    def parameter_of(self, index: int) -> int:
        """Return the parameter of that finding."""
        return index


class DeviceBuckets(HostBuckets):
    """The same for buckets on a GPU."""

    def __init__(
        self, world: World, layout: Layout, buckets: Sequence[Bucket], flats: dict[numpy.dtype, Array]
    ) -> None:
        """Collective. Raises DeviceError on every rank if a rank has no GPU, or too little memory on it."""
        super().__init__(layout, buckets, flats)
        self._world = world
        self._names = [parameter.name for parameter in layout.parameters]
        self._gpu = bind(world)
        with allocating(world, self._gpu, 4 * len(buckets), "the flags of a reducer's buckets"):
            self._stream = make_stream(self._gpu)
            self._complete = [make_event(self._gpu) for _ in buckets]
            self._checked: Any = make_event(self._gpu)
            with working_on(self._gpu, self._stream):
                self._flags: Array = cupy_module().zeros(len(buckets), numpy.int32)
            self._host_flags = pinned(self._flags.nbytes).view(numpy.int32)
        self._from: Any = None  # the stream of the previous gradient

    def begin(self) -> None:
        """Begin a step: nothing has been checked."""
        with working_on(self._gpu, self._stream):
            self._flags.fill(0)

    def take_in(self, index: int, gradient: Array) -> None:
        """Copy a gradient, of its parameter's shape and dtype, to its place, on the current stream.

        Raises:
            GradientError: the gradient is not on this rank's GPU.
        """
        place = f"on GPU {gradient.device.id}" if is_device_array(gradient) else "on the host"
        if place != f"on GPU {self._gpu.number}":
            raise GradientError(
                f"{self._world.name()}: the gradient of {self._names[index]} is {place}; "
                f"the parameters are on {self._gpu}"
            )
        self.gradients[index][...] = gradient

    def came(self) -> None:
        """Note a gradient on the current stream; if the stream has changed, the new one waits for the previous one."""
        with self._gpu.current():
            stream = cupy_module().cuda.get_current_stream()
            if self._from is not None and self._from.ptr != stream.ptr:
                stream.wait_event(mark(self._gpu, self._from))
            self._from = stream

    def complete(self, number: int) -> None:
        """Note that the whole content of a bucket has been given to the current stream."""
        with self._gpu.current():
            self._complete[number].record(cupy_module().cuda.get_current_stream())

    @contextmanager
    def after(self, number: int) -> Iterator[None]:
        """A block whose work on the GPU begins when a bucket is complete."""
        with working_on(self._gpu, self._stream):
            self._stream.wait_event(self._complete[number])
            yield

    @contextmanager
    def behind(self) -> Iterator[None]:
        """A block whose work comes after the buckets' work."""
        with working_on(self._gpu, self._stream):
            yield

    def check(self, number: int) -> None:
        """Check a bucket for NaN and infinity; call this within `after` or `behind`."""
        kernels.all_finite(self.flats[number], self._flags[number : number + 1])

    def fetch(self) -> None:
        """Begin to copy the results to the CPU."""
        with working_on(self._gpu, self._stream):
            self._flags.get(out=self._host_flags, blocking=False)
            self._checked.record(self._stream)

    @property
    def is_fetched(self) -> bool:
        """True if that copy has arrived."""
        return happened(self._checked)

    def non_finite(self) -> int:
        """Return the first bucket that is not finite, or -1; call this after the copy has arrived."""
        flagged = numpy.flatnonzero(self._host_flags)
        return int(flagged[0]) if flagged.size else -1

    def parameter_of(self, bucket: int) -> int:
        """Return the parameter of a bucket whose gradient was not finite on some rank; from the means, so equal on all.

        The GPU has checked the bucket as a whole. If two ranks are at fault in one bucket, it may be the other's.
        """
        members = self._buckets[bucket].members
        return next((index for index in members if not all_finite(self.gradients[index])), members[0])
