"""Dataclasses made from JSON values, each field checked against its annotation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union

from mpitrain.reading import shown

Made = TypeVar("Made")

_MOST_NUMBER = 1e300


def made(cls: type[Made], fields: Mapping[str, Any], **given: Any) -> Made:
    """Return a dataclass made from JSON fields, each checked against its type, and from the fields in `given`.

    Raises:
        ValueError: a field is unknown, missing, or of another type.
    """
    kinds = _kinds(cls)  # type: ignore[arg-type]
    if unknown := fields.keys() - (kinds.keys() - given.keys()):
        raise ValueError(f"it has {shown(min(unknown))}, which is not known")
    needed = {field.name for field in dataclasses.fields(cls) if _is_needed(field)} - given.keys()  # type: ignore[arg-type]
    if missing := needed - fields.keys():
        raise ValueError(f"it has no {min(missing)}")
    return cls(**{name: fitting(value, kinds[name], name) for name, value in fields.items()}, **given)


def fitting(value: Any, kind: Any, name: str) -> Any:
    """Return a JSON value as `kind`, the annotation of a field.

    Raises:
        ValueError: it does not fit. `name` is the field's name in the text.
    """
    origin, kinds = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (origin is typing.Literal and value in kinds):
        return value
    if kind is float and type(value) in (int, float) and abs(value) < _MOST_NUMBER:  # neither is NaN
        return value
    if kind is int and type(value) is int and abs(value) < 2**63:
        return value
    if kind in (str, bool, type(None)) and type(value) is kind:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return made(kind, value)
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        if origin is tuple and kinds[-1] is not ...:
            if len(kinds) == len(value):
                return tuple(fitting(part, of, name) for part, of in zip(value, kinds, strict=True))
        else:
            parts = [fitting(part, kinds[0], name) for part in value]
            return tuple(parts) if origin is tuple else parts
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {fitting(key, kinds[0], name): fitting(part, kinds[1], name) for key, part in value.items()}
    if origin in (Union, types.UnionType):
        for of in kinds:
            with contextlib.suppress(ValueError):
                return fitting(value, of, name)
    raise ValueError(f"{name} is {shown(value)}; it must be {getattr(kind, '__name__', kind) if not kinds else kind}")


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


@functools.lru_cache(None)
def _kinds(cls: type) -> dict[str, Any]:
    kinds = typing.get_type_hints(cls)
    return {field.name: kinds[field.name] for field in dataclasses.fields(cls)}
