"""tunable(): a value that a script reads in each step, and that `mpitrain tell JOB set NAME=VALUE` changes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from mpitrain.errors import CheckpointError, ConfigError

Value = TypeVar("Value", bool, int, float, str)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,59}")
# The values that the launcher shows must fit into the record of a rank (watching/rank_record.py).
_MOST_TUNABLES, MOST_CHARACTERS = 32, 100
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_KINDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}


class Tunable(Generic[Value]):
    """A value that can be changed while the script trains. Read `value` in each step, and keep no copy of it.

    Attributes:
        name: as declared.
        default: as declared. Its type is that of `value`.
        value: the current value, the same on all ranks between two steps of a Trainer.
    """

    def __init__(self, name: str, default: Value) -> None:
        """See `tunable`."""
        self.name = name
        self.default: Value = default
        self.value: Value = default

    def __repr__(self) -> str:
        return f"Tunable({self.name!r}, {self.value!r})"


class Tunables:
    """All tunable values of this process, by name.

    Attributes:
        changed: is called after a declaration; a running Trainer then publishes the values again.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._declared: dict[str, Tunable[Any]] = {}
        self._told: dict[str, Any] = {}  # values set by commands, also for names that are not declared yet

    def declare(self, name: str, default: Value) -> Tunable[Value]:
        """See `tunable`."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"tunable({name!r}): allowed is a name of at most 60 letters, digits, '_', '.' and '-' that begins "
                "with a letter"
            )
        if type(default) not in _KINDS or not _is_short(default):
            raise ConfigError(
                f"tunable({name!r}, {default!r}): allowed are True, False, an integer, a finite number, and text of at "
                f"most {MOST_CHARACTERS} characters"
            )
        known = self._declared.get(name)
        if known is None and len(self._declared) == _MOST_TUNABLES:
            raise ConfigError(f"tunable({name!r}): a script may declare at most {_MOST_TUNABLES} names")
        if known is not None and (type(known.default), known.default) != (type(default), default):
            raise ConfigError(
                f"tunable({name!r}, {default!r}): it was declared with the default {known.default!r}; declare a name "
                "once, or always with the same default"
            )
        if known is None:
            known = Tunable(name, default)
            if name in self._told:
                _check_restored(known, self._told[name])
                known.value = self._told[name]
            self._declared[name] = known
            self.changed()
        return known

    def values(self) -> dict[str, Any]:
        """Return the current values by name."""
        return {name: one.value for name, one in self._declared.items()}

    def lines(self) -> list[str]:
        """The declarations that the ranks compare, one per line."""
        return [f"tunable({name!r}, {one.default!r})" for name, one in sorted(self._declared.items())]

    def set(self, name: str, text: str) -> Any:
        """Set a value from a user's text, and return it.

        Raises:
            ConfigError: there is no such name, or the text is not a value of its type.
        """
        one = self._declared.get(name)
        if one is None:
            known = ", ".join(f"{name} ({value!r})" for name, value in self.values().items())
            listed = f"declared are {known}" if known else "the script has declared none with mt.tunable(name, default)"
            raise ConfigError(f"there is no tunable {name}; {listed}")
        value = _parsed(type(one.default), text)
        if value is None or not _is_short(value):
            allowed = f"{_KINDS[type(one.default)]}, as its default {one.default!r}"
            raise ConfigError(f"{name}={text}: allowed is {allowed}; {name} stays {one.value!r}")
        one.value = self._told[name] = value
        return value

    def told(self) -> dict[str, Any]:
        """Return the values that commands have set, by name."""
        return dict(self._told)

    def check(self, told: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `restore` would."""
        for name, value in told.items():
            if name in self._declared:
                _check_restored(self._declared[name], value)

    def restore(self, told: Mapping[str, Any]) -> None:
        """Continue from a result of `told`: all other values are their defaults. A name may be declared later.

        Raises:
            CheckpointError: the script has declared a name with another type. Nothing has changed.
        """
        self.check(told)
        self._told = dict(told)
        for name, one in self._declared.items():
            one.value = told.get(name, one.default)


def _is_short(value: Any) -> bool:
    """True if a value can be published: it is finite, and its text is short."""
    return len(str(value)) <= MOST_CHARACTERS and (not isinstance(value, float) or math.isfinite(value))


def _parsed(kind: type, text: str) -> Any:
    """Parse a text as a value of this type; None: it is not such a value."""
    if kind is bool:
        return _WORDS.get(text.lower())
    try:
        return kind(text)
    except ValueError:
        return None


def _check_restored(one: Tunable[Any], value: Any) -> None:
    if type(value) is not type(one.default):
        raise CheckpointError(
            f"the state to continue from has {one.name}={value!r}, and the script declares tunable({one.name!r}, "
            f"{one.default!r}); declare the same type, or another name"
        )


TUNABLES = Tunables()


def tunable(name: str, default: Value) -> Tunable[Value]:
    """Declare a value that `mpitrain tell JOB set NAME=VALUE` can change while a Trainer runs.

        dropout = mt.tunable("dropout", 0.1)

        def loss_and_gradients(parameters, batch, on_gradient):
            rate = dropout.value

    All ranks get a new value after the same step. The value belongs to the state of the training: it survives a
    restart, and a run that continues from a checkpoint has it, on any number of ranks. Without a Trainer the value
    stays the default.

    Args:
        name: at most 60 letters, digits, "_", "." and "-".
        default: a bool, an int, a float or a text of at most 100 characters. Its type is that of all later values.

    Not collective. Every rank makes the same declarations: a Trainer compares them when it begins to run, and when a
    value is set, and raises a MismatchError on every rank if the ranks differ. A repeated declaration returns the same
    object.

    Raises:
        ConfigError: the name or the default is not allowed, the name has another default already, or there are more
            than 32 names.
        CheckpointError: the training continues from a state in which the name has a value of another type.
    """
    return TUNABLES.declare(name, default)
