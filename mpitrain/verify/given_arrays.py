"""The parameters of a loop of the script's own, as far as they can be seen: the arrays that world.sync gave.

A script that changes them in place (`w -= ...`) has its parameters in them. One that makes new arrays (`w = w - ...`)
drops them, and nobody is told of the new ones.
"""

from __future__ import annotations

from weakref import ref

from mpitrain.arrays import Array, is_array
from mpitrain.tree import Tree, leaves
from mpitrain.verify.comparison import ROUNDOFFS


class GivenArrays:
    """Those of them that the script still has."""

    def __init__(self) -> None:
        self._arrays: dict[str, ref[Array]] = {}

    def add(self, tree: Tree) -> None:
        """world.sync has given `tree`."""
        for path, leaf in leaves(tree):
            if is_array(leaf) and str(leaf.dtype) in ROUNDOFFS:
                name = path or "the array"
                alike = sum(known == name or known.startswith(f"{name} (") for known in self._arrays)
                self._arrays[f"{name} ({alike + 1})" if alike else name] = ref(leaf)

    def now(self) -> dict[str, Array]:
        """The arrays by name, as they are now."""
        return {name: array for name, weak in self._arrays.items() if (array := weak()) is not None}

    def dropped(self) -> list[str]:
        """The names of those that the script has no longer; each is told once."""
        names = [name for name, weak in self._arrays.items() if weak() is None]
        for name in names:
            del self._arrays[name]
        return names
