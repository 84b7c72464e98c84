"""The calls for JAX programs: sync, mean, weighted_mean, sum, shard. Outside jit they work on the arrays' own
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy

from mpitrain.errors import TreeError
from mpitrain.jax.leaves import Leaf, PyTree, back, named_leaves, on_host
from mpitrain.jax.traced import exchange, in_callback, is_traced
from mpitrain.jax.watched import tell_parameters
from mpitrain.job.start import init

Result = TypeVar("Result")


def sync(tree: PyTree, root: int = 0) -> PyTree:
    """Return `root`'s values in a new pytree on every rank, on the devices where each rank had its own values.

    Every rank calls this outside jit. Call it once, before training, with the parameters and the optimizer's state.

    Args:
        tree: any pytree of numbers, and of JAX or NumPy arrays of any dtype and shape. It is not changed. Names, shapes
            and dtypes of the leaves must be equal on all ranks.
        root: the rank whose values count.

    Raises:
        MismatchError: the leaves differ. Raised on every rank, before anything is sent.
        TreeError: a leaf cannot be sent, such as PRNG keys; or the call is inside jit.
    """
    names, leaves, form = named_leaves(tree)
    if is_traced(leaves):
        raise TreeError("sync inside jit: call it outside, once, before the first step")
    # Do not use World.sync: JAX may use this memory for something else.
    results = init().arrays.sync(dict(zip(names, on_host(names, leaves), strict=True)), root)
    return jax.tree.unflatten(form, back([results[name] for name in names], leaves))


def mean(function: Callable[..., Result], weight: Any = 1.0) -> Callable[..., Result]:
    """Return a function like `function` whose result is the weighted mean over ranks; see `weighted_mean`.

        step = mpitrain.jax.mean(jax.value_and_grad(loss), weight=lambda params, x, y: len(x))

    The returned function may be called inside jit and outside. All ranks call it together.

    Args:
        function: returns a pytree of floating leaves, such as a loss and gradients.
        weight: this rank's weight, usually its number of samples: a number, or a function of the same arguments that
            returns a number (traced inside jit). The default counts every rank equally, which is right only if all
            ranks have equally many samples.

    Raises:
        TypeError: `function` cannot be called.
    """
    if not callable(function):
        raise TypeError(
            f"mean takes a function, not {type(function).__name__}; of a pytree: weighted_mean(tree, weight)"
        )

    @wraps(function)
    def averaged(*arguments: Any, **named: Any) -> Result:
        share = weight(*arguments, **named) if callable(weight) else weight
        own = function(*arguments, **named)
        tell_parameters([*arguments, *named.values()], own)
        result: Result = weighted_mean(own, share)
        return result

    return averaged


def weighted_mean(tree: PyTree, weight: Any = 1.0) -> PyTree:
    """Return the weighted mean over ranks of every leaf, in a new pytree, with the same bits on every rank.

    mean = sum over ranks of weight x leaf, divided by the sum of the weights. All leaves go in one exchange. Call this
    inside jit or outside. It has no derivative: differentiate first, or use `sum`.

    Args:
        tree: any pytree of numbers and floating JAX or NumPy arrays, with the same names, shapes and dtypes on every
            rank. Results are where the arrays were.
        weight: this rank's weight, in samples: a number, or an array without dimensions. With weight 0, this rank's
            values do not count, not even NaN.

    Raises:
        MismatchError: the leaves differ, or ranks make different calls. Raised on every rank.
        TreeError: a leaf has no mean, such as an integer array.
        DataError: a weight is negative or not finite, or all are 0. Raised on every rank.
        jax.errors.JaxRuntimeError: inside jit, in place of MismatchError and DataError, with their text.
        TypeError: the result is differentiated.
    """
    return _exchanged("mean", tree, weight)


def sum(tree: PyTree) -> PyTree:
    """Return the sum over ranks of every leaf, in a new pytree, with the same bits on every rank.

    Its derivative (reverse mode) is the sum over ranks of the cotangents, so each rank gets the gradient of the sum of
    all ranks' losses. Leaves may also be integers, which wrap on overflow. The rest is as for `weighted_mean`.
    """
    return _exchanged("sum", tree, 1.0)


def shard(batches: Iterable[PyTree], start: int = 0) -> Iterator[PyTree]:
    """Yield this rank's part of every batch, like `World.shard`, for any pytrees, also of JAX's arrays.

    Not collective, but every rank iterates over the same batches. The parts are NumPy arrays, which jitted functions
    accept. They are no copies if the batches are on the host. For each new number of samples, jit compiles again; there
    are only a few sizes.

    Args:
        batches: global batches: pytrees of arrays with the samples along the first dimension.
        start: the number of batches to skip, to resume where an earlier run stopped.

    Raises:
        DataError, ValueError: as for `World.shard`.
    """
    form: Any = None

    def flat() -> Iterator[list[Any]]:
        nonlocal form
        for batch in batches:
            leaves, form = jax.tree.flatten(batch)
            yield [numpy.asarray(leaf) for leaf in leaves]

    for part in init().shard(flat(), start):
        yield jax.tree.unflatten(form, part)


def _exchanged(operation: str, tree: PyTree, weight: Any) -> PyTree:
    names, leaves, form = named_leaves(tree)
    if is_traced([weight, *leaves]):
        # A value that is differentiated must be an argument of its own; a weight that is not traced must stay a number.
        weights = [weight] if isinstance(weight, jax.Array) else []
        arrays = [_array(leaf, operation) for leaf in leaves]
        results = _differentiable((operation, names, None if weights else weight), arrays, weights)
    else:
        results = _direct(operation, names, leaves, weight)
    return jax.tree.unflatten(form, results)


def _array(leaf: Leaf, operation: str) -> Leaf:
    """Turn a number into JAX's type for it. Numbers of a mean become floating, as in World.mean."""
    if isinstance(leaf, bool | int) and operation == "mean":
        leaf = float(leaf)
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _direct(operation: str, names: Sequence[str], leaves: Sequence[Leaf], weight: Any) -> list[Leaf]:
    return back(exchange(operation, names, on_host(names, leaves), weight), leaves)


_Call = tuple[str, tuple[str, ...], Any]  # operation, names, and the weight unless it is an array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: _Call, leaves: list[Leaf], weights: list[Leaf]) -> list[Leaf]:
    operation, names, weight = call
    weight = weights[0] if weights else weight
    # jax.grad outside jit calls this with plain values.
    make = in_callback if is_traced([weight, *leaves]) else _direct
    return make(operation, names, leaves, weight)


def _forward(call: _Call, leaves: list[Leaf], weights: list[Leaf]) -> tuple[list[Leaf], None]:
    return _differentiable(call, leaves, weights), None


def _backward(call: _Call, _: None, cotangents: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
    operation, names, _ = call
    if operation == "mean":
        raise TypeError(
            "a mean over ranks has no derivative here: put mean() around jax.value_and_grad(loss), or build the loss "
            "with mpitrain.jax.sum"
        )
    # Integers have no gradient; JAX passes a marker of dtype float0 for them.
    places = [place for place, one in enumerate(cotangents) if one.dtype != jax.dtypes.float0]
    call = "sum", tuple(f"cotangent of {names[place]}" for place in places), 1.0
    results = list(cotangents)
    for place, gradient in zip(places, _differentiable(call, [cotangents[place] for place in places], []), strict=True):
        results[place] = gradient
    return results, []


_differentiable.defvjp(_forward, _backward)
