"""What a JAX program calls: sync, mean, weighted_mean, sum, shard. Outside jit they work on the arrays' own memory."""

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
    """`root`'s values in a new pytree on every rank, on the devices where each rank had its own.

    Every rank calls it, outside jit: once, before training, with the parameters and the optimizer's state.

    Args:
        tree: any pytree of JAX or NumPy arrays of any dtype and shape, and numbers; not changed. Names, shapes and
            dtypes of the leaves must be equal on all ranks.
        root: the rank whose values count.

    Raises:
        MismatchError: the leaves differ. On every rank, before anything is sent.
        TreeError: a leaf that cannot be sent, such as PRNG keys; or the call is inside jit.
    """
    names, leaves, form = named_leaves(tree)
    if is_traced(leaves):
        raise TreeError("sync inside jit: call it outside, once, before the first step")
    # Not World.sync: JAX may take this memory for something else.
    results = init().arrays.sync(dict(zip(names, on_host(names, leaves), strict=True)), root)
    return jax.tree.unflatten(form, back([results[name] for name in names], leaves))


def mean(function: Callable[..., Result], weight: Any = 1.0) -> Callable[..., Result]:
    """A function like this one whose result is the weighted mean over ranks: see `weighted_mean`.

        step = mpitrain.jax.mean(jax.value_and_grad(loss), weight=lambda params, x, y: len(x))

    It may be called inside jit and outside. All ranks call it together.

    Args:
        function: its result is a pytree of floating leaves, such as a loss and gradients.
        weight: this rank's: a number, or a function of the same arguments that returns one (traced inside jit), as a
            rule the number of samples. The default counts every rank alike, which is right only if all have equally
            many.

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
    """The weighted mean over ranks of every leaf, in a new pytree; the same bits on every rank, inside jit and outside.

    mean = sum over ranks of weight x leaf, divided by the sum of the weights. All leaves go in one exchange. It has no
    derivative: differentiate first, or use `sum`.

    Args:
        tree: any pytree of floating JAX or NumPy arrays, and numbers; the same names, shapes and dtypes on every rank.
            Results are where the arrays were.
        weight: this rank's, in samples, a number or an array of no dimension; 0 makes this rank's values count for
            nothing, NaN included.

    Raises:
        MismatchError: the leaves differ, or ranks make different calls. On every rank.
        TreeError: a leaf that has no mean, such as an integer array.
        DataError: a weight is negative or not finite, or all are 0. On every rank.
        jax.errors.JaxRuntimeError: inside jit, in place of MismatchError and DataError, with their text.
        TypeError: it is differentiated.
    """
    return _exchanged("mean", tree, weight)


def sum(tree: PyTree) -> PyTree:
    """The sum over ranks of every leaf, in a new pytree; the same bits on every rank, inside jit and outside.

    Its derivative (reverse mode) is the sum over ranks of the cotangents: the gradient that each rank gets is that of
    the sum over ranks of all their losses. Leaves may be integers too, which wrap. Otherwise as `weighted_mean`.
    """
    return _exchanged("sum", tree, 1.0)


def shard(batches: Iterable[PyTree], start: int = 0) -> Iterator[PyTree]:
    """This rank's part of every batch, as `World.shard`, for pytrees of any kind and of JAX's arrays too.

    The parts are NumPy arrays, which jitted functions take, without a copy where the batches are on the host. Where
    their number of samples changes, jit compiles anew: it does so once for each of the few sizes there are.
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
        # What is differentiated must be an argument of its own; a weight that is not traced must stay a number.
        weights = [weight] if isinstance(weight, jax.Array) else []
        arrays = [_array(leaf, operation) for leaf in leaves]
        results = _differentiable((operation, names, None if weights else weight), arrays, weights)
    else:
        results = _direct(operation, names, leaves, weight)
    return jax.tree.unflatten(form, results)


def _array(leaf: Leaf, operation: str) -> Leaf:
    """Numbers as JAX has them; those of a mean are floating, as in World.mean."""
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
    # jax.grad outside jit comes here with plain values.
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
    # Integers have no gradient, and JAX hands in a mark of dtype float0 for them.
    places = [place for place, one in enumerate(cotangents) if one.dtype != jax.dtypes.float0]
    call = "sum", tuple(f"cotangent of {names[place]}" for place in places), 1.0
    results = list(cotangents)
    for place, gradient in zip(places, _differentiable(call, [cotangents[place] for place in places], []), strict=True):
        results[place] = gradient
    return results, []


_differentiable.defvjp(_forward, _backward)
