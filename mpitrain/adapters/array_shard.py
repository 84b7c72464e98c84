"""One rank's part of an ArrayFunction's optimizer: an optimizer that keeps only the owned elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from mpitrain.arrays import Array
from mpitrain.errors import ConfigError
from mpitrain.optim.optimizers import Optimizer, described
from mpitrain.optim.owned import cut, rest_of

UNDIVIDED = (
    "the optimizer's state is divided between the ranks, and each has a part. Call own_state() of the strategy on all "
    "ranks before state() of the adapter, as mt.Checkpoint does"
)


class ArrayShard:
    """An OptimizerShard that is also an Optimizer: ArrayFunction uses it in place of its own."""

    def __init__(
        self, optimizer: Optimizer, flat: Array, ranges: Sequence[slice], norm_of_all: Callable[[float], float]
    ) -> None:
        """
        Args:
            optimizer: was started with `flat`; from now on it keeps only the owned elements.
            flat: all parameters.
            ranges: the owned ones.

        Raises:
            ConfigError: the optimizer cannot do this, or it is divided already.
        """
        if isinstance(optimizer, ArrayShard):
            raise ConfigError("the optimizer is divided between ranks already; make another ArrayFunction")
        divided: Any = optimizer
        if not hasattr(divided, "keep_only"):
            raise ConfigError(
                f"{type(optimizer).__name__} has no method keep_only(ranges, norm_of_all), so it cannot be divided "
                "between ranks; mt.optim.SGD, mt.optim.Adam and mt.optim.AdamW can. Use mt.Sync"
            )
        self.settings, self.was_skipped = described(optimizer), False
        self._optimizer, self._flat, self._ranges = optimizer, flat, ranges
        divided.keep_only(ranges, norm_of_all)
        self._others = rest_of(ranges, flat.size)
        self._whole: dict[str, Array | int] | None = None

    # -- of an Optimizer ---------------------------------------------------------------------------------------

    def start(self, parameters: Array, decayed: Sequence[slice]) -> None:
        """See Optimizer. It has already been started."""
        raise ConfigError(UNDIVIDED)

    def update(self, gradients: Array) -> float:
        """Make a step of the owned elements, and write their new values into `gradients`."""
        self._whole = None
        rate = self._optimizer.update(gradients)
        for one in self._ranges:
            gradients[one] = self._flat[one]
        return rate

    def scale_next_rate(self, factor: float) -> None:
        """See ArrayFunction: mt.optim.SGD, mt.optim.Adam and mt.optim.AdamW, the only ones that can be divided, have
        it."""
        optimizer: Any = self._optimizer
        optimizer.scale_next_rate(factor)

    def measure_gradient_norm(self) -> None:
        """See Optimizer."""
        self._optimizer.measure_gradient_norm()

    def gradient_norm(self) -> float | None:
        """See Optimizer: of all gradients."""
        return self._optimizer.gradient_norm()

    def state(self) -> dict[str, Array | int]:
        """See Optimizer: the state of the whole optimizer, while it is lent.

        Raises:
            ConfigError: it is not lent.
        """
        if self._whole is None:
            raise ConfigError(UNDIVIDED)
        return self._whole

    def restore(self, state: Mapping[str, Array | int]) -> None:
        """See Optimizer: from the state of the whole optimizer."""
        self._whole = None
        self._optimizer.restore(
            {name: value if isinstance(value, int) else cut(self._ranges, value) for name, value in state.items()}
        )

    # -- of an OptimizerShard ----------------------------------------------------------------------------------

    def take_updated(self, flats: Mapping[numpy.dtype, Array]) -> None:
        """See OptimizerShard."""
        updated = flats[self._flat.dtype]
        for one in self._others:
            self._flat[one] = updated[one]

    def values(self) -> dict[str, Any]:
        """See OptimizerShard."""
        return {name: value for name, value in self._optimizer.state().items() if isinstance(value, int)}

    def array_names(self) -> list[str]:
        """See OptimizerShard."""
        return [name for name, value in self._optimizer.state().items() if not isinstance(value, int)]

    def array(self, name: str) -> dict[numpy.dtype, Array]:
        """See OptimizerShard."""
        return {self._flat.dtype: self._optimizer.state()[name]}

    def lend(self, values: Sequence[dict[str, Any]], arrays: Mapping[str, Mapping[numpy.dtype, Array]]) -> None:
        """See OptimizerShard."""
        self._whole = {**values[0], **{name: of_all[self._flat.dtype] for name, of_all in arrays.items()}}

    def begin_step(self) -> None:
        """See OptimizerShard."""
        self._whole = None

    def close(self) -> None:
        """See OptimizerShard. The optimizer's `start` does this."""
