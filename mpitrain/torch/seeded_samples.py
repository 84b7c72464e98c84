"""A data set whose samples are read with random numbers of their own, so that no rank's reading changes another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from mpitrain.adapters.torch_random import restored, seed


class SeededSamples:
    """A data set with numbered samples, for a loader whose sampler yields pairs of a key and a number.

    PyTorch's, NumPy's and Python's own generators begin anew from the key before each sample, also in the workers of a
    loader. So `__getitem__` may draw from them, as transforms do, whatever was read before on this rank.
    """

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __getitems__(self, chosen: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
        read = []
        with restored():
            for key, number in chosen:
                seed(key)
                read.append(self._samples[number])
        return read

    def __len__(self) -> int:
        return len(self._samples)


def begin_worker(samples: Any, own: Callable[[int], None] | None, number: int) -> None:
    """Begin a loader's worker of this number: a worker_init_fn that calls the loader's own one, if it has one.

    `get_worker_info().dataset` is then the data set itself, as it is without virtual ranks.
    """
    object.__setattr__(get_worker_info(), "dataset", samples)  # PyTorch's object is frozen
    if own is not None:
        own(number)
