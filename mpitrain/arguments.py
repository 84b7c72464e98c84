"""Arguments of calls: numbers are converted exactly or refused, objects are pickled, and messages show both."""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.errors import ConfigError, TreeError

_MOST_TEXT = 200


def shortened(value: object, words: Callable[[Any], str] = repr, most: int = _MOST_TEXT) -> str:
    """Return the text of a value for a message: bounded in length, and defined even if the value's own repr fails."""
    try:
        text = words(value)
    except Exception:  # a class may have a __repr__ that fails; the message must not fail too
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def bounded_list(items: Sequence[str], most: int = 10) -> str:
    """Return the items, separated by commas; if there are many, the first ones and the number of the others."""
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return ", ".join([*(shortened(item, str) for item in items[:most]), *more])


def whole_number(value: Any, label: str) -> int:
    """Return an int, or an integer of another library such as NumPy, as an int. Raise ConfigError otherwise, and for
    True."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except Exception:  # a class may raise anything
        raise ConfigError(
            f"{label}={shortened(value)}; it must be a whole number, not {type(value).__name__}"
        ) from None


def real_number(value: Any, label: str, meaning: str = "") -> float:
    """Return a real number as a float: a number of Python or NumPy, or an array or tensor with one element.

    Raises:
        ConfigError: it is something else, or no float has exactly its value.
    """
    number = value
    if not isinstance(value, int | float) and hasattr(value, "item") and getattr(value, "size", 1) != 0:
        try:
            number = value.item()
        except (TypeError, ValueError, RuntimeError):
            number = None
    try:
        if isinstance(number, int | float) and (float(number) == number or math.isnan(number)):
            return float(number)
    except OverflowError:
        pass
    raise ConfigError(f"{label}={shortened(value)}; it must be one real number{meaning}")


def weight_of(value: Any, label: str) -> float:
    """Return a weight as a float. See real_number."""
    return value if type(value) is float else real_number(value, label, ", the number of samples")


def pickled(value: Any) -> bytes:
    """Return an object's pickle. Raise TreeError if it has none."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # a class may raise anything
        raise TreeError(
            f"a {type(value).__name__} cannot be pickled: {type(error).__name__}: {shortened(error, str)}"
        ) from error
