"""The leaves of a pytree: their names, their values as NumPy arrays, and their return to the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from mpitrain.errors import TreeError
from mpitrain.job.start import init

PyTree = Any
Leaf = Any


def named_leaves(tree: PyTree) -> tuple[tuple[str, ...], list[Leaf], Any]:
    """Return the leaves' unique names, such as `dense/weight`; the leaves; and the form, for jax.tree.unflatten."""
    paths, form = jax.tree_util.tree_flatten_with_path(tree)
    names = ["/".join(map(_step, path)) or "value" for path, _ in paths]
    if len(set(names)) < len(names):  # {"a/b": x, "a": {"b": y}}
        names = [f"{number} {name}" for number, name in enumerate(names)]
    return tuple(names), [leaf for _, leaf in paths], form


def _step(entry: Any) -> str:
    """Return one step of a path: a key of a dict, a position in a list, or the name of an attribute."""
    return next((str(getattr(entry, kind)) for kind in ("key", "idx", "name") if hasattr(entry, kind)), str(entry))


def leaves_like(
    names: Sequence[str], models: Sequence[Leaf], form: Any, tree: PyTree, role: str, *, any_dtype: bool = False
) -> list[Leaf]:
    """Return the leaves of `tree`, which has this form, and the shapes and dtypes of `models`.

    Args:
        names, models, form: what `named_leaves` returned for the other tree.
        role: says in an error which tree it is.
        any_dtype: do not compare dtypes.

    Raises:
        TreeError: the form, a shape or a dtype differs.
    """
    try:
        leaves: list[Leaf] = form.flatten_up_to(tree)
    except ValueError as error:
        raise TreeError(f"{role} has another form than the tree that comes with it: {error}") from None
    for name, model, leaf in zip(names, models, leaves, strict=True):
        (dtype, shape), (its_dtype, its_shape) = _kind(model), _kind(leaf)
        if its_shape != shape or (its_dtype != dtype and not any_dtype):
            raise TreeError(
                f"{init().name()}: {role} has {its_dtype} {its_shape} for {name}; the tree that comes with it has "
                f"{dtype} {shape}. They must have the same shapes{'' if any_dtype else ' and dtypes'}: take both "
                "from the same parameters"
            )
    return leaves


def _kind(leaf: Leaf) -> tuple[Any, tuple[int, ...]]:
    """The dtype of an array, or the type of a number; and the shape."""
    return (leaf.dtype, leaf.shape) if hasattr(leaf, "dtype") else (type(leaf).__name__, ())


def on_host(names: Sequence[str], leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return JAX's arrays as read-only NumPy arrays. Arrays on the CPU share memory; others are copied to the CPU.

    Other leaves are returned unchanged.

    Raises:
        TreeError: an array has PRNG keys, or is spread over several processes.
    """
    for name, leaf in zip(names, leaves, strict=True):
        check(name, leaf)
    fetched = iter(jax.device_get([leaf for leaf in leaves if isinstance(leaf, jax.Array)]))
    return [next(fetched) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]


def check(name: str, leaf: Leaf) -> None:
    """Raise TreeError if `leaf` is a JAX array whose values are not available here."""
    if not isinstance(leaf, jax.Array):
        return
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TreeError(f"{name} has PRNG keys, {leaf.dtype}; exchange jax.random.key_data(keys) instead")
    if not isinstance(leaf, jax.core.Tracer) and not leaf.is_fully_addressable:
        raise TreeError(
            f"{name} is spread over the devices of several processes ({leaf.sharding}); after initialize() use JAX's "
            "own collectives for it"
        )


def back(values: Sequence[Leaf], models: Sequence[Leaf]) -> list[Leaf]:
    """Put each value where its model is: on the same devices if the model is a JAX array, otherwise on the CPU.

    On a CPU the result shares the value's memory if that begins at a multiple of 64 bytes. So never write to the value
    again.
    """
    # An array that is not committed to a device can be combined with arrays on any device. It must stay uncommitted.
    free = [place for place, model in enumerate(models) if isinstance(model, jax.Array) and not model.committed]
    bound = [place for place, model in enumerate(models) if isinstance(model, jax.Array) and model.committed]
    results = list(values)
    for place, array in zip(free, jax.device_put([values[place] for place in free]), strict=True):
        results[place] = array
    if bound:
        arrays = jax.device_put([values[place] for place in bound], [models[place].sharding for place in bound])
        for place, array in zip(bound, arrays, strict=True):
            results[place] = array
    return results
