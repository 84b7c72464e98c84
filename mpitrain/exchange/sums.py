"""A step's buckets on their way: each starts when all its gradients are in, strictly in bucket order.

So all ranks start the same ones, whatever the order of their gradients, and the messages of two never meet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy

from mpitrain.allreduce.algorithm import Handle
from mpitrain.control import Control
from mpitrain.cuda.staging import like
from mpitrain.exchange.bucket import Bucket
from mpitrain.exchange.exchange import Exchange, scale
from mpitrain.exchange.on_device import DeviceBuckets
from mpitrain.exchange.on_host import HostBuckets
from mpitrain.exchange.overlap import Stopwatch


class Sums:
    """Starts them and moves them on. `count` is for the main thread; of the rest, one thread at a time calls it.

    Attributes:
        step: how many have begun.
        carried: flat host buffers by dtype that are added to this rank's part of the means; {} for none.
    """

    def __init__(
        self,
        exchange: Exchange,
        place: DeviceBuckets | HostBuckets,
        buckets: Sequence[Bucket],
        stopwatch: Stopwatch,
        control: Control,
    ) -> None:
        """`control` keeps the trace, where there is one."""
        self._exchange = exchange
        self._place = place
        self._buckets = buckets
        self._stopwatch = stopwatch
        self._control = control
        self.step = 0
        self.carried: dict[numpy.dtype, numpy.ndarray] = {}
        self._reset()

    def begin(self) -> None:
        """A step begins: no gradient is in."""
        self.step += 1
        self._reset()

    def _reset(self) -> None:
        self._waiting = [len(bucket.members) for bucket in self._buckets]
        self._handles: list[Handle] = []
        self._started: list[float] = []
        self._done = 0

    def count(self, number: int) -> None:
        """One more of a bucket's gradients is in."""
        self._place.came()
        if self._waiting[number] == 1:
            self._place.complete(number)
        self._waiting[number] -= 1  # last: at 0 the thread may take the bucket

    def progress(self, share: float) -> bool:
        """Start what is complete, as this rank's part of the mean, and move on what is started; true when all is in."""
        while len(self._handles) < len(self._buckets) and self._waiting[len(self._handles)] == 0:
            self._stopwatch.busy()
            self._start(share)
        # On a GPU the computation need not wait for what has been summed; `see` lets it.
        with self._place.behind():
            while self._done < len(self._handles) and self._handles[self._done].test():
                if self._control.spans:
                    self._trace(self._done)
                self._done += 1
        if self._done == len(self._handles):
            self._stopwatch.idle()
        return self._done == len(self._buckets)

    def start_all(self) -> None:
        """Start also what is not complete, counting for nothing: all ranks do, where a gradient is missing on one."""
        while len(self._handles) < len(self._buckets):
            self._place.complete(len(self._handles))
            self._start(0.0)

    def see(self) -> None:
        """Once all are in: on a GPU, let this thread's current stream see them, whichever thread saw the end before."""
        for handle in self._handles:
            handle.test()

    def on_its_way(self) -> int | None:
        """The bucket that is being summed."""
        return self._done if self._done < len(self._handles) else None

    def nap(self) -> float:
        """How long the bucket on its way allows to sleep."""
        return self._handles[self._done].nap if self._done < len(self._handles) else 0.0

    def _start(self, share: float) -> None:
        """Start the next bucket: look at it, and begin its exchange."""
        number = len(self._handles)
        self._started.append(time.perf_counter())
        with self._place.after(number):
            if share:
                self._place.check(number)
            self._handles.append(self._exchange.mean(self._place.flats[number], self._with_carried(number, share)))

    def _with_carried(self, number: int, share: float) -> float:
        """Where something is carried, add it to this rank's share of a bucket; returns the share that is left to do."""
        if not self.carried:
            return share
        bucket, flat = self._buckets[number], self._place.flats[number]
        scale(flat, share)
        flat += like(self.carried[bucket.dtype][bucket.begin : bucket.end], flat)
        return 1.0

    def _trace(self, number: int) -> None:
        """A bucket has arrived. Its sum is the same one on all ranks that have this step and bucket."""
        about = {"step": self.step, "bucket": number, "bytes": self._place.flats[number].nbytes}
        spans = self._control.spans
        assert spans is not None
        spans.add("wire", f"allreduce bucket {number}", self._started[number], time.perf_counter(), **about)
