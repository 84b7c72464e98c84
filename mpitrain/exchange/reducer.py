"""GradientReducer: gradients in, in any order; their sample-weighted mean over ranks out, bucket by bucket.

A bucket is exchanged as soon as all its gradients are in, while the backward pass still computes the next ones.
Buckets start strictly in bucket order, whatever the order of the gradients, so all ranks start the same ones.

No MPI library moves a large message while nobody calls into it. Between nodes a thread does so (driver.py); measured at
1 Gbit/s, it hides several times as much of the exchange behind the backward pass as calls between the layers do. Within
one node the ranks share the cores that they compute with, a thread only takes some of them away, and the calls are made
inside `ready` and `finish`. docs/log.md has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy

from mpitrain.agreement import Agreement, signature
from mpitrain.allreduce import costs
from mpitrain.allreduce.algorithm import Handle
from mpitrain.arrays import Array, is_device_array
from mpitrain.control import until
from mpitrain.cuda.staging import copy_to_host
from mpitrain.errors import ConfigError, DataError, GradientError, MpitrainError
from mpitrain.exchange.bucket import Parameter, plan_buckets, plan_layout
from mpitrain.exchange.checks import (
    GOOD,
    MISSING,
    NON_FINITE,
    all_finite,
    beyond_range,
    check_parameters,
    check_scales,
    first_non_finite,
    problem,
)
from mpitrain.exchange.driver import Driver
from mpitrain.exchange.exchange import Exchange, make_exchange, share_of
from mpitrain.exchange.on_device import DeviceBuckets
from mpitrain.exchange.overlap import Overlap, Stopwatch
from mpitrain.world import World


@dataclass(frozen=True)
class Means:
    """The result of a step; the same bits on every rank, but for `overlap`.

    Attributes:
        loss: the weighted mean of what the ranks gave to `finish`.
        weight: the sum of the ranks' weights: the global batch, in samples.
        overlap: this rank's times.
        is_finite: false where some rank's gradients held NaN or infinity, and so do the means.
    """

    loss: float
    weight: float
    overlap: Overlap
    is_finite: bool = True


class GradientReducer:
    """One step is: `begin(weight)`, `ready(index, gradient)` for every parameter, `finish(loss)`.

    Attributes:
        layout: where each gradient lies.
        flats: buffers by dtype, in layout order, on the host or on this rank's GPU. After `finish` they hold the means.
        gradients: the same by parameter: views of the flat buffers. A gradient that is computed right into its view
            is not copied.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[Parameter],
        *,
        exchange: Callable[[World], Exchange] = make_exchange,
        bucket_bytes: int | None = None,
        threaded: bool | None = None,
        on_device: bool = False,
    ) -> None:
        """Collective: all ranks compare the parameters and the bucket layout.

        Args:
            parameters: in the model's order; gradients of the last ones are expected first.
            exchange: makes the exchange for a World, whose `comm` is then for nothing else.
            bucket_bytes: exchange about this many bytes at once; default: the world's `bucket_mib`, or by its
                profile.
            threaded: move the exchange on from a thread. Default: where the ranks are on several nodes and MPI offers
                MPI_THREAD_MULTIPLE, which it needs.
            on_device: gradients are CuPy arrays on this rank's GPU, and so are the buckets.

        Raises:
            MismatchError: the ranks' parameters differ; on every rank, naming the first difference.
            ConfigError: no parameters, two of one name, or one whose dtype has no mean.
            DeviceError: `on_device`, and some rank has no GPU or not the memory. On every rank.
        """
        self._world = world
        if bucket_bytes is None:
            chosen = int(world.config.bucket_mib * 2**20)
            bucket_bytes = chosen or costs.bucket_bytes(world.profile, world.num_nodes)
        self.layout = plan_layout(parameters)
        self._buckets = plan_buckets(self.layout, bucket_bytes)
        lines = [f"parameter {parameter}" for parameter in self.layout.parameters]
        lines.append(f"buckets of {bucket_bytes} bytes")
        lines.append(f"gradients on {'GPUs' if on_device else 'the host'}")
        world.agree("compare the gradients' layout", lines)
        check_parameters(self.layout.parameters)
        self._lines, self._signature = lines, signature("step", lines)
        # When a bucket starts depends on the moment. On a communicator of its own it cannot meet what the ranks send
        # in the meantime: a mean() in the backward pass, or another reducer's buckets.
        self._exchange = exchange(world.apart())

        self._device = DeviceBuckets(world, len(self._buckets)) if on_device else None
        self.flats = {
            dtype: self._exchange.allocate(count, dtype, on_device=on_device)
            for dtype, count in self.layout.counts.items()
        }
        self.gradients: list[Array] = self.layout.views(self.flats)
        self._bucket_of = {index: number for number, its in enumerate(self._buckets) for index in its.members}
        self._flat_of = [self.flats[bucket.dtype][bucket.begin : bucket.end] for bucket in self._buckets]
        self._begun: Agreement | None = None
        self._stopwatch = Stopwatch()
        if threaded is None:
            threaded = _threads_by_default(world)
        elif threaded and not _allows_threads():
            error = ConfigError("threaded=True needs MPI_THREAD_MULTIPLE, and MPI was started without; leave it out")
            error.known_everywhere = True
            raise error
        self._driver = Driver(self.progress, world.control) if threaded else None

    @property
    def num_buckets(self) -> int:
        """How many buckets a step exchanges."""
        return len(self._buckets)

    def begin(self, weight: float, loss_scale: float = 1.0) -> None:
        """Begin a step in which this rank's gradients count `weight` samples. Does not wait.

        With weight 0 the gradients must be handed in too, but their values do not count.

        Args:
            weight: of this rank, in samples.
            loss_scale: what all ranks' gradients are multiplied by; the means are divided by it. A power of two, so
                that this is exact.

        Raises:
            GradientError: the step before has not been finished.
        """
        if self._begun is not None:  # its exchanges may still write into the buffers
            raise GradientError(f"{self._world.name()}: begin() came again without finish()")
        self._weight = weight
        self._loss_scale = loss_scale
        self._missing = set(self._bucket_of)
        self._waiting = [len(bucket.members) for bucket in self._buckets]
        self._non_finite = -1
        self._share: float | None = None
        self._handles: list[Handle] = []
        self._done = 0
        self._stopwatch.begin()
        if self._device:
            self._device.begin()
        self._begun = self._world.begin_agreement(
            "step", self._lines, signed=self._signature, weight=weight, value=loss_scale
        )
        if self._driver:
            self._driver.start()

    def ready(self, index: int, gradient: Array) -> None:
        """Take in one gradient; called on every rank once a parameter, in any order.

        Args:
            index: of the parameter.
            gradient: host or device array of its shape and dtype; copied, so it may be overwritten afterwards (on a
                device by what its current stream is given from now on). Where the buckets are on a GPU, one on it.

        Raises:
            GradientError: no step was begun, the shape, dtype or device is another, or it was handed in before.
        """
        if self._driver:
            self._world.control.raise_posted()
        if self._begun is None or index not in self._missing:
            raise GradientError(f"{self._world.name()}: {self._unexpected(index)}")
        view = self.gradients[index]
        if gradient is not view:
            shape, dtype = getattr(gradient, "shape", None), getattr(gradient, "dtype", None)
            if shape != view.shape or dtype != view.dtype:
                found = type(gradient).__name__ if shape is None or dtype is None else f"{dtype} {shape}"
                raise GradientError(
                    f"{self._world.name()}: the gradient of {self.layout.parameters[index].name} is "
                    f"{found}; the parameter is {view.dtype} {view.shape}"
                )
            if self._device is None:
                copy_to_host(gradient, view)
            else:
                self._check_place(index, gradient)
                view[...] = gradient
        self._missing.remove(index)
        number = self._bucket_of[index]
        if self._device and self._waiting[number] == 1:
            self._device.complete(number)
        self._waiting[number] -= 1  # last: at 0 the thread may take the bucket
        if not self._driver:
            self.progress()

    def progress(self) -> bool:
        """Start the buckets that are complete and move those on their way; true when all have arrived.

        `ready` and `finish` call it, or the thread does.
        """
        assert self._begun is not None
        if self._share is None:
            try:
                if not self._begun.test():
                    return False
                check_scales(self._world, self._begun.records["value"].tolist())
                share, self._total = share_of(self._world, self._begun.records["weight"].tolist())
                self._share = share / self._loss_scale
            except DataError:
                return True  # finish() raises it: there all ranks meet, wherever each has heard of it
            except MpitrainError:
                self._begun = None  # on every rank, and nothing has been started
                raise
        while len(self._handles) < len(self._buckets) and self._waiting[len(self._handles)] == 0:
            number = len(self._handles)
            self._stopwatch.busy()
            self._start(number, self._share)
        # On a GPU the computation need not wait for what has been summed; `finish` lets it.
        with self._device.behind() if self._device else nullcontext():
            while self._done < len(self._handles) and self._handles[self._done].test():
                self._done += 1
        if self._done == len(self._handles):
            self._stopwatch.idle()
        return self._done == len(self._buckets)

    def finish(self, loss: float = 0.0, *, may_skip: bool = False) -> Means:
        """Wait until every bucket has arrived; afterwards `gradients` and `flats` hold the means.

        Args:
            loss: this rank's mean loss over its samples.
            may_skip: the caller can do without this step, so NaN or infinity is no error; see `Means.is_finite`.
                The same on all ranks.

        Raises:
            MissingGradientError: some rank did not hand in a gradient; names rank and parameter. On every rank.
            NonFiniteError: some rank handed in NaN or infinity; names rank and parameter. On every rank.
            MismatchError: the ranks differ in `loss_scale` or `may_skip`. On every rank.
        """
        self._stopwatch.finish()
        if self._driver:
            self._driver.stop()
        if self._begun is None:
            raise GradientError(f"{self._world.name()}: finish() without begin()")
        control = self._world.control
        # Start all there is first: a bucket that waits for its turn is looked at before the vote on it.
        control.wait(until(lambda: self.progress() or self._share is not None), "begin a step")
        if self._share is None:
            weights = self._begun
            self._begun = None
            share_of(self._world, weights.records["weight"].tolist())
        if self._device:
            self._non_finite = self._look_at_device(self._device)
        code, detail = GOOD, 0
        if self._missing:
            code, detail = MISSING, min(self._missing)
        elif self._non_finite >= 0:
            code, detail = NON_FINITE, self._non_finite
        value = self._weight * loss if self._weight else 0.0
        operation = "end of a step that may be skipped" if may_skip else "end of step"
        vote = self._world.begin_agreement(operation, value=value, code=code, detail=detail)

        def voted() -> bool:
            self.progress()
            return vote.test()

        control.wait(until(voted, self._nap), "end a step")
        codes = vote.records["code"]
        # Where one is missing, ranks have started different numbers of buckets. All start all, so that nothing is on
        # its way any more, and the caller may begin another step.
        while len(self._handles) < len(self._buckets):
            if self._device:
                self._device.complete(len(self._handles))
            self._start(len(self._handles), 0.0)
        control.wait(until(self.progress, self._nap), "exchange gradients")
        if self._device:
            for handle in self._handles:
                handle.test()  # for the current stream of this thread, whichever saw the end before
        self._begun = None
        is_finite = NON_FINITE not in codes
        if is_finite and self._exchange.may_overflow:
            is_finite = self._look_at_means(may_skip)
        if codes.any() and not (may_skip and MISSING not in codes):
            rank = int(codes.nonzero()[0][0])
            detail = int(vote.records["detail"][rank])
            if self._device and codes[rank] == NON_FINITE:
                detail = first_non_finite(self.gradients, self._buckets[detail].members)
            raise problem(self._world.name(rank), int(codes[rank]), self.layout.parameters[detail].name)
        loss = sum(vote.records["value"].tolist()) / self._total
        return Means(loss, self._total, self._stopwatch.end(), is_finite)

    def _nap(self) -> float:
        """How long the bucket on its way allows to sleep."""
        return self._handles[self._done].nap if self._done < len(self._handles) else 0.0

    def _unexpected(self, index: int) -> str:
        if self._begun is None:
            return "a gradient came in before begin()"
        if not 0 <= index < len(self.gradients):
            return f"there is no parameter {index}; there are {len(self.gradients)}"
        return f"the gradient of {self.layout.parameters[index].name} came in twice in one step"

    def _start(self, number: int, share: float) -> None:
        """Start a bucket: look at it, and begin its exchange."""
        flat = self._flat_of[number]
        if self._device is None:
            if share:
                self._check_finite(number)
            self._handles.append(self._exchange.mean(flat, share))
            return
        with self._device.after(number):
            if share:
                self._device.check(number, flat)
            self._handles.append(self._exchange.mean(flat, share))

    def _look_at_device(self, device: DeviceBuckets) -> int:
        """The first bucket that was not finite, or -1. The exchange goes on while the GPU gets there."""
        device.fetch()

        def fetched() -> bool:
            self.progress()
            return device.is_fetched

        self._world.control.wait(until(fetched, self._nap), "compute gradients")
        return device.first_flagged()

    def _look_at_means(self, may_skip: bool) -> bool:
        """Whether all are finite; they have the same bits on every rank, so no vote is needed."""
        for bucket, flat in zip(self._buckets, self._flat_of, strict=True):
            if not all_finite(flat):
                # This step is not made: what its values have left out belongs to nothing any more.
                kept = self._exchange.state()
                self._exchange.restore({name: numpy.zeros_like(residual) for name, residual in kept.items()})
                if may_skip:
                    return False
                raise beyond_range(self.layout.parameters[first_non_finite(self.gradients, bucket.members)].name)
        return True

    def _check_place(self, index: int, gradient: Array) -> None:
        assert self._device is not None
        gpu = self._device.gpu
        found = f"on GPU {gradient.device.id}" if is_device_array(gradient) else "on the host"
        if found != f"on GPU {gpu.number}":
            raise GradientError(
                f"{self._world.name()}: the gradient of {self.layout.parameters[index].name} is {found}; "
                f"the parameters are on {gpu}"
            )

    def _check_finite(self, number: int) -> None:
        if self._non_finite >= 0 or all_finite(self._flat_of[number]):
            return
        self._non_finite = next(
            index for index in self._buckets[number].members if not numpy.isfinite(self.gradients[index]).all()
        )


def _threads_by_default(world: World) -> bool:
    return world.num_nodes > 1 and _allows_threads()


def _allows_threads() -> bool:
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)
