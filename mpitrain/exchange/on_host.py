"""A reducer's buckets in host memory; on_device.py has the same methods for those on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy

from mpitrain.arrays import Array
from mpitrain.cuda.staging import copy_to_host
from mpitrain.exchange.bucket import Bucket, Layout
from mpitrain.exchange.checks import all_finite


class HostBuckets:
    """Where gradients come in, and whether they are finite. One thread at a time calls it, whichever that is.

    Attributes:
        gradients: by parameter: views of the flat buffers.
        flats: by bucket: its part of a flat buffer.
    """

    def __init__(self, layout: Layout, buckets: Sequence[Bucket], flats: dict[numpy.dtype, Array]) -> None:
        self.gradients: list[Array] = layout.views(flats)
        self.flats = [flats[bucket.dtype][bucket.begin : bucket.end] for bucket in buckets]
        self._buckets = buckets
        self._non_finite = -1

    def begin(self) -> None:
        """From now on nothing has been looked at."""
        self._non_finite = -1

    def take_in(self, index: int, gradient: Array) -> None:
        """Copy a gradient, of its parameter's shape and dtype and from anywhere, to its place."""
        copy_to_host(gradient, self.gradients[index])

    def came(self) -> None:
        """A gradient is in."""

    def complete(self, number: int) -> None:
        """All that a bucket holds has been taken in."""

    def after(self, number: int) -> AbstractContextManager[None]:
        """A block whose work begins when a bucket is complete."""
        return nullcontext()

    def behind(self) -> AbstractContextManager[None]:
        """A block whose work is behind the buckets'."""
        return nullcontext()

    def check(self, number: int) -> None:
        """Look for NaN and infinity in a bucket."""
        if self._non_finite >= 0 or all_finite(self.flats[number]):
            return
        self._non_finite = next(
            index for index in self._buckets[number].members if not numpy.isfinite(self.gradients[index]).all()
        )

    def fetch(self) -> None:
        """Begin to get what was found."""

    @property
    def is_fetched(self) -> bool:
        """Whether that is there."""
        return True

    def non_finite(self) -> int:
        """What was found not to be finite, for `parameter_of`; -1 for nothing."""
        return self._non_finite

    def parameter_of(self, index: int) -> int:
        """The parameter that this is about."""
        return index
