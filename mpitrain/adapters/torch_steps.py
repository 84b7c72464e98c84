"""The optimizer steps of a model on this rank: replicas stay equal only if all ranks make the same steps.

The number of steps and a checksum of what they used are a number in the agreement with which the next exchange begins.
So the comparison sends nothing while ranks agree. The last steps are compared when the ranks have finished. For each
step, the ranks compare

- the learning rates;
- how often each gradient was changed in place since its exchange, or that it was replaced or removed;
- a sample of the gradients as the step finds them, and of the parameters. It is rounded to bfloat16, because ranks with
  different processors may clip by norms that differ in the last bit.

At the end of each loop over the data, they compare all parameters, whatever has changed them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from mpitrain.adapters.torch_arrays import array_of
from mpitrain.errors import MismatchError, everywhere
from mpitrain.reducer.checks import COUNTED_FROM_BIT, check_steps
from mpitrain.reducer.unexchanged import BUFFERS_IN_FINAL
from mpitrain.world.world import World

# How many gradients and parameters are compared in each step, in turn, and at most how many numbers of them.
_GRADIENTS, _PARAMETERS, _NUMBERS = 8, 4, 64
_ABSENT, _REPLACED = -1, -2
# Neighbouring bfloat16 numbers count as equal. A sixteenth of that distance at a tensor's largest number is allowed.
_NEAR = 2**-6

_REMEDY = (
    "so the replicas differ. Between backward() and the end of step(), all ranks do the same, with values that are "
    "equal on all ranks, such as world.mean(loss)"
)


class UsedNumbers(NamedTuple):
    """What one step has used."""

    rates: tuple[float, ...]
    changes: tuple[int, ...]  # of each gradient
    sampled: tuple[tuple[str, int], ...]  # where the numbers come from, and how many
    numbers: numpy.ndarray  # float32

    def checksum(self, before: int) -> int:
        """The checksum of this after others."""
        return zlib.crc32(self.numbers.tobytes(), zlib.crc32(repr((self.rates, self.changes)).encode(), before))

    def difference(self, other: UsedNumbers, names: Sequence[str]) -> tuple[str, str, str] | None:
        """What differs, and its value here and there; None: nothing differs by more than rounding."""
        if self.rates != other.rates:
            return "learning rates", str(self.rates), str(other.rates)
        for name, changes, others in zip(names, self.changes, other.changes, strict=True):
            if changes != others:
                return f"the gradient of {name}", _changed(changes), _changed(others)
        begin = 0
        for name, count in self.sampled:
            here, there = (one.numbers[begin : begin + count] for one in (self, other))
            if numbers := _first_far(here, there, _NEAR):
                return f"a number of {name}", *numbers
            begin += count
        return None


class StepsMade:
    """The steps of the optimizers of one model on one rank.

    Attributes:
        count: their number.
    """

    def __init__(
        self,
        world: World,
        named: dict[str, Any],
        allgather: Callable[[Any], Sequence[Any]] | None = None,
        *,
        is_for_all: bool = True,
        parameters: bool = True,
    ) -> None:
        """Every rank of `world` makes it, for the trained parameters.

        Args:
            allgather: gathers the ranks' objects on all ranks; default: `world.allgather`.
            is_for_all: the ranks are those of the job, and compare their last steps when all have finished.
            parameters: compare parameters, not only gradients.
        """
        self._world, self._allgather = world, allgather or world.allgather
        self._names: list[str] = []
        self._parameters: list[Any] = []
        self._places: dict[int, int] = {}
        self._versions: list[int] = []  # of the gradients after the exchange
        for name, parameter in named.items():
            self.watch(name, parameter)
        self._is_known, self._compares_rates = True, True
        self._num_parameters = _PARAMETERS if parameters else 0
        self._used: list[UsedNumbers] = []  # since the exchange
        self._end: tuple[float, ...] = ()
        self.count = 0
        self._final = world.control.notes.final if world.size > 1 and is_for_all else {}
        self._number = (
            max([0, *(number for number in self._final if number != BUFFERS_IN_FINAL)]) + 1
        )  # groups: below 0
        self._final[self._number] = (0.0,)

    def watch(self, name: str, parameter: Any) -> None:
        """From now on, a step uses this parameter too. Every rank calls this."""
        self._places[id(parameter)] = len(self._names)
        self._names.append(name)
        self._parameters.append(parameter)
        self._versions.append(_REPLACED)

    def forget(self, *, rates: bool = False) -> None:
        """Do not compare the steps until the next exchange, because ranks may have made different steps.

        `rates`: stop comparing learning rates. All ranks give the same value.
        """
        self._is_known = False
        self._compares_rates &= not rates
        self._used.clear()
        self.drop()

    @property
    def code(self) -> int:
        """The number for the agreement of an exchange that begins. -1: steps are not to be compared."""
        if not self._is_known:
            return -1
        checksum = 0
        for used in self._used:
            checksum = used.checksum(checksum)
        return self.count << COUNTED_FROM_BIT | checksum

    def add(self, optimizer: torch.optim.Optimizer | None, views: Sequence[torch.Tensor] = ()) -> bool:
        """Count a step that is about to be made, unless it has no gradient. Return whether it was counted.

        With an `optimizer`, whose gradients are in `views` unless they were replaced, note what it will use.
        """
        if optimizer is not None:
            used = self._use(optimizer, views)
            if used is None:
                return False
            self._used.append(used)
            finite = used.numbers[numpy.isfinite(used.numbers)].astype("f8")
            self._end = float(numpy.sqrt(finite @ finite)), float(finite.sum()), *used.rates
        self.count += 1
        if self._is_known:
            self._final[self._number] = self.count, *self._end
        return True

    def drop(self) -> None:
        """Do not compare when all have finished: an error has already reported that the ranks differ."""
        self._final[self._number] = ()

    def exchanged(self, codes: Sequence[int], views: Sequence[torch.Tensor], *, with_all: bool = True) -> None:
        """Note that gradients were exchanged, and are in `views`. If the ranks' codes differ, compare (collective).

        Args:
            with_all: all ranks have taken part; False: compare only their numbers of steps.

        Raises:
            MismatchError: see `compare`; or the ranks have made different numbers of steps.
        """
        try:
            check_steps(self._world, codes)
        except MismatchError:
            self.forget()
            raise
        known = {code for code in codes if code >= 0}
        try:
            if len(known) > 1 and with_all:
                self.compare()
        finally:  # a program may catch the error and continue: later steps are compared on their own
            self._used.clear()
            self.count, self._is_known = max(known, default=0) >> COUNTED_FROM_BIT, True
            self._versions = [view._version for view in views]

    def compare(self) -> None:
        """Compare what the steps since the last exchange have used. Collective.

        Raises:
            MismatchError: it differs by more than rounding. Raised on every rank.
        """
        used, self._used = self._used, []
        of_all = self._allgather(used if self._is_known else None)
        first = next((rank for rank, steps in enumerate(of_all) if steps is not None), 0)
        for rank, steps in enumerate(of_all):
            for here, there in zip(steps or (), of_all[first] if steps else (), strict=True):
                if difference := here.difference(there, self._names):
                    self._refuse(f"step {self.count}", rank, first, difference)

    def compare_parameters(self) -> None:
        """Compare all parameters, whatever has changed them. Collective. Those whose bits differ are sent to all ranks.

        Raises:
            MismatchError: as `compare`.
        """
        arrays = [numpy.ascontiguousarray(array_of(parameter)) for parameter in self._parameters]
        checksums = [zlib.crc32(array.reshape(-1).view(numpy.uint8).data) for array in arrays]
        records = self._world.agree("end a loop over the prepared data", detail=zlib.crc32(repr(checksums).encode()))
        if (records["detail"] == records["detail"][0]).all():
            return
        near = max(2**-10, *(4 * torch.finfo(parameter.dtype).eps for parameter in self._parameters))
        difference: tuple[str, str, str] | None = None
        for name, array, of_ranks in zip(
            self._names, arrays, zip(*self._world.allgather(checksums), strict=True), strict=True
        ):
            if len(set(of_ranks)) > 1:
                here, there = array.reshape(-1).astype("f8"), self._world.broadcast(array).reshape(-1).astype("f8")
                numbers = _first_far(here, there, near)
                if numbers and not difference:
                    difference = f"a number of {name}", *numbers
        for rank, found in enumerate(self._world.allgather(difference)):
            if found:
                self._refuse(f"after {self.count} steps", rank, 0, found)

    def _refuse(self, when: str, rank: int, other: int, difference: tuple[str, str, str]) -> None:
        subject, own, others = difference
        self.drop()
        raise everywhere(
            MismatchError(
                f"{when} of the optimizer: {subject}: {self._world.name(rank)}: {own}; {self._world.name(other)}: "
                f"{others}; {_REMEDY}"
            )
        )

    def _use(self, optimizer: torch.optim.Optimizer, views: Sequence[torch.Tensor]) -> UsedNumbers | None:
        changes = [0] * len(self._names)
        present: list[int] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                place = self._places.get(id(parameter))
                if place is None:
                    continue
                gradient = parameter.grad
                if gradient is None:
                    changes[place] = _ABSENT
                    continue
                present.append(place)
                is_own = not views or gradient is not views[place]
                changes[place] = _REPLACED if is_own else gradient._version - self._versions[place]
        if not present:
            return None
        near = [at for at in present if _can_be_sampled(self._parameters[at].grad)]
        chosen = [
            (f"the gradient of {self._names[at]}", self._parameters[at].grad) for at in self._next(near, _GRADIENTS)
        ]
        chosen += [(self._names[at], self._parameters[at]) for at in self._next(near, self._num_parameters)]
        samples = [_sample(tensor, self.count) for _, tensor in chosen]
        sampled = tuple((name, len(sample)) for (name, _), sample in zip(chosen, samples, strict=True))
        numbers = torch.cat([torch.empty(0), *samples]).bfloat16().float().numpy()
        groups = optimizer.param_groups if self._compares_rates else ()
        rates = tuple(float(group["lr"]) for group in groups if "lr" in group)
        return UsedNumbers(rates, tuple(changes), sampled, numbers)

    def _next(self, places: Sequence[int], count: int) -> list[int]:
        begin = self.count * count % max(1, len(places))
        return [places[(begin + offset) % len(places)] for offset in range(min(count, len(places)))]


def _can_be_sampled(gradient: Any) -> bool:
    """A gradient on a GPU would have to be copied to the CPU, and a sparse one could have any size."""
    return bool(gradient.layout == torch.strided and gradient.is_cpu and gradient.is_floating_point())


def _sample(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """At most _NUMBERS numbers of a tensor, different ones at each turn."""
    tensor = tensor.detach()
    flat = (tensor if tensor.layout == torch.strided else tensor.to_dense()).reshape(-1)
    stride = -(-len(flat) // _NUMBERS) or 1
    return flat[turn % stride :: stride]


def _first_far(here: numpy.ndarray, there: numpy.ndarray, near: float) -> tuple[str, str] | None:
    """Return the first two numbers that differ by more than rounding; None: there are none."""
    size = numpy.abs(here[numpy.isfinite(here)]).max(initial=0)
    far = ~numpy.isclose(here, there, rtol=near, atol=near / 16 * size, equal_nan=True)
    at = int(far.argmax()) if far.any() else None
    return None if at is None else (f"{here[at]:g}", f"{there[at]:g}")


def _changed(changes: int) -> str:
    if changes == _ABSENT:
        return "there is none"
    if changes == _REPLACED:
        return "it is not from a backward pass"
    return f"changed {changes} times after the backward pass" if changes else "unchanged since the backward pass"
