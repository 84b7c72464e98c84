"""A reducer's buckets in host memory; on_device.py has the same methods for buckets on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy

from mpitrain.arrays import Array
from mpitrain.cuda.staging import copy_to_host
from mpitrain.exchange.bucket import Bucket, Layout
from mpitrain.exchange.checks import all_finite


class HostBuckets:
    """Takes gradients in, and checks whether they are finite. Only one thread at a time may call it.

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
        """Copy a gradient, of its parameter's shape and dtype, from anywhere to its place."""
        copy_to_host(gradient, self.gradients[index])

    def came(self) -> None:
        """Note that a gradient is in."""

    def complete(self, number: int) -> None:
        """Note that the whole content of a bucket is in."""

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
        """Return what is not finite, for `parameter_of`; -1 for nothing."""
        return self._non_finite

    def parameter_of(self, index: int) -> int:
        """Return the parameter of that finding."""
        return index
