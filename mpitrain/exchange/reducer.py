"""GradientReducer: gradients in, in any order; their sample-weighted mean over ranks out, bucket by bucket.

A bucket is exchanged as soon as all its gradients are in, while the backward pass still computes the next ones.
Buckets start strictly in bucket order, whatever the order of the gradients, so all ranks start the same ones.

No MPI library moves a large message while nobody calls into it. Between nodes a thread does so (driver.py); measured at
1 Gbit/s, it hides several times as much of the exchange behind the backward pass as calls between the layers do. Within
one node the ranks share the cores that they compute with, a thread only takes some of them away, and the calls are made
inside `ready` and `finish`. docs/log.md has the numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mpitrain.agreement import Agreement, signature
from mpitrain.allreduce import costs
from mpitrain.arrays import Array
from mpitrain.control import until
from mpitrain.errors import ConfigError, DataError, GradientError, MpitrainError, NonFiniteError
from mpitrain.exchange.bucket import Parameter, plan_buckets, plan_layout
from mpitrain.exchange.checks import (
    GOOD,
    MISSING,
    NON_FINITE,
    NON_FINITE_LOSS,
    beyond_range,
    check_gradient,
    check_parameters,
    check_scales,
    check_turns,
    problem,
)
from mpitrain.exchange.driver import Driver, allows_threads, threads_by_default
from mpitrain.exchange.exchange import Exchange, make_exchange, share_of
from mpitrain.exchange.on_device import DeviceBuckets
from mpitrain.exchange.on_host import HostBuckets
from mpitrain.exchange.overlap import Overlap, Stopwatch
from mpitrain.exchange.sums import Sums
from mpitrain.world import World


@dataclass(frozen=True)
class Means:
    """The result of a step; the same bits on every rank, but for `overlap`.

    Attributes:
        loss: the weighted mean of what the ranks gave to `finish`.
        weight: the sum of the ranks' weights: the global batch, in samples.
        overlap: this rank's times.
        cause: of a step that may be skipped: where some rank's gradients held NaN or infinity, what `finish` would
            have raised. The means then are no means.
        marks: what the ranks gave to `finish`, by rank; 0 for one that had a problem.
    """

    loss: float
    weight: float
    overlap: Overlap
    cause: NonFiniteError | None = None
    marks: tuple[int, ...] = ()

    @property
    def is_finite(self) -> bool:
        """False where some rank's gradients held NaN or infinity, and so do the means."""
        return self.cause is None


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
        self.flats = {
            dtype: self._exchange.allocate(count, dtype, on_device=on_device)
            for dtype, count in self.layout.counts.items()
        }
        self._place: DeviceBuckets | HostBuckets
        if on_device:
            self._place = DeviceBuckets(world, self.layout, self._buckets, self.flats)
        else:
            self._place = HostBuckets(self.layout, self._buckets, self.flats)
        self.gradients = self._place.gradients
        self._bucket_of = {index: number for number, its in enumerate(self._buckets) for index in its.members}
        self._begun: Agreement | None = None
        self._stopwatch = Stopwatch()
        self._sums = Sums(self._exchange, self._place, self._buckets, self._stopwatch, world.control)
        if threaded is None:
            threaded = threads_by_default(world)
        elif threaded and not allows_threads():
            error = ConfigError("threaded=True needs MPI_THREAD_MULTIPLE, and MPI was started without; leave it out")
            error.known_everywhere = True
            raise error
        self._driver = Driver(self.progress, world.control) if threaded else None

    @property
    def num_buckets(self) -> int:
        """How many buckets a step exchanges."""
        return len(self._buckets)

    def begin(self, weight: float, loss_scale: float = 1.0, *, turn: int = 0) -> None:
        """Begin a step in which this rank's gradients count `weight` samples. Does not wait.

        With weight 0 the gradients must be handed in too, but their values do not count.

        Args:
            weight: of this rank, in samples.
            loss_scale: what all ranks' gradients are multiplied by; the means are divided by it. A power of two, so
                that this is exact.
            turn: number of the batch, or another one that must be equal on all ranks. Where it is not, `ready` or
                `finish` raises a MismatchError on every rank.

        Raises:
            GradientError: the step before has not been finished.
        """
        if self._begun is not None:  # its exchanges may still write into the buffers
            raise GradientError(f"{self._world.name()}: begin() came again without finish()")
        self._weight = weight
        self._loss_scale = loss_scale
        self._missing = set(self._bucket_of)
        self._share: float | None = None
        self._stopwatch.begin()
        self._place.begin()
        self._sums.begin()
        self._begun = self._world.begin_agreement(
            "step", self._lines, signed=self._signature, weight=weight, value=loss_scale, detail=turn
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
        if gradient is not self.gradients[index]:
            check_gradient(self._world.name(), self.layout.parameters[index], gradient)
            self._place.take_in(index, gradient)
        self._missing.remove(index)
        self._sums.count(self._bucket_of[index])
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
                check_turns(self._world, self._begun.records["detail"].tolist())
                check_scales(self._world, self._begun.records["value"].tolist())
                share, self._total = share_of(self._world, self._begun.records["weight"].tolist())
                self._share = share / self._loss_scale
            except DataError:
                return True  # finish() raises it: there all ranks meet, wherever each has heard of it
            except MpitrainError:
                self._begun = None  # on every rank, and nothing has been started
                raise
        return self._sums.progress(self._share)

    def finish(self, loss: float = 0.0, *, may_skip: bool = False, mark: int = 0) -> Means:
        """Wait until every bucket has arrived; afterwards `gradients` and `flats` hold the means.

        Args:
            loss: this rank's mean loss over its samples.
            may_skip: the caller can do without this step, so NaN or infinity is no error; see `Means.is_finite`.
                The same on all ranks.
            mark: a number for all ranks to know; see `Means.marks`.

        Raises:
            MissingGradientError: some rank did not hand in a gradient; names rank and parameter. On every rank.
            NonFiniteError: some rank handed in NaN or infinity; names rank and parameter. Or its loss is that, and
                the step may not be skipped. On every rank.
            MismatchError: the ranks differ in `loss_scale` or `may_skip`. On every rank.
        """
        self._stopwatch.finish()
        if self._driver:
            self._driver.stop()
        if self._begun is None:
            raise GradientError(f"{self._world.name()}: finish() without begin()")
        control = self._world.control
        if control.spans:
            control.spans.add("compute", "forward and backward", *self._stopwatch.computed, step=self._sums.step)
        # Start all there is first: a bucket that waits for its turn is looked at before the vote on it.
        control.wait(until(lambda: self.progress() or self._share is not None), _Doing("begin a step", self))
        if self._share is None:
            weights = self._begun
            self._begun = None
            share_of(self._world, weights.records["weight"].tolist())
        found = self._look()
        code, detail = GOOD, mark
        if self._missing:
            code, detail = MISSING, min(self._missing)
        elif found >= 0:
            code, detail = NON_FINITE, found
        elif self._weight and not may_skip and not math.isfinite(loss):  # with a loss scale the gradients decide
            code = NON_FINITE_LOSS
        value = self._weight * loss if self._weight else 0.0
        operation = "end of a step that may be skipped" if may_skip else "end of step"
        vote = self._world.begin_agreement(operation, value=value, code=code, detail=detail)

        def voted() -> bool:
            self.progress()
            return vote.test()

        control.wait(until(voted, self._sums.nap), _Doing("end a step", self))
        codes = vote.records["code"]
        # Where one is missing, ranks have started different numbers of buckets. All start all, so that nothing is on
        # its way any more, and the caller may begin another step.
        self._sums.start_all()
        control.wait(until(self.progress, self._sums.nap), _Doing("exchange gradients", self))
        self._sums.see()
        found_by_all: GradientError | None = None
        try:
            if codes.any():
                self._forget()
                found_by_all = self._problem(vote)
            elif self._exchange.may_overflow:
                found_by_all = self._look_at_means()
        finally:
            self._begun = None
        cause = found_by_all if isinstance(found_by_all, NonFiniteError) else None
        if found_by_all and not (may_skip and cause and MISSING not in codes):
            raise found_by_all
        if not cause:
            self._sums.carried = {}
        loss = sum(vote.records["value"].tolist()) / self._total
        marks = tuple(numpy.where(codes == GOOD, vote.records["detail"], 0).tolist())
        return Means(loss, self._total, self._stopwatch.end(), cause, marks)

    def state(self) -> dict[str, Any]:
        """What this rank alone keeps from step to step, for a checkpoint; {} where its exchange keeps nothing.

        Returns:
            `residual`: what the codec has left out so far, float32 host arrays by parameter name. `carried`, where a
            restored one has not been sent yet. `place`: equal where the ranks are placed alike and have equal buckets.
        """
        # On one node nothing is left out.
        kept = self._exchange.state() if self._world.num_nodes > 1 else {}
        if not kept:
            return {}
        flats = {dtype: kept[f"residual {number}"] for number, dtype in enumerate(self.flats)}
        state = {"place": self._placement(), "residual": self.layout.named(flats)}
        return {**state, "carried": self.layout.named(self._sums.carried)} if self._sums.carried else state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Not collective, but what the ranks carry adds up.

        Args:
            state: of this rank in an equal place; or only `carried`, by parameter name: what is missing from the means
                so far, as the sum over the ranks that get some. It is put into the next step's means.

        Raises:
            CheckpointError: it is of other parameters. Nothing has changed.
        """
        residual, carried = (self.layout.flats_of(state.get(key, {})) for key in ("residual", "carried"))
        kept = self._exchange.state()
        if kept:
            for number, dtype in enumerate(self.flats):
                kept[f"residual {number}"][:] = residual.get(dtype, 0)
            self._exchange.restore(kept)
        self._sums.carried = carried

    def bucket_on_its_way(self) -> str:
        """Such as `bucket 2 of 5, 'layer3.w' to 'layer2.b'`; "" while there is none."""
        number = self._sums.on_its_way()
        if number is None:
            return ""
        members = self._buckets[number].members
        first, last = (self.layout.parameters[index].name for index in (members[0], members[-1]))
        names = f"'{first}'" if first == last else f"'{first}' to '{last}'"
        return f"bucket {number + 1} of {len(self._buckets)}, {names}"

    def _placement(self) -> str:
        """Equal where every rank leaves out the same elements: which those are follows from nodes and buckets."""
        buckets = [(str(bucket.dtype), bucket.begin, bucket.end) for bucket in self._buckets]
        return hashlib.sha256(repr((self._world.node_ranks, buckets, self._exchange.division)).encode()).hexdigest()

    def _unexpected(self, index: int) -> str:
        if self._begun is None:
            return "a gradient came in before begin()"
        if not 0 <= index < len(self.gradients):
            return f"there is no parameter {index}; there are {len(self.gradients)}"
        return f"the gradient of {self.layout.parameters[index].name} came in twice in one step"

    def _look(self) -> int:
        """What was found not to be finite, or -1. The exchange goes on while a GPU gets there."""
        self._place.fetch()

        def fetched() -> bool:
            self.progress()
            return self._place.is_fetched

        if not self._place.is_fetched:
            self._world.control.wait(until(fetched, self._sums.nap), "compute gradients")
        return self._place.found()

    def _problem(self, vote: Agreement) -> GradientError:
        """What the first rank that has one has said, as every rank raises it."""
        codes = vote.records["code"]
        rank = int(codes.nonzero()[0][0])
        detail = int(vote.records["detail"][rank])
        if codes[rank] == NON_FINITE:
            detail = self._place.parameter_of(detail)
        # The loss is of no parameter, and its rank's detail is a mark.
        name = "" if codes[rank] == NON_FINITE_LOSS else self.layout.parameters[detail].name
        return problem(self._world.name(rank), int(codes[rank]), name)

    def _look_at_means(self) -> NonFiniteError | None:
        """What is wrong unless all are finite; they have the same bits on every rank, so no vote is needed."""
        self._place.begin()
        with self._place.behind():
            for number in range(len(self._buckets)):
                self._place.check(number)
        found = self._look()
        if found < 0:
            return None
        self._forget()
        return beyond_range(self.layout.parameters[self._place.parameter_of(found)].name)

    def _forget(self) -> None:
        """This step is not made: what its values have left out belongs to nothing any more."""
        kept = self._exchange.state()
        self._exchange.restore({name: numpy.zeros_like(residual) for name, residual in kept.items()})


@dataclass(frozen=True)
class _Doing:
    """What a rank waits in, for reports."""

    words: str
    reducer: GradientReducer

    def __str__(self) -> str:
        bucket = self.reducer.bucket_on_its_way()
        return f"{self.words} ({bucket})" if bucket else self.words
