"""A step's buckets under way: each starts when all its gradients have arrived, strictly in bucket order.

So all ranks start the same buckets, whatever the order of their gradients, and messages of two buckets never mix.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from mpitrain.allreduce.algorithm import AllreduceHandle
from mpitrain.arrays import like
from mpitrain.collectives.shares import scale
from mpitrain.reducer.bucket import Bucket, Layout
from mpitrain.reducer.buckets import HostBuckets
from mpitrain.reducer.exchange import Exchange
from mpitrain.reducer.means import Stopwatch
from mpitrain.reducer.slot import Slot
from mpitrain.reducer.summands import Summands
from mpitrain.waiting.control import Control


class Sums:
    """Starts buckets, and collects results. `count` is for the main thread; only one thread at a time calls the rest.

    Attributes:
        step: number of steps begun.
        carried: flat host buffers by dtype, which are added to this rank's part of the means; {} for none.
    """

    def __init__(
        self,
        exchange: Exchange,
        slots: Mapping[numpy.dtype, Slot],
        place: HostBuckets,
        layout: Layout,
        buckets: Sequence[Bucket],
        stopwatch: Stopwatch,
        control: Control,
        summands: Summands | None,
    ) -> None:
        """`slots` hold the buckets, by dtype; `control` keeps the trace, if there is one.

        `summands` begins the sums, if this rank has virtual ranks.
        """
        self._summands = summands
        self._exchange = exchange
        self._slots = slots
        self._place = place
        self._layout = layout
        self._buckets = buckets
        self._stopwatch = stopwatch
        self._control = control
        self.step = 0
        self.carried: dict[numpy.dtype, numpy.ndarray] = {}
        self._reset()

    def begin(self) -> None:
        """Begin a step: no gradient has arrived."""
        self.step += 1
        self._reset()

    def _reset(self) -> None:
        self._waiting = [len(bucket.members) for bucket in self._buckets]
        self._handles: list[AllreduceHandle] = []
        self._started: list[float] = []
        self._done = 0

    def count(self, number: int) -> None:
        """Count one more gradient of a bucket as arrived."""
        self._place.came()
        if self._waiting[number] == 1:
            self._place.complete(number)
        self._waiting[number] -= 1  # last: at 0 the thread may take the bucket

    def start(self, share: float) -> None:
        """Start the complete buckets, as this rank's part of the mean. This sends nothing yet."""
        while len(self._handles) < len(self._buckets) and self._waiting[len(self._handles)] == 0:
            self._stopwatch.busy()
            self._start(share)

    def collect(self) -> bool:
        """Find the sums that have ended. Return True when all buckets have arrived.

        Raises:
            MpitrainError: a sum has failed, on every rank.
        """
        while self._done < len(self._handles) and self._handles[self._done].is_done:
            # On a GPU the computation need not wait for the sums; `see` makes it wait.
            with self._place.behind():
                self._handles[self._done].test()
            if self._control.spans:
                self._trace(self._done)
            self._done += 1
        if self._done == len(self._handles):
            self._stopwatch.idle()
        return self._done == len(self._buckets)

    def start_all(self) -> None:
        """Also start incomplete buckets, with share 0: all ranks do this if a gradient is missing on one of them."""
        while len(self._handles) < len(self._buckets):
            self._place.complete(len(self._handles))
            self._start(0.0)

    def see(self) -> None:
        """Call this after the last arrival. On a GPU, this thread's stream then waits for the other thread's sums."""
        for handle in self._handles:
            handle.test()

    def on_its_way(self) -> str:
        """Describe the current sum, such as `bucket 2 of 5, 'layer3.w' to 'layer2.b'`; "" if there is none."""
        number = self._done
        if number >= len(self._handles):
            return ""
        members = self._buckets[number].members
        first, last = (self._layout.parameters[index].name for index in (members[0], members[-1]))
        names = f"'{first}'" if first == last else f"'{first}' to '{last}'"
        return f"bucket {number + 1} of {len(self._buckets)}, {names}"

    def _start(self, share: float) -> None:
        """Start the next bucket: check it, and begin its exchange."""
        number = len(self._handles)
        bucket = self._buckets[number]
        self._started.append(time.perf_counter())
        with self._place.after(number):
            if share:
                self._place.check(number)
            share = self._with_carried(number, share)
            slot, part = self._slots[bucket.dtype], slice(bucket.begin, bucket.end)
            if self._summands:
                self._handles.append(self._summands.mean(slot, bucket, share))
            else:
                self._handles.append(self._exchange.mean(slot, part, share))

    def _with_carried(self, number: int, share: float) -> float:
        """Add the carried values to this rank's share of a bucket. Return the share that remains to be applied."""
        if not self.carried:
            return share
        bucket, flat = self._buckets[number], self._place.flats[number]
        scale(flat, share)
        flat += like(self.carried[bucket.dtype][bucket.begin : bucket.end], flat)
        return 1.0

    def _trace(self, number: int) -> None:
        """Note that a bucket has arrived. Its sum is the one of this step and bucket on all ranks."""
        about = {"step": self.step, "bucket": number, "bytes": self._place.flats[number].nbytes}
        spans = self._control.spans
        assert spans is not None
        spans.add("wire", f"allreduce bucket {number}", self._started[number], time.perf_counter(), **about)


@dataclass(frozen=True)
class Doing:
    """What a rank is waiting in, for reports: a text, and the bucket under way at that moment."""

    words: str
    sums: Sums

    def __str__(self) -> str:
        bucket = self.sums.on_its_way()
        return f"{self.words} ({bucket})" if bucket else self.words
