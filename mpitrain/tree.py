"""Trees: any nesting of dicts, lists, tuples (named ones too) and None around arrays and numbers.

Dicts are walked by sorted key, so ranks that filled equal dicts in different orders still agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy

from mpitrain.arguments import bounded_list
from mpitrain.arrays import check_class, is_array
from mpitrain.errors import DataError, TreeError

Tree = Any
Leaf = Any

# Do not use numbers.Number: NumPy has no dtype for a Fraction or a Decimal.
_NUMBERS = (bool, int, float, complex, numpy.generic)


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Every leaf with its path, such as `['layers'][0]`.

    Raises:
        TreeError: a leaf is neither a NumPy or CuPy array nor a number.
    """
    if isinstance(tree, dict):
        for key in sorted(tree, key=repr):
            yield from leaves(tree[key], f"{path}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for index, child in enumerate(tree):
            yield from leaves(child, f"{path}[{index}]")
    elif tree is not None:
        if not isinstance(tree, _NUMBERS) and not is_array(tree):
            raise TreeError(
                f"leaf {path or 'at the top'} is a {type(tree).__name__}; a tree holds NumPy or CuPy arrays, "
                "numbers and None in dicts, lists and tuples. World.broadcast_object and World.allgather send any "
                "object"
            )
        if not isinstance(tree, bool | int | float | complex) and tree.dtype.hasobject:
            raise TreeError(f"leaf {path or 'at the top'} is an array of Python objects; convert it to numbers")
        yield path, tree


def plain_leaves(tree: Tree) -> Iterator[tuple[str, Leaf]]:
    """As `leaves`, for callers that use values only: an array with more, such as a mask, is a TreeError."""
    for path, leaf in leaves(tree):
        check_class(leaf, f"leaf {path or 'at the top'}")
        yield path, leaf


def rebuild(tree: Tree, replacement: Callable[[], Leaf]) -> Tree:
    """A tree of the same form whose leaves come from successive calls of `replacement`, in the order of `leaves`."""
    if isinstance(tree, dict):
        children = {key: rebuild(tree[key], replacement) for key in sorted(tree, key=repr)}
        result = copy.copy(tree)  # keeps the caller's class of dict and its order
        for key, child in children.items():  # not update(): a Counter would add
            result[key] = child
        return result
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(rebuild(child, replacement) for child in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(rebuild(child, replacement) for child in tree)
    return None if tree is None else replacement()


def num_samples(tree: Tree) -> int:
    """The number of samples: the length of the arrays of `tree` along their first dimension.

    Raises:
        DataError: there is no array, one has no dimension, or their lengths differ.
    """
    lengths_of_leaves = [(path or "the array", len(leaf) if numpy.ndim(leaf) else None) for path, leaf in leaves(tree)]
    lengths = {length for _, length in lengths_of_leaves if length is not None}
    if len(lengths) != 1 or None in dict(lengths_of_leaves).values():
        # One leaf of each length: there may be a hundred thousand leaves.
        firsts: dict[int | None, str] = {}
        for path, length in lengths_of_leaves:
            firsts.setdefault(length, path)
        texts = [f"{path} {'a number' if length is None else length}" for length, path in firsts.items()]
        text = bounded_list(texts) or "no arrays"
        raise DataError(f"arrays must have the same number of samples along their first dimension; found {text}")
    return lengths.pop()


def describe(tree: Tree, *, any_number: bool = False) -> list[str]:
    """One line per leaf, `['w'] float32 (784, 256)`: equal on two ranks exactly when the leaves are alike.

    With `any_number` an int, a float and a NumPy scalar are alike.
    """
    return [f"{path or 'the tree'} {_kind(leaf, any_number)}" for path, leaf in leaves(tree)] or ["an empty tree"]


def _kind(leaf: Leaf, any_number: bool) -> str:
    if is_array(leaf):
        return f"{leaf.dtype} {leaf.shape}"
    if any_number:
        return "number"
    # NumPy's own scalars by dtype, which says more than their class: datetime64[s], <U3.
    return f"number {leaf.dtype if isinstance(leaf, numpy.generic) else type(leaf).__name__}"
