"""A Trainer's hooks, by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.training.hooks.hook import Hook


def by_name(hooks: Sequence[Hook]) -> dict[str, Hook]:
    """Return the hooks by name: the first of a class is EarlyStopping, the second EarlyStopping 2."""
    named: dict[str, Hook] = {}
    for hook in hooks:
        kind = type(hook).__name__
        number = 1 + sum(type(other).__name__ == kind for other in named.values())
        named[kind if number == 1 else f"{kind} {number}"] = hook
    return named


def states_of(hooks: Sequence[Hook]) -> dict[str, dict[str, Any]]:
    """Return the states of those hooks that have one, by name."""
    return {name: state for name, hook in by_name(hooks).items() if (state := hook.state())}


def restore_all(hooks: Sequence[Hook], states: Mapping[str, dict[str, Any]]) -> None:
    """Reverse `states_of`. A hook without a state stays as it is; a state without a hook is ignored."""
    for name, hook in by_name(hooks).items():
        if name in states:
            hook.restore(states[name])


def refuse_others(hooks: Sequence[object]) -> None:
    """Raise ConfigError unless all objects are hooks."""
    for number, hook in enumerate(hooks):
        if not isinstance(hook, Hook):
            kind = f"the class {hook.__name__}" if isinstance(hook, type) else f"a {type(hook).__name__}"
            raise ConfigError(
                f"hooks[{number}] of Trainer is {kind}; it must be a Hook. Put a writer or meter into "
                "mt.Record, as in hooks=[mt.Record([mt.JsonLines(directory)])]"
            )
