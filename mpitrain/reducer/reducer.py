"""GradientReducer takes gradients in any order, and computes their sample-weighted means over ranks, bucket by bucket.

A bucket is exchanged as soon as all its gradients have arrived, while the backward pass still computes the next ones.
Buckets start strictly in bucket order, whatever the order of the gradients, so all ranks start the same buckets.

During that time a thread (driver.py) calls MPI. Without a thread, `ready` and `finish` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy

from mpitrain.allreduce import costs
from mpitrain.arrays import Array, namespace
from mpitrain.collectives.shares import share_of
from mpitrain.errors import ConfigError, DataError, GradientError, MpitrainError, NonFiniteError, everywhere
from mpitrain.reducer.bucket import Bucket, Parameter, plan_buckets, plan_layout
from mpitrain.reducer.buckets import DeviceBuckets, HostBuckets
from mpitrain.reducer.checks import agree_on_layout, check_gradient, check_scales, check_steps, check_turns
from mpitrain.reducer.driver import make_driver
from mpitrain.reducer.exchange import Exchange, PlainExchange, make_exchange
from mpitrain.reducer.left_out import LeftOut
from mpitrain.reducer.means import Means, Stopwatch, gather_remarks
from mpitrain.reducer.summands import Summands
from mpitrain.reducer.sums import Doing, Sums
from mpitrain.reducer.vote import MISSING, begin_vote, beyond_range, objection
from mpitrain.waiting.agreement import STEP, Agreement, signature
from mpitrain.world.world import StepWatch, World

# The names that the ranks compare and that errors show.
_STEP, _OUTER_STEP = STEP, "outer step after a step of the optimizer"
_SAID_STEP = f"{STEP} with a weight of the program's own"


class GradientReducer:
    """Computes the means of a step: `begin(weight)`, `ready(index, gradient)` for every parameter, `finish(loss)`.

    Attributes:
        layout: where each gradient lies.
        flats: buffers by dtype, in layout order, on the CPU or on this rank's GPU. After `finish` they hold the means.
        gradients: views of the flat buffers, one for each parameter. A gradient that is computed directly into its
            view is not copied.
        sends_gradients: False: the values are the pseudo-gradients of an outer step. A trace then shows no backward
            pass before they are sent.
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
        virtual_ranks: int | None = None,
    ) -> None:
        """Collective: all ranks compare the parameters and the bucket layout.

        Args:
            parameters: in the order of the model. The gradients of the last parameters are expected first.
            exchange: a function of a World that returns the exchange. From then on, use the `comm` of that World for
                nothing else.
            bucket_bytes: exchange about this many bytes at once. Default: the World's `bucket_mib`, or the size that
                follows from its profile.
            threaded: drive the exchange from a thread, which requires MPI_THREAD_MULTIPLE. Default: true if the ranks
                are on several nodes and MPI offers MPI_THREAD_MULTIPLE.
            on_device: gradients are CuPy arrays on this rank's GPU, and so are the buckets.
            virtual_ranks: the number of virtual ranks to divide between the ranks, at least one for each; see
                summands.py. Every rank passes the gradients of its virtual ranks one after the other, with `next_pass`
                between them. `exchange` must return a PlainExchange with exact sums.

        Raises:
            MismatchError: the parameters of the ranks differ. Raised on every rank, names the first difference.
            ConfigError: there are no parameters, two have the same name, or one has a dtype without a mean. Or there
                are virtual ranks, and `on_device`; raised on every rank.
            DeviceError: with `on_device`, some rank has no GPU or too little memory. Raised on every rank.
        """
        self._world = world
        if bucket_bytes is None:
            chosen = int(world.config.bucket_mib * 2**20)
            bucket_bytes = chosen or costs.bucket_bytes(world.profile, world.num_nodes)
        self.layout = plan_layout(parameters)
        self._buckets = plan_buckets(self.layout, bucket_bytes)
        self._lines = agree_on_layout(world, self.layout.parameters, bucket_bytes, on_device=on_device)
        if on_device and virtual_ranks is not None:
            raise everywhere(
                ConfigError(
                    f"virtual_ranks={virtual_ranks}: the gradients of virtual ranks are added up on the CPU, "
                    "but these are on GPUs. Train on the CPU, or leave virtual_ranks out"
                )
            )
        self._signatures = {name: signature(name, self._lines) for name in (_STEP, _SAID_STEP, _OUTER_STEP)}
        # The start of a bucket depends on timing. With its own communicator, a bucket cannot collide with messages that
        # the ranks send in the meantime: a mean() in the backward pass, or another reducer's buckets.
        self._apart = world.apart()
        self._exchange, self._queue = exchange(self._apart), self._apart.queue
        self._slots = {
            dtype: self._exchange.allocate(count, dtype, on_device=on_device, tensors=self.layout.tensors(dtype))
            for dtype, count in self.layout.counts.items()
        }
        self.flats = {dtype: slot.flat for dtype, slot in self._slots.items()}
        self._place: HostBuckets
        if on_device:
            self._place = DeviceBuckets(world, self.layout, self._buckets, self.flats)
        else:
            self._place = HostBuckets(self.layout, self._buckets, self.flats)
        self.gradients = self._place.gradients
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.members}
        self._begun: Agreement | None = None
        self._stopwatch = Stopwatch()
        self._summands: Summands | None = None
        if virtual_ranks is not None:
            assert isinstance(self._exchange, PlainExchange)
            self._summands = Summands(world, self.layout, self._exchange, virtual_ranks)
        self._sums = Sums(
            self._exchange,
            self._slots,
            self._place,
            self.layout,
            self._buckets,
            self._stopwatch,
            world.control,
            self._summands,
        )
        self._is_owed = False  # restored values have not been sent yet, by this rank or another one
        self._left_out = LeftOut(world, self.layout, self._buckets, self._exchange, self._slots)
        self._driver = make_driver(world, self._advance, threaded)
        self._is_closed = False
        self.sends_gradients = True

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets that a step exchanges, in order."""
        return self._buckets

    @property
    def is_begun(self) -> bool:
        """Whether a step has begun. False also after an error with which all ranks have refused it."""
        return self._begun is not None

    @property
    def num_buckets(self) -> int:
        """The number of buckets that a step exchanges."""
        return len(self._buckets)

    def begin(
        self,
        weight: float | Sequence[float],
        loss_scale: float = 1.0,
        *,
        turn: int = 0,
        steps: int = 0,
        is_said: bool = False,
    ) -> None:
        """Begin a step in which the gradients of this rank have the weight of `weight` samples. Does not wait.

        Pass the gradients even if the weight is 0. Their values are then ignored.

        Args:
            weight: the weight of this rank, in samples; with virtual ranks, a sequence with the weight of each of its
                virtual ranks.
            loss_scale: the factor by which the gradients of all ranks are multiplied. The means are divided by it. It
                is a power of two, so the division is exact.
            turn: the number of the batch and, in the bits from EPOCH_FROM_BIT (checks.py), that of the epoch, both from
                0. If it differs between ranks, `ready` or `finish` raises a MismatchError on every rank.
            steps: in the bits from COUNTED_FROM_BIT (checks.py), the number of steps of this rank's optimizer, which is
                compared in the same way. The lower bits may differ; see `Means.steps`.
            is_said: the weight is not a number of samples; the same on all ranks.

        Raises:
            GradientError: the previous step is not finished, or the reducer is closed.
        """
        if self._begun is not None:  # its exchanges may still write into the buffers
            raise GradientError(f"{self._world.name()}: begin() was called again without finish()")
        if self._is_closed:
            raise GradientError(f"{self._world.name()}: begin() after close(); make another GradientReducer")
        if isinstance(weight, Sequence) and self._summands:
            self._weight = self._summands.begin(weight)
        elif not isinstance(weight, Sequence) and not self._summands:
            self._weight = weight
        else:
            raise GradientError(
                f"{self._world.name()}: begin({weight!r}); with virtual ranks, give a sequence with the weight "
                "of each of this rank's virtual ranks; without them, give one number"
            )
        self._loss_scale = loss_scale
        if watch := self._watch:
            watch.begin([(one.name, one.count * one.dtype.itemsize) for one in self.layout.parameters], self._weight)
        self._missing = set(self._bucket_of)
        self._unused: list[int] = []
        self._share: float | None = None
        self._refused: DataError | None = None
        self._stopwatch.begin()
        self._place.begin()
        self._sums.begin()
        doing = _SAID_STEP if is_said else _STEP if self.sends_gradients else _OUTER_STEP
        self._begun = self._world.begin_agreement(
            doing,
            self._lines,
            signed=self._signatures[doing],
            weight=self._weight,
            value=loss_scale,
            code=steps,
            detail=turn,
        )
        if self._driver:
            self._driver.start()

    def ready(self, index: int, gradient: Array | None) -> None:
        """Take in one gradient. Call this on every rank, once for each parameter, in any order.

        Args:
            index: the index of the parameter.
            gradient: a CPU or GPU array with the parameter's shape and dtype. If the buckets are on a GPU, the array
                must be on that GPU. The array is copied, so the caller may overwrite it (on a GPU, by work that is
                queued in its current stream after this call). None: the loss of this rank does not depend on the
                parameter, and zeros are summed; see `Remarks.unused`.

        Raises:
            GradientError: no step has begun; or the gradient has the wrong shape, dtype or device, or was already
                passed.
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
        is_summand = self._summands and not self._summands.is_last
        if self._summands and is_summand:
            self._summands.take_in(index, gradient)
        elif gradient is not self.gradients[index]:
            self._place.take_in(index, gradient)
        self._missing.remove(index)  # after the copy, which may fail: the caller may then pass another array
        if is_summand:
            return
        if watch := self._watch:
            watch.ready(index)
        self._sums.count(self._bucket_of[index])
        if not self._driver and self._start():
            self._queue.look()
            self._sums.collect()

    def next_pass(self, loss: float, note: Any = None) -> None:
        """End the gradients of one of this rank's virtual ranks. Those of the next follow; `finish` ends the last one.

        `loss` and `note` are as for `finish`, over the samples of the virtual rank.

        Raises:
            GradientError: no step has begun, or there is no further virtual rank.
        """
        if self._begun is None or self._summands is None or self._summands.is_last:
            raise GradientError(f"{self._world.name()}: next_pass() after the last virtual rank of this rank")
        self._summands.end(loss, note, self._unused, self._missing)
        self._missing, self._unused = set(self._bucket_of), []

    def progress(self) -> bool:
        """Start the buckets that are complete, and advance those that are under way. True when all have arrived.

        Without a thread, a model that passes no gradient for a long time may call it between `begin` and `finish`.
        `ready` and `finish` do the same, with fewer Python frames.
        """
        return self._advance() is None

    def _advance(self) -> float | None:
        """Do the work of `progress`. Return the seconds that the thread may sleep; None: all buckets have arrived."""
        if not self._start():
            # finish() raises the refusal: all ranks reach it, wherever each learned of the refusal.
            return None if self._refused is not None else 0.0
        nap = self._queue.look()
        return None if self._sums.collect() else nap or 0.0

    def _start(self) -> bool:
        """Start the buckets that are complete. False while this rank's share of the samples is unknown."""
        self._world.control.check()
        if self._share is None:
            assert self._begun is not None
            try:
                if self._refused is not None or not self._begun.test():
                    return False
                check_turns(self._world, self._begun.records["detail"].tolist())
                check_steps(self._world, self._begun.records["code"].tolist())
                check_scales(self._world, self._begun.records["value"].tolist())
                self._weights = self._begun.records["weight"].tolist()
                share, self._total = share_of(self._world, self._weights)
                if self._summands:
                    self._share = self._summands.settle(self._total, self._loss_scale)
                else:
                    self._share = share / self._loss_scale
            except DataError as error:
                self._refused = error
                return False
            except MpitrainError:
                self._begun = None  # on every rank; nothing has been started
                raise
        self._sums.start(self._share)
        return True

    def _knows_share(self) -> bool:
        """True if all weights have arrived, so that this rank's share, or a refusal, is known."""
        return self._share is not None or self._refused is not None

    def _drive(self, is_over: Callable[[], bool]) -> Iterator[float | None]:
        """Steps for Control.wait: drive the exchange until `is_over`."""
        while True:
            nap = self._queue.look() if self._start() else None
            self._sums.collect()
            if is_over():
                return
            yield nap

    def finish(
        self,
        loss: float = 0.0,
        *,
        may_skip: bool = False,
        note: Any = None,
        when_agreed: Callable[[], None] | None = None,
    ) -> Means:
        """Wait until every bucket has arrived. Afterwards `gradients` and `flats` hold the means.

        Args:
            loss: this rank's mean loss over its samples.
            may_skip: the caller can skip this step, so NaN or infinity is not an error; see `Means.is_finite`. Give
                the same value on all ranks.
            note: a value that all ranks get, or None. It must be picklable, and different values must have different
                reprs. The note of a rank with weight 0 is ignored. If the notes differ, they cost one more message.
            when_agreed: is called when all ranks have begun the step, while buckets are under way. It may begin another
                exchange: a refused step cannot leave a single rank in that exchange.

        Raises:
            MissingGradientError: a rank did not pass a gradient. The error names rank and parameter. Raised on every
                rank.
            NonFiniteError: a gradient or the loss of a rank holds NaN or infinity, and the step may not be skipped. The
                error names rank and parameter. Raised on every rank.
            MismatchError: the ranks differ in `loss_scale` or `may_skip`. Raised on every rank.
        """
        self._stopwatch.finish()
        if self._driver:
            self._driver.stop()
        if self._begun is None:
            raise GradientError(f"{self._world.name()}: finish() without begin()")
        control = self._world.control
        if control.spans and self.sends_gradients:
            control.spans.add("compute", "forward and backward", *self._stopwatch.computed, step=self._sums.step)
        # First start all buckets that are complete: a waiting bucket must be checked before the vote.
        control.wait(self._drive(self._knows_share), Doing("begin a step", self._sums))
        if self._refused is not None:
            self._begun = None
            raise self._refused
        if when_agreed is not None:
            when_agreed()
        non_finite = self._look()
        if self._summands:
            self._summands.end(loss, note, self._unused, self._missing)
            loss, note = self._summands.mean_loss, self._summands.note
            self._unused, self._missing = self._summands.unused or [], self._summands.missing
            non_finite = max(non_finite, self._summands.non_finite)
        told = tuple(sorted(self._unused)), note
        vote = begin_vote(self._world, self._missing, non_finite, loss, self._weight, told, may_skip=may_skip)
        control.wait(self._drive(vote.test), Doing("end a step", self._sums))
        codes = vote.records["code"]
        # If a gradient is missing, the ranks have started different numbers of buckets. Now all ranks start all of
        # them, so that no exchange remains under way, and the caller can begin another step.
        self._sums.start_all()
        control.wait(self._drive(self._sums.collect), Doing("exchange gradients", self._sums))
        self._sums.see()
        found_by_all: GradientError | None = None
        try:
            if codes.any():
                # The step is not made, so the residuals of its gradients are meaningless.
                self._exchange.reset()
                found_by_all = objection(self._world, vote, self.layout, self._place)
            elif self._exchange.may_overflow:
                found_by_all = self._look_at_means()
        finally:
            steps, self._begun = self._begun.records["code"].tolist(), None
        cause = found_by_all if isinstance(found_by_all, NonFiniteError) else None
        if found_by_all and not (may_skip and cause and MISSING not in codes):
            raise found_by_all
        if not cause:
            self._sums.carried, self._is_owed = {}, False
            if self._world.observer:
                self._world.observer.saw_means(self.layout.named(self.flats), self._weight)
        loss = sum(vote.records["value"].tolist()) / self._total if not self._summands else self._summands.loss()
        # A rank with a problem has voted with the problem's detail instead of its mark.
        marks = None if codes.any() else vote.records["detail"].tolist()
        remarks = gather_remarks(self._world, told, marks, self._weights)
        heard = int(max(vote.records["weight"].tolist()))
        if watch := self._watch:
            watch.end()
        return Means(loss, self._total, self._stopwatch.end(), cause, remarks, heard, steps)

    def state(self) -> dict[str, Any]:
        """Return the state that this rank alone keeps from step to step, for a checkpoint.

        It is {} if the exchange keeps nothing, and no restored values are still to be sent. It is {} either on every
        rank or on none, provided that `restore` got {} on every rank or on none.

        Returns:
            `residual`: the error-feedback residual, as float32 host arrays by parameter name. `carried`: a
            restored value that has not been sent yet, if any. `place`: a text that is equal if the ranks are placed
            alike and have equal buckets.
        """
        return self._left_out.state(self._sums.carried, is_owed=self._is_owed)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Not collective, but the `carried` values of the ranks add up.

        Args:
            state: the state of this rank in the same place. Or only `carried`, by parameter name: the values that are
                missing from the means so far, as a sum over the ranks that get some. They are added to the means of the
                next step. Like the result of `state`, it must be {} on every rank or on none: a rank without such
                values gets an empty `carried`, which changes nothing else.

        Raises:
            CheckpointError: the state belongs to other parameters. Nothing has changed.
        """
        self._sums.carried, self._is_owed = self._left_out.restore(state), bool(state)

    def factors(self) -> dict[str, numpy.ndarray]:
        """Return the factors with which compression continues, by parameter name; equal on all ranks; {}: none.

        `restore` does not need them. Without them, the next means are less accurate.
        """
        return self._left_out.factors()

    def restore_factors(self, factors: Mapping[str, numpy.ndarray]) -> None:
        """Continue from `factors`, which must be equal on all ranks. Factors that do not fit are ignored, with a
        warning.

        Not collective, between steps.
        """
        self._left_out.restore_factors(factors)

    def leave(self) -> tuple[int, dict[str, Any]]:
        """Close it, and return the number of its steps and its `state`. Collective."""
        step, state = self._sums.step, self.state()
        self.close()
        return step, state

    def follow(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue from the result of another reducer's `leave`, with the same parameters. Every rank calls it before
        the first step."""
        self._sums.step = step
        self.restore(state)

    def close(self) -> None:
        """End the thread and free the communicator. The memory is freed with its last view. Collective, between steps.

        A second call does nothing. In a broken World MPI may still write into the memory, so only the thread ends.

        Raises:
            GradientError: a step has begun and is not finished.
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
            del self._sums, self._summands, self._place, self._exchange, self._left_out

    @property
    def _watch(self) -> StepWatch | None:
        """The object that measures the steps, if a step exchanges gradients."""
        return self._world.watch if self.sends_gradients else None

    def _unexpected(self, index: int) -> str:
        if self._begun is None:
            return "a gradient was handed in before begin()"
        if not 0 <= index < len(self.gradients):
            return f"there is no parameter {index}; there are {len(self.gradients)}"
        return f"the gradient of {self.layout.parameters[index].name} was handed in twice in one step"

    def _look(self) -> int:
        """Return the index of a non-finite value, or -1. The exchange continues while a GPU computes the answer."""
        self._place.fetch()
        if not self._place.is_fetched:
            self._world.control.wait(self._drive(lambda: self._place.is_fetched), "compute gradients")
        return self._place.non_finite()

    def _look_at_means(self) -> NonFiniteError | None:
        """Return the error if a mean is not finite. The means are bitwise identical on every rank, so no vote is
        needed."""
        self._place.begin()
        with self._place.behind():
            for number in range(len(self._buckets)):
                self._place.check(number)
        non_finite = self._look()
        if non_finite < 0:
            return None
        self._exchange.reset()
        return beyond_range(self.layout.parameters[self._place.parameter_of(non_finite)].name)
