"""A nested state as flat names, `adapter/parameters/dense1.weight`, and back; and copies of one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from mpitrain.arrays import Array, is_array, is_device_array
from mpitrain.errors import CheckpointError
from mpitrain.state.tensors import NAMES

_SEPARATOR = "/"
# Parameter names may contain dots and slashes.
_ESCAPES = (("%", "%25"), (_SEPARATOR, "%2F"))


def split(state: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays of a nested state (not copies), and copies of its other values, each by flat name.

    Args:
        state: nested dicts with string keys. Their leaves are arrays (CPU or GPU), and JSON values:
            numbers, strings, None, lists of these.

    Raises:
        CheckpointError: the state holds anything else; the text names it.
    """
    tensors: dict[str, Array] = {}
    values: dict[str, Any] = {}
    for name, value in _flatten(state):
        if not is_array(value):
            try:
                values[name] = json.loads(json.dumps(value))  # a copy, as a load will return it
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{name} is a {type(value).__name__} ({error}); a checkpoint holds arrays, numbers, strings, None "
                    "and lists of them, in dicts with string keys"
                ) from None
        elif value.dtype not in NAMES:
            known = ", ".join(str(dtype) for dtype in NAMES)
            raise CheckpointError(f"{name} is an array of {value.dtype}; a checkpoint holds arrays of {known}")
        else:
            tensors[name] = value
    return tensors, values


def join(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested state of flat names. This reverses `split`, except that empty dicts are lost.

    Raises:
        CheckpointError: the same name belongs to a value and to a group.
    """
    state: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = (_unescaped(part) for part in name.split(_SEPARATOR))
        place = state
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise CheckpointError(f"{name} lies in {parent}, which is a value")
        if last in place:
            raise CheckpointError(f"{name} appears twice")
        place[last] = value
    return state


def host_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested state that shares no memory with `state`. Its arrays are CPU arrays."""
    copied: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            copied[key] = host_copy(value)
        else:
            copied[key] = value.get() if is_device_array(value) else deepcopy(value)
    return copied


def _flatten(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{prefix} has the key {key!r}; the keys of a state are strings")
        name = prefix + _escaped(key)
        if isinstance(value, Mapping):
            yield from _flatten(value, name + _SEPARATOR)
        else:
            yield name, value


def _escaped(key: str) -> str:
    for plain, escape in _ESCAPES:
        key = key.replace(plain, escape)
    return key


def _unescaped(key: str) -> str:
    for plain, escape in reversed(_ESCAPES):
        key = key.replace(escape, plain)
    return key
