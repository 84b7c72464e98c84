"""Trees: any nesting of dicts, lists, tuples (named ones too) and None around arrays and numbers.

Dicts are walked by sorted key, so ranks that filled equal dicts in another order still agree.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import numpy

from mpitrain.arrays import is_array
from mpitrain.errors import TreeError

Tree = Any
Leaf = Any


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
        if not (is_array(tree) or isinstance(tree, numbers.Number | numpy.generic)):
            raise TreeError(
                f"leaf {path or 'at the top'} is a {type(tree).__name__}; a tree holds NumPy or CuPy arrays, "
                "numbers and None in dicts, lists and tuples"
            )
        if is_array(tree) and tree.dtype.hasobject:
            raise TreeError(f"leaf {path or 'at the top'} is an array of Python objects; convert it to numbers")
        yield path, tree


def rebuild(tree: Tree, replacement: Callable[[], Leaf]) -> Tree:
    """A tree of the same form whose leaves are successive calls of `replacement`, in the order of `leaves`."""
    if isinstance(tree, dict):
        children = {key: rebuild(tree[key], replacement) for key in sorted(tree, key=repr)}
        result = copy.copy(tree)  # keeps the caller's kind of dict and its own order
        result.update(children)
        return result
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(rebuild(child, replacement) for child in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(rebuild(child, replacement) for child in tree)
    return None if tree is None else replacement()


def describe(tree: Tree) -> list[str]:
    """One line a leaf, `['w'] float32 (784, 256)`: equal on two ranks exactly when the trees have one form."""
    return [f"{path or 'the tree'} {_kind(leaf)}" for path, leaf in leaves(tree)] or ["an empty tree"]


def _kind(leaf: Leaf) -> str:
    if is_array(leaf):
        return f"{leaf.dtype} {leaf.shape}"
    return f"number {type(leaf).__name__}"
