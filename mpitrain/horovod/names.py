"""Names that an interface does not have at import: its larger parts, which load later, and unknown names."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any


def part_or_refusal(module: str, name: str, parts: Mapping[str, tuple[str, str]], names: Iterable[str]) -> Any:
    """Return the part of an interface with this name.

    Args:
        module: the interface.
        name: the name that a script asks for.
        parts: the parts that are loaded when they are first used: module, and name in it ("": the module itself).
        names: the other names of the interface.

    Raises:
        AttributeError: there is no such name. The text gives the nearest one.
    """
    if name in parts:
        home, inside = parts[name]
        loaded = importlib.import_module(home)
        return getattr(loaded, inside) if inside else loaded
    text = f"module {module} has no {name}"
    # Python itself asks for such names.
    if not name.startswith("__"):
        known = [*names, *parts]
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        text += f"; the nearest name of Horovod's interface that it has is {nearest[0]}. horovod.md has all of them"
    raise AttributeError(text)
