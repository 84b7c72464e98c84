"""What a codec has left out of the gradients in DDP's buckets, by parameter, because DDP may change its buckets.

DDP begins with one bucket, and makes the buckets of all later steps before its second step. A run that resumes begins
with one bucket, too. There it takes apart the one, and exchanges the buckets that the saved run had: a codec rounds
whole blocks, and the owner of an element follows from its place, so other buckets would give other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch

from mpitrain.allreduce.algorithm import Progress
from mpitrain.allreduce.low_rank import Factors
from mpitrain.errors import CheckpointError

# The sum of a bucket, with its residual and its parameters.
OnBucket = Callable[[numpy.ndarray, numpy.ndarray, Sequence[torch.Tensor]], Progress]


class _Kept:
    """The residual of one bucket, in the order of its parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor], values: numpy.ndarray) -> None:
        self.parameters = list(parameters)
        self.values = values

    def ids(self) -> list[int]:
        return [id(parameter) for parameter in self.parameters]

    def parts(self) -> Iterator[tuple[int, numpy.ndarray]]:
        """The part of each parameter, by its id."""
        begin = 0
        for parameter in self.parameters:
            yield id(parameter), self.values[begin : begin + parameter.numel()]
            begin += parameter.numel()


class BucketResiduals:
    """The residuals of one hook on one rank.

    Attributes:
        factors: by the parameter's id; see Slot.factors.
    """

    def __init__(self) -> None:
        self.factors: Factors = {}
        self._buckets: list[_Kept] = []
        self._parts: dict[int, numpy.ndarray] = {}  # views, by the parameter's id

    def add_to(self, parameters: Sequence[torch.Tensor], flat: numpy.ndarray, steps: OnBucket) -> Progress:
        """The sum of a bucket with its residual by `steps`, or of the buckets that the saved run had made of it."""
        buckets = self._of(parameters)
        if len(buckets) == 1 and buckets[0].ids() == [id(parameter) for parameter in parameters]:
            yield from steps(flat, buckets[0].values, parameters)
            return
        places = dict(_Kept(parameters, flat).parts())
        for kept in buckets:
            part = numpy.concatenate([places[one] for one in kept.ids()])
            yield from steps(part, kept.values, kept.parameters)
            for one, values in _Kept(kept.parameters, part).parts():
                places[one][:] = values

    def move(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        """DDP has these buckets now."""
        for parameters in buckets:
            self._of(parameters)

    def state(self, names: Mapping[int, str]) -> dict[str, Any]:
        """The buckets by the names of their parameters, and the residual of each parameter; names are by id."""
        return {
            "buckets": [[names[one] for one in kept.ids()] for kept in self._buckets],
            "residual": {names[one]: torch.from_numpy(part.copy()) for one, part in self._parts.items()},
            "factors": {names[one]: torch.from_numpy(factor.copy()) for one, factor in self.factors.items()},
        }

    def restore(self, state: Mapping[str, Any], named: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`.

        Raises:
            CheckpointError: it is of other parameters. Nothing has changed.
        """
        residual = state["residual"]
        for name, values in residual.items():
            if name not in named or named[name].numel() != values.numel():
                here = f"{named[name].numel()} elements" if name in named else "no such parameter"
                raise CheckpointError(f"the residual of {name} has {values.numel()} elements; the model has {here}")
        self._buckets, self._parts = [], {}
        self.factors = {id(named[name]): factor.numpy() for name, factor in state.get("factors", {}).items()}
        for names in state["buckets"]:
            self._keep([named[name] for name in names], [residual[name].numpy() for name in names])

    def _of(self, parameters: Sequence[torch.Tensor]) -> list[_Kept]:
        """The residuals that make up a bucket: those that are known of it, or one with what is left of them."""
        wanted = {id(parameter) for parameter in parameters}
        known = [kept for kept in self._buckets if wanted.issuperset(kept.ids())]
        if sum(len(kept.parameters) for kept in known) == len(wanted):
            return known
        zeros = [numpy.zeros(parameter.numel(), numpy.float32) for parameter in parameters]
        return [
            self._keep(parameters, [self._parts.get(id(p), zero) for p, zero in zip(parameters, zeros, strict=True)])
        ]

    def _keep(self, parameters: Sequence[torch.Tensor], parts: Sequence[numpy.ndarray]) -> _Kept:
        kept = _Kept(parameters, numpy.concatenate(parts))
        self._buckets = [one for one in self._buckets if set(one.ids()).isdisjoint(kept.ids())] + [kept]
        self._parts |= dict(kept.parts())
        return kept
