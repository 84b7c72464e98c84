"""GradientReducer: gradients in, in any order; their sample-weighted mean over ranks out, bucket by bucket.

A bucket is exchanged as soon as all its gradients are in, while the backward pass still computes the next ones.
Buckets start strictly in bucket order, whatever the order of the gradients, so all ranks start the same ones.

No MPI library moves a large message while nobody calls into it. Between nodes a thread does so (driver.py); measured at
1 Gbit/s, it hides several times as much of the exchange behind the backward pass as calls between the layers do. Within
one node the ranks share the cores that they compute with, a thread only takes some of them away, and the calls are made
inside `ready` and `finish`. docs/log.md has the numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from mpitrain.agreement import Agreement, signature
from mpitrain.allreduce import costs
from mpitrain.allreduce.algorithm import FLOATS, Handle
from mpitrain.arrays import Array
from mpitrain.control import until
from mpitrain.cuda.staging import copy_to_host
from mpitrain.errors import ConfigError, DataError, GradientError, MissingGradientError, MpitrainError, NonFiniteError
from mpitrain.exchange.bucket import Parameter, plan_buckets, plan_layout
from mpitrain.exchange.driver import Driver
from mpitrain.exchange.exchange import Exchange, make_exchange, share_of
from mpitrain.exchange.overlap import Overlap, Stopwatch
from mpitrain.world import World

# What a rank says of its gradients at the end of a step.
_GOOD, _MISSING, _NON_FINITE = 0, 1, 2


@dataclass(frozen=True)
class Means:
    """The result of a step; the same bits on every rank, but for `overlap`.

    Attributes:
        loss: the weighted mean of what the ranks gave to `finish`.
        weight: the sum of the ranks' weights: the global batch, in samples.
        overlap: this rank's times.
    """

    loss: float
    weight: float
    overlap: Overlap


class GradientReducer:
    """One step is: `begin(weight)`, `ready(index, gradient)` for every parameter, `finish(loss)`.

    Attributes:
        layout: where each gradient lies.
        flats: host buffers by dtype, in layout order. After `finish` they hold the means.
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
    ) -> None:
        """Collective: all ranks compare the parameters and the bucket layout.

        Args:
            parameters: in the model's order; gradients of the last ones are expected first.
            exchange: makes the exchange for a World, whose `comm` is then for nothing else.
            bucket_bytes: exchange about this many bytes at once; default: the world's `bucket_mib`, or by its
                profile.
            threaded: move the exchange on from a thread. Default: where the ranks are on several nodes and MPI offers
                MPI_THREAD_MULTIPLE, which it needs.

        Raises:
            MismatchError: the ranks' parameters differ; on every rank, naming the first difference.
            ConfigError: no parameters, two of one name, or one whose dtype has no mean.
        """
        self._world = world
        if bucket_bytes is None:
            chosen = int(world.config.bucket_mib * 2**20)
            bucket_bytes = chosen or costs.bucket_bytes(world.profile, world.num_nodes)
        self.layout = plan_layout(parameters)
        self._buckets = plan_buckets(self.layout, bucket_bytes)
        lines = [f"parameter {parameter}" for parameter in self.layout.parameters]
        lines.append(f"buckets of {bucket_bytes} bytes")
        world.agree("compare the gradients' layout", lines)
        _check_parameters(self.layout.parameters)
        self._lines, self._signature = lines, signature("step", lines)
        # When a bucket starts depends on the moment. On a communicator of its own it cannot meet what the ranks send
        # in the meantime: a mean() in the backward pass, or another reducer's buckets.
        self._exchange = exchange(world.apart())

        self.flats = {dtype: self._exchange.allocate(count, dtype) for dtype, count in self.layout.counts.items()}
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

    def begin(self, weight: float) -> None:
        """Begin a step in which this rank's gradients count `weight` samples. Does not wait.

        With weight 0 the gradients must be handed in too, but their values do not count.

        Raises:
            GradientError: the step before has not been finished.
        """
        if self._begun is not None:  # its exchanges may still write into the buffers
            raise GradientError(f"{self._world.name()}: begin() came again without finish()")
        self._weight = weight
        self._missing = set(self._bucket_of)
        self._waiting = [len(bucket.members) for bucket in self._buckets]
        self._non_finite = -1
        self._share: float | None = None
        self._handles: list[Handle] = []
        self._done = 0
        self._stopwatch.begin()
        self._begun = self._world.begin_agreement("step", self._lines, signed=self._signature, weight=weight)
        if self._driver:
            self._driver.start()

    def ready(self, index: int, gradient: Array) -> None:
        """Take in one gradient; called on every rank once a parameter, in any order.

        Args:
            index: of the parameter.
            gradient: host or device array of its shape and dtype; copied, so it may be overwritten afterwards.

        Raises:
            GradientError: no step was begun, the shape or dtype is another, or it was handed in before.
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
            copy_to_host(gradient, view)
        self._missing.remove(index)
        self._waiting[self._bucket_of[index]] -= 1  # last: at 0 the thread may take the bucket
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
                self._share, self._total = share_of(self._world, self._begun.records["weight"].tolist())
            except DataError:
                return True  # finish() raises it: there all ranks meet, wherever each has heard of it
            except MpitrainError:
                self._begun = None  # on every rank, and nothing has been started
                raise
        while len(self._handles) < len(self._buckets) and self._waiting[len(self._handles)] == 0:
            number = len(self._handles)
            self._stopwatch.busy()
            self._check_finite(number)
            self._handles.append(self._exchange.mean(self._flat_of[number], self._share))
        while self._done < len(self._handles) and self._handles[self._done].test():
            self._done += 1
        if self._done == len(self._handles):
            self._stopwatch.idle()
        return self._done == len(self._buckets)

    def finish(self, loss: float = 0.0) -> Means:
        """Wait until every bucket has arrived; afterwards `gradients` and `flats` hold the means.

        Args:
            loss: this rank's mean loss over its samples.

        Raises:
            MissingGradientError: some rank did not hand in a gradient; names rank and parameter. On every rank.
            NonFiniteError: some rank handed in NaN or infinity; names rank and parameter. On every rank.
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
        code, detail = _GOOD, 0
        if self._missing:
            code, detail = _MISSING, min(self._missing)
        elif self._non_finite >= 0:
            code, detail = _NON_FINITE, self._non_finite
        value = self._weight * loss if self._weight else 0.0
        vote = self._world.begin_agreement("end of step", value=value, code=code, detail=detail)

        def voted() -> bool:
            self.progress()
            return vote.test()

        control.wait(until(voted, self._nap), "end a step")
        error = self._problem(vote.records)
        if error is not None:
            # Ranks have started different numbers of buckets. All start all, so that nothing is on its way any more,
            # and the caller may begin another step.
            while len(self._handles) < len(self._buckets):
                self._handles.append(self._exchange.mean(self._flat_of[len(self._handles)], 0.0))
        control.wait(until(self.progress, self._nap), "exchange gradients")
        self._begun = None
        if error is not None:
            raise error
        loss = sum(vote.records["value"].tolist()) / self._total
        return Means(loss, self._total, self._stopwatch.end())

    def _nap(self) -> float:
        """How long the bucket on its way allows to sleep."""
        return self._handles[self._done].nap if self._done < len(self._handles) else 0.0

    def _unexpected(self, index: int) -> str:
        if self._begun is None:
            return "a gradient came in before begin()"
        if not 0 <= index < len(self.gradients):
            return f"there is no parameter {index}; there are {len(self.gradients)}"
        return f"the gradient of {self.layout.parameters[index].name} came in twice in one step"

    def _check_finite(self, number: int) -> None:
        if self._non_finite >= 0 or self._weight == 0 or _all_finite(self._flat_of[number]):
            return
        self._non_finite = next(
            index for index in self._buckets[number].members if not numpy.isfinite(self.gradients[index]).all()
        )

    def _problem(self, votes: numpy.ndarray) -> GradientError | None:
        """What every rank raises: about the first rank with a bad gradient."""
        codes = votes["code"].tolist()
        if not any(codes):
            return None
        rank = next(rank for rank, code in enumerate(codes) if code)
        who = self._world.name(rank)
        parameter = self.layout.parameters[votes["detail"][rank]]
        error: GradientError
        if votes["code"][rank] == _MISSING:
            error = MissingGradientError(
                f"{who} ended its backward pass without the gradient of {parameter.name}; "
                "hand in zeros for a parameter that a batch does not use"
            )
        else:
            error = NonFiniteError(
                f"{who}: the gradient of {parameter.name} holds NaN or infinity; nothing was changed by this step. "
                "Try a smaller learning rate, gradient clipping, or look at that rank's data"
            )
        error.known_everywhere = True
        return error


def _check_parameters(parameters: Sequence[Parameter]) -> None:
    """All ranks have compared their parameters, so they all raise or none."""
    problem = "" if parameters else "the model has no parameters"
    names = Counter(parameter.name for parameter in parameters)
    for parameter in parameters:
        if names[parameter.name] > 1:
            problem = f"two parameters are called {parameter.name}; names must be unique"
        elif parameter.dtype not in FLOATS:
            problem = (
                f"parameter {parameter.name} is {parameter.dtype}; gradients are averaged in "
                f"{', '.join(str(dtype) for dtype in FLOATS)}"
            )
    if problem:
        error = ConfigError(problem)
        error.known_everywhere = True
        raise error


def _threads_by_default(world: World) -> bool:
    return world.num_nodes > 1 and _allows_threads()


def _allows_threads() -> bool:
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def _all_finite(flat: numpy.ndarray) -> bool:
    if flat.dtype.char in "fd":
        # One pass of BLAS instead of two of NumPy. The sum may overflow, so only a finite one is trusted.
        with numpy.errstate(over="ignore", invalid="ignore"):
            if numpy.isfinite(numpy.dot(flat, flat)):
                return True
    return bool(numpy.isfinite(flat).all())
