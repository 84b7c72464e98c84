"""The state of a part of a model, as messages between servers: one for each piece, as any of them may be large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy

from mpitrain.arrays import is_array
from mpitrain.serve.store import on_host


def pieces_of(state: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[numpy.ndarray]]]:
    """Yield fields and arrays of the messages for a result of DividedAdapter.part_state."""
    for name, value in state.items():
        if is_array(value):
            yield {"name": name}, [on_host(value)]
        else:
            yield {"name": name, "value": value}, []


def add_piece(state: dict[str, Any], fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray]) -> None:
    """The reverse of `pieces_of`."""
    state[fields["name"]] = arrays[0] if arrays else fields["value"]


def difference_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what is new or has other bits, and the names that are gone."""
    changed = {name: value for name, value in now.items() if name not in before or not _is_same(before[name], value)}
    return changed, [name for name in before if name not in now]


def _is_same(one: Any, other: Any) -> bool:
    if is_array(one) and is_array(other):
        one, other = on_host(one), on_host(other)
        return (one.dtype, one.shape) == (other.dtype, other.shape) and numpy.array_equal(_bits(one), _bits(other))
    return not is_array(one) and not is_array(other) and repr(one) == repr(other)


def _bits(array: numpy.ndarray) -> numpy.ndarray:
    """The bytes of an array, in its own memory if that is contiguous."""
    return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
