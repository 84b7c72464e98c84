"""What ranks that take part no more have left for the next outer step of a fragment."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy

from mpitrain.arrays import Array
from mpitrain.cuda.staging import like
from mpitrain.errors import CheckpointError

# In a state, beside samples x distance by name.
SAMPLES, GONE = "samples", "gone/"


class Carried:
    """Sums over these ranks, which one rank sends with its own distance.

    Attributes:
        samples: that they have trained with since the fragment was sent last.
    """

    def __init__(self) -> None:
        self.samples = 0.0
        self._gone: dict[str, numpy.ndarray] = {}  # samples x distance, by piece

    def __bool__(self) -> bool:
        return bool(self._gone)

    def join(self, piece: str, gone: Array, samples: float) -> None:
        """Make the mean of `gone`, the distance of this rank in a piece with so many samples, and what is carried."""
        if self.samples:
            weight = samples + self.samples
            gone *= gone.dtype.type(samples / weight)
            gone += like((self._gone[piece] / weight).astype(gone.dtype), gone)

    def clear(self) -> None:
        """Forget it."""
        self.samples, self._gone = 0.0, {}

    def state(self) -> dict[str, numpy.ndarray]:
        """Return it for a checkpoint, by name; {} for nothing. The entries may be added up over ranks."""
        if not self._gone:
            return {}
        named = {f"{GONE}{name}": value for name, value in self._gone.items()}
        return {**named, SAMPLES: numpy.array(self.samples)}

    def restore(self, state: Mapping[str, numpy.ndarray], pieces: Collection[str]) -> None:
        """Go on from a `state`, of these pieces.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        self._gone = {name.removeprefix(GONE): value for name, value in state.items() if name.startswith(GONE)}
        self.samples = float(state.get(SAMPLES, 0.0))
        missing = {*pieces} - self._gone.keys()
        if self._gone and missing:
            raise CheckpointError(f"the parts of the ranks have nothing for {', '.join(sorted(missing))}")
