"""The visible parameters of the script's own loop: the arrays that world.sync gave.

A script that changes these arrays in place (`w -= ...`) has its parameters in them. A script that makes new arrays
(`w = w - ...`) drops them, and the new ones cannot be seen.
"""

from __future__ import annotations

from weakref import ref

from mpitrain.arrays import Array, is_array
from mpitrain.tree import Tree, leaves
from mpitrain.verify.comparison import ROUNDOFFS


class GivenArrays:
    """The arrays from world.sync that the script still has."""

    def __init__(self) -> None:
        self._arrays: dict[str, ref[Array]] = {}

    def add(self, tree: Tree) -> None:
        """Note a result of world.sync."""
        for path, leaf in leaves(tree):
            if is_array(leaf) and str(leaf.dtype) in ROUNDOFFS:
                name = path or "the array"
                alike = sum(known == name or known.startswith(f"{name} (") for known in self._arrays)
                self._arrays[f"{name} ({alike + 1})" if alike else name] = ref(leaf)

    def now(self) -> dict[str, Array]:
        """Return the present arrays by name."""
        return {name: array for name, weak in self._arrays.items() if (array := weak()) is not None}

    def dropped(self) -> list[str]:
        """Return the names of arrays that the script no longer has. Each name is returned once."""
        names = [name for name, weak in self._arrays.items() if weak() is None]
        for name in names:
            del self._arrays[name]
        return names
