"""GradientReducer: gradients in, in any order; their sample-weighted mean over ranks out, bucket by bucket.

A bucket is exchanged as soon as all its gradients are in, while the backward pass still computes the next ones.
Buckets start strictly in bucket order, whatever the order of the gradients, so all ranks start the same ones.

Who calls into MPI meanwhile is a thread (driver.py), or `ready` and `finish` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpitrain.allreduce import costs
from mpitrain.arrays import Array, namespace
from mpitrain.errors import DataError, GradientError, MpitrainError, NonFiniteError
from mpitrain.exchange.bucket import Parameter, plan_buckets, plan_layout
from mpitrain.exchange.checks import agree_on_layout, check_gradient, check_scales, check_turns
from mpitrain.exchange.driver import make_driver
from mpitrain.exchange.exchange import Exchange, make_exchange, share_of
from mpitrain.exchange.left_out import LeftOut
from mpitrain.exchange.means import Means
from mpitrain.exchange.on_device import DeviceBuckets
from mpitrain.exchange.on_host import HostBuckets
from mpitrain.exchange.overlap import Stopwatch
from mpitrain.exchange.remarks import gather_remarks
from mpitrain.exchange.sums import Doing, Sums
from mpitrain.exchange.vote import MISSING, begin_vote, beyond_range, objection
from mpitrain.waiting.agreement import Agreement, signature
from mpitrain.world import World


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
        self._lines = agree_on_layout(world, self.layout.parameters, bucket_bytes, on_device=on_device)
        self._signature = signature("step", self._lines)
        # When a bucket starts depends on the moment. On a communicator of its own it cannot meet what the ranks send
        # in the meantime: a mean() in the backward pass, or another reducer's buckets.
        self._apart = world.apart()
        self._exchange, self._queue = exchange(self._apart), self._apart.queue
        self._slots = {
            dtype: self._exchange.allocate(count, dtype, on_device=on_device)
            for dtype, count in self.layout.counts.items()
        }
        self.flats = {dtype: slot.flat for dtype, slot in self._slots.items()}
        self._place: DeviceBuckets | HostBuckets
        if on_device:
            self._place = DeviceBuckets(world, self.layout, self._buckets, self.flats)
        else:
            self._place = HostBuckets(self.layout, self._buckets, self.flats)
        self.gradients = self._place.gradients
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.members}
        self._begun: Agreement | None = None
        self._stopwatch = Stopwatch()
        self._sums = Sums(
            self._exchange, self._slots, self._place, self.layout, self._buckets, self._stopwatch, world.control
        )
        self._left_out = LeftOut(world, self.layout, self._buckets, self._exchange, self._slots)
        self._driver = make_driver(world, self.progress, threaded)
        self._is_closed = False

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
            GradientError: the step before has not been finished, or the reducer was closed.
        """
        if self._begun is not None:  # its exchanges may still write into the buffers
            raise GradientError(f"{self._world.name()}: begin() came again without finish()")
        if self._is_closed:
            raise GradientError(f"{self._world.name()}: begin() after close(); make another GradientReducer")
        self._weight = weight
        self._loss_scale = loss_scale
        self._missing = set(self._bucket_of)
        self._unused: list[int] = []
        self._share: float | None = None
        self._refused: DataError | None = None
        self._stopwatch.begin()
        self._place.begin()
        self._sums.begin()
        self._begun = self._world.begin_agreement(
            "step", self._lines, signed=self._signature, weight=weight, value=loss_scale, detail=turn
        )
        if self._driver:
            self._driver.start()

    def ready(self, index: int, gradient: Array | None) -> None:
        """Take in one gradient; called on every rank once a parameter, in any order.

        Args:
            index: of the parameter.
            gradient: host or device array of its shape and dtype; copied, so it may be overwritten afterwards (on a
                device by what its current stream is given from now on). Where the buckets are on a GPU, one on it.
                None: this rank's loss does not depend on the parameter. Zeros are summed; see `Remarks.unused`.

        Raises:
            GradientError: no step was begun, the shape, dtype or device is another, or it was handed in before.
        """
        if self._driver:
            self._world.control.raise_posted()
        if self._begun is None or index not in self._missing:
            raise GradientError(f"{self._world.name()}: {self._unexpected(index)}")
        if gradient is None:
            self._unused.append(index)
            gradient = namespace(self.gradients[index]).zeros_like(self.gradients[index])
        if gradient is not self.gradients[index]:
            check_gradient(self._world.name(), self.layout.parameters[index], gradient)
            self._place.take_in(index, gradient)
        self._missing.remove(index)
        self._sums.count(self._bucket_of[index])
        if not self._driver and self._start():
            self._queue.look()
            self._sums.collect()

    def progress(self) -> bool:
        """Start the buckets that are complete and move those on their way; true when all have arrived.

        For the thread, and, where there is none, for a model that hands in nothing for long: between `begin` and
        `finish`. `ready` and `finish` do the same by themselves, a frame nearer to MPI.
        """
        if not self._start():
            return self._refused is not None  # finish() raises it: there all ranks meet, wherever each has heard of it
        self._queue.look()
        return self._sums.collect()

    def _start(self) -> bool:
        """Start the buckets that are complete; false while this rank's share of the samples is not known."""
        self._world.control.check()
        if self._share is None:
            assert self._begun is not None
            try:
                if self._refused is not None or not self._begun.test():
                    return False
                check_turns(self._world, self._begun.records["detail"].tolist())
                check_scales(self._world, self._begun.records["value"].tolist())
                self._weights = self._begun.records["weight"].tolist()
                share, self._total = share_of(self._world, self._weights)
                self._share = share / self._loss_scale
            except DataError as error:
                self._refused = error
                return False
            except MpitrainError:
                self._begun = None  # on every rank, and nothing has been started
                raise
        self._sums.start(self._share)
        return True

    def _knows_share(self) -> bool:
        """Whether the weights of all ranks have come in: the share is known, or it is known that there is none."""
        return self._share is not None or self._refused is not None

    def _drive(self, is_over: Callable[[], bool]) -> Iterator[float | None]:
        """Steps for Control.wait: move the exchange on until `is_over`."""
        while True:
            nap = self._queue.look() if self._start() else None
            self._sums.collect()
            if is_over():
                return
            yield nap

    def finish(self, loss: float = 0.0, *, may_skip: bool = False, note: Any = None) -> Means:
        """Wait until every bucket has arrived; afterwards `gradients` and `flats` hold the means.

        Args:
            loss: this rank's mean loss over its samples.
            may_skip: the caller can do without this step, so NaN or infinity is no error; see `Means.is_finite`.
                The same on all ranks.
            note: for all ranks to know: any value that can be pickled and whose repr tells it from others. None for
                nothing. A rank with weight 0 is not heard. Notes that differ cost a message.

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
        control.wait(self._drive(self._knows_share), Doing("begin a step", self._sums))
        if self._refused is not None:
            self._begun = None
            raise self._refused
        non_finite = self._look()
        told = tuple(sorted(self._unused)), note
        vote = begin_vote(self._world, self._missing, non_finite, loss, self._weight, told, may_skip=may_skip)
        control.wait(self._drive(vote.test), Doing("end a step", self._sums))
        codes = vote.records["code"]
        # Where one is missing, ranks have started different numbers of buckets. All start all, so that nothing is on
        # its way any more, and the caller may begin another step.
        self._sums.start_all()
        control.wait(self._drive(self._sums.collect), Doing("exchange gradients", self._sums))
        self._sums.see()
        found_by_all: GradientError | None = None
        try:
            if codes.any():
                # This step is not made: what its values have left out belongs to nothing any more.
                self._exchange.reset()
                found_by_all = objection(self._world, vote, self.layout, self._place)
            elif self._exchange.may_overflow:
                found_by_all = self._look_at_means()
        finally:
            self._begun = None
        cause = found_by_all if isinstance(found_by_all, NonFiniteError) else None
        if found_by_all and not (may_skip and cause and MISSING not in codes):
            raise found_by_all
        if not cause:
            self._sums.carried = {}
            if self._world.observer:
                self._world.observer.saw_means(self.layout.named(self.flats))
        loss = sum(vote.records["value"].tolist()) / self._total
        # A rank that had a problem has voted with what it was instead of its mark.
        marks = None if codes.any() else vote.records["detail"].tolist()
        remarks = gather_remarks(self._world, told, marks, self._weights)
        return Means(loss, self._total, self._stopwatch.end(), cause, remarks)

    def state(self) -> dict[str, Any]:
        """What this rank alone keeps from step to step, for a checkpoint; {} where its exchange keeps nothing.

        Returns:
            `residual`: what the codec has left out so far, float32 host arrays by parameter name. `carried`, where a
            restored one has not been sent yet. `place`: equal where the ranks are placed alike and have equal buckets.
        """
        return self._left_out.state(self._sums.carried)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Not collective, but what the ranks carry adds up.

        Args:
            state: of this rank in an equal place; or only `carried`, by parameter name: what is missing from the means
                so far, as the sum over the ranks that get some. It is put into the next step's means.

        Raises:
            CheckpointError: it is of other parameters. Nothing has changed.
        """
        self._sums.carried = self._left_out.restore(state)

    def close(self) -> None:
        """Give back the thread, the communicator and, with the last view of it, the memory. Collective, between steps.

        A second call does nothing. In a broken world MPI may still write into the memory, and all but the thread stays.

        Raises:
            GradientError: a step has been begun and not finished.
        """
        if self._is_closed:
            return
        if self._begun is not None and not self._world.control.is_broken:
            raise GradientError(f"{self._world.name()}: close() in the middle of a step; call finish() first")
        self._is_closed = True
        if self._driver:
            self._driver.close()
        if not self._world.control.is_broken:
            self._apart.queue.finish()
            self._apart.free()
            self.flats, self.gradients = {}, []
            del self._sums, self._place, self._exchange, self._left_out

    def _unexpected(self, index: int) -> str:
        if self._begun is None:
            return "a gradient came in before begin()"
        if not 0 <= index < len(self.gradients):
            return f"there is no parameter {index}; there are {len(self.gradients)}"
        return f"the gradient of {self.layout.parameters[index].name} came in twice in one step"

    def _look(self) -> int:
        """What was found not to be finite, or -1. The exchange goes on while a GPU gets there."""
        self._place.fetch()
        if not self._place.is_fetched:
            self._world.control.wait(self._drive(lambda: self._place.is_fetched), "compute gradients")
        return self._place.non_finite()

    def _look_at_means(self) -> NonFiniteError | None:
        """What is wrong unless all are finite; they have the same bits on every rank, so no vote is needed."""
        self._place.begin()
        with self._place.behind():
            for number in range(len(self._buckets)):
                self._place.check(number)
        non_finite = self._look()
        if non_finite < 0:
            return None
        self._exchange.reset()
        return beyond_range(self.layout.parameters[self._place.parameter_of(non_finite)].name)
