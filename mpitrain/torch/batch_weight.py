"""The weight of this rank's part of a batch in means: its number of samples, or the program's choice, such as tokens.

Also converts what a loop has computed from a batch, such as losses, to numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, TypeAlias
from weakref import ref

import numpy
import torch

from mpitrain.arrays import check_class
from mpitrain.collectives.shares import NOTHING, exact_total, share_of
from mpitrain.errors import ConfigError, DataError, GradientError
from mpitrain.torch.drawn import Share
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.world.world import World

# A number, or a function of this rank's part of the batch and the model's newest output.
Weight: TypeAlias = float | Callable[[Any, Any], Any]

_clock = count(1)
_newest: list[ref[BatchWeight]] = []  # one: of the batch that was taken last
_told: list[tuple[ref[BatchWeight], int]] = []  # one: the newest that `tell` was given


@uncompiled
class BatchWeight:
    """The weight of the newest batch of some data on this rank.

    Attributes:
        default: the weight of a batch for which none is given; None: its number of samples.
        is_said: the weight is not the number of samples.
    """

    def __init__(self, world: World, *, is_virtual: bool) -> None:
        """With virtual ranks, a batch is weighted by its samples."""
        self._world, self.is_virtual = world, is_virtual
        self.default: Weight | None = None
        self._share = Share(1, 1)
        self._batch: Any = None
        self._taken = 0
        self._is_in_use = False
        self._said: Callable[[], Any] | None = None
        self._value: float | None = None
        self._part: float | None = None

    def take(self, batch: Any, share: Share) -> None:
        """Start with a batch that has just been taken."""
        self._batch, self._share, self._taken, self._is_in_use = batch, share, next(_clock), True
        self._said = self._value = self._part = None
        if not _newest or _newest[0]() is not self:
            _newest[:] = [ref(self)]

    def end(self) -> None:
        """Note that the last batch has been used. Its weight stays, for a mean after the loop."""
        self._is_in_use = False

    @property
    def is_said(self) -> bool:
        return self._said is not None or self.default is not None

    def say(self, number: Any) -> None:
        """Set the weight of the newest batch on this rank: a number, or a tensor of one element."""
        self._set(lambda: number)
        self.now()

    def say_later(self, function: Callable[[Any, Any], Any], output: Any) -> None:
        """Set the weight to a function of the batch and this output, which is called when the weight is needed."""
        self._set(lambda: function(self._batch, output))

    def _set(self, said: Callable[[], Any]) -> None:
        self._said, self._value, self._part = said, None, None

    def now(self) -> float:
        """Return the weight of this rank; 0 without samples, whatever weight was given. See also NOTHING.

        Raises:
            DataError: the weight is not one number.
        """
        if self._value is None:
            self._value = self.of(self._number()) if self.is_said and self._share.count else float(self._share.count)
            if self._said is not None:
                self._said = _done  # no longer keep the output
        return self._value

    def of(self, number: Any) -> float:
        """Return a given weight of this rank as a float, as `now` does. Raises DataError if it is not one number."""
        return (weight_of(self._world, number) or NOTHING * self._share.count) if self._share.count else 0.0

    @property
    def is_nothing(self) -> bool:
        """Whether nothing in this rank's part counts."""
        return self.now() <= NOTHING * self._share.count

    def part(self) -> float:
        """Return this rank's share of the mean over all ranks, once for each weight. Collective if a weight was given.

        Raises:
            DataError: see share_of. Raised on every rank.
        """
        if not self.is_said:
            return self._share.count / self._share.total
        if self._part is None:
            self._part, _ = share_of(self._world, self._world.allgather(self.now()))
        return self._part

    def check_not_said_elsewhere(self) -> None:
        """Raise GradientError if `weight` was called for a batch of other data instead of this one."""
        if self._said is None and _told and _told[0][1] > self._taken:
            other = _told[0][0]()
            if other is not None and other is not self and other._is_in_use:
                raise GradientError(
                    f"{self._world.name()}: mpitrain.torch.weight(n) was for the batch that was taken last, which is "
                    "not of the data of this model; call weight(n, data) with the data that prepare() returned"
                )

    def _number(self) -> Any:
        value = self._said() if self._said is not None else self.default
        return value(self._batch, None) if callable(value) else value


def _done() -> Any:
    raise AssertionError("a weight is computed once")


def weight_of(world: World, value: Any) -> float:
    """Return a weight as a number. Raises DataError if it is not one number."""
    rule = "a weight is one number, such as the tokens that this rank's loss is a mean over"
    return _one_number(world, value, rule)


def _one_number(world: World, value: Any, rule: str) -> float:
    try:
        numbers = numbers_of(value)
    except (TypeError, ValueError):
        numbers = None
    if numbers is None or numbers.size != 1 or isinstance(value, str | bytes):
        given = f"the shape {numbers.shape}" if numbers is not None else f"a {type(value).__name__}"
        raise DataError(f"{world.name()}: {rule}; it was given {given}")
    return float(numbers.reshape(()))


def newest_weight() -> BatchWeight | None:
    """Return the weight of the batch that was taken last, if it is in use."""
    weight = _newest[0]() if _newest else None
    return weight if weight is not None and weight._is_in_use else None


def tell(world: World, weight: BatchWeight | None, number: Any) -> None:
    """Set the weight of a batch; by default, of the one that was taken last.

    Raises:
        DataError: no batch is in use, or the weight is not one number.
        ConfigError: the data has virtual ranks.
    """
    weight = weight if weight is not None else newest_weight()
    if weight is None or not weight._is_in_use:
        raise DataError(
            f"{world.name()}: weight(n) came while no batch of prepared data is in use; call it in the loop over the "
            "data that prepare() or shard() returned, before backward()"
        )
    if weight.is_virtual:
        raise ConfigError(
            f"{world.name()}: weight(n) with virtual ranks, which are weighted by samples. Leave virtual_ranks out, or "
            "take the mean over samples"
        )
    weight.say(number)
    _told[:] = [(ref(weight), next(_clock))]


class MeanNumber(float):
    """A float that has `item`, as a tensor of one element does."""

    def item(self) -> float:
        """Return the plain float."""
        return float(self)


torch.serialization.add_safe_globals([MeanNumber])  # a checkpoint may hold it


def numbers_of(values: Any) -> numpy.ndarray:
    """Return a number, a tensor or an array as a float64 array on the CPU. Raises TreeError if it has more than
    values."""
    check_class(values, "the value")
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return numpy.asarray(values, numpy.float64)


def number_of(world: World, value: Any) -> float:
    """Return a mean over samples. Raises DataError if it is not one number."""
    return _one_number(world, value, "mean(value) takes one number, the mean over this rank's samples")


def mean_of_virtual_ranks(world: World, share: Share, values: Any) -> float:
    """Return the mean over all samples of a batch, from the means of the virtual ranks. Collective.

    Args:
        values: a list; its last entries are the means of this rank's virtual ranks with samples.

    Raises:
        DataError: `values` is not a list, or is too short.
    """
    counts = [count for count in share.virtual if count]
    if not isinstance(values, list) or len(values) < len(counts):
        given = f"a list of {len(values)}" if isinstance(values, list) else f"a {type(values).__name__}"
        raise DataError(
            f"{world.name()}: with virtual ranks, mean(values) takes a list with the mean over each virtual batch; it "
            f"was given {given}, and this rank has {len(counts)} virtual batches. Append each loss to it"
        )
    means = [number_of(world, value) for value in values[len(values) - len(counts) :]]
    return exact_total(world, [count * mean for count, mean in zip(counts, means, strict=True)]) / share.total
