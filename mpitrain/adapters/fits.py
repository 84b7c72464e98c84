"""Check that the arrays of a checkpoint fit this model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy

from mpitrain.arrays import Array
from mpitrain.errors import CheckpointError


def check_fits(subject: str, saved: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Raise CheckpointError, which begins with `subject`, unless both have the same names, shapes and dtypes."""
    kinds = [{name: (value.shape, value.dtype) for name, value in values.items()} for values in (saved, expected)]
    for name in [*expected, *saved]:
        if kinds[0].get(name) != kinds[1].get(name):
            raise CheckpointError(
                f"{subject}: the checkpoint has {_text(kinds[0].get(name))} for {name}, the model "
                f"{_text(kinds[1].get(name))}; is it a checkpoint of this model?"
            )


def _text(kind: tuple[tuple[int, ...], numpy.dtype] | None) -> str:
    return "nothing" if kind is None else f"{kind[1]} {kind[0]}"
