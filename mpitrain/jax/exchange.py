"""The calls for JAX programs: broadcast, mean, weighted_mean, sum, shard. Outside jit they work on the arrays' own
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy

from mpitrain.errors import TreeError
from mpitrain.jax.inside_jit import StagedCall, is_traced, staged, tell_in_callback
from mpitrain.jax.leaves import Leaf, PyTree, back, named_leaves, on_host
from mpitrain.job.start import init

Result = TypeVar("Result")


def broadcast(tree: PyTree, root: int = 0) -> PyTree:
    """Return `root`'s values in a new pytree on every rank, on the devices of the rank's own values.

    Every rank calls this outside jit. Call it once, before training, with the parameters and the optimizer's state.

    Args:
        tree: any pytree of numbers, and of JAX or NumPy arrays of any dtype and shape. It is not changed. Names, shapes
            and dtypes of the leaves must be equal on all ranks.
        root: the rank whose values are sent.

    Raises:
        MismatchError: the leaves differ. Raised on every rank, before anything is sent.
        TreeError: a leaf cannot be sent, such as PRNG keys; or the call is inside jit.
    """
    names, leaves, form = named_leaves(tree)
    if is_traced(leaves):
        raise TreeError("broadcast inside jit: call it outside, once, before the first step")
    # Do not use World.broadcast: JAX may use this memory for something else.
    results = init().arrays.broadcast(dict(zip(names, on_host(names, leaves), strict=True)), root)
    return jax.tree.unflatten(form, back([results[name] for name in names], leaves))


def mean(function: Callable[..., Result], weight: Any = 1.0) -> Callable[..., Result]:
    """Return a function like `function` whose result is the weighted mean over ranks; see `weighted_mean`.

        step = mpitrain.jax.mean(jax.value_and_grad(loss), weight=lambda params, x, y: len(x))

    The returned function may be called inside jit and outside. All ranks call it together.

    Args:
        function: returns a pytree of floating leaves, such as a loss and gradients.
        weight: this rank's weight, usually its number of samples: a number, or a function of the same arguments that
            returns a number (traced inside jit). The default gives every rank the same weight, which is correct only if
            all ranks have the same number of samples.

    Raises:
        TypeError: `function` is not callable.
    """
    if not callable(function):
        raise TypeError(
            f"mean takes a function, not {type(function).__name__}; of a pytree: weighted_mean(tree, weight)"
        )

    @wraps(function)
    def averaged(*arguments: Any, **named: Any) -> Result:
        share = weight(*arguments, **named) if callable(weight) else weight
        own = function(*arguments, **named)
        _tell_parameters([*arguments, *named.values()], own)
        # On rank 0, a step may be called on another line, for example in a profiler's block.
        with init().same_call("mpitrain.jax.mean"):
            result: Result = weighted_mean(own, share)
        return result

    return averaged


def weighted_mean(tree: PyTree, weight: Any = 1.0) -> PyTree:
    """Return the weighted mean over ranks of every leaf, in a new pytree that is bitwise identical on every rank.

    mean = sum over ranks of weight x leaf, divided by the sum of the weights. All leaves go in one exchange. Call this
    inside jit or outside. It has no derivative: differentiate first, or use `sum`.

    Args:
        tree: any pytree of numbers and floating JAX or NumPy arrays, with the same names, shapes and dtypes on every
            rank. Results are on the devices of the arrays.
        weight: this rank's weight, in samples: a number, or an array without dimensions. With weight 0, this rank's
            values are ignored, even NaN.

    Raises:
        MismatchError: the leaves differ, or ranks make different calls. Raised on every rank.
        TreeError: a leaf has no mean, such as an integer array.
        DataError: a weight is negative or not finite, or all are 0. Raised on every rank.
        jax.errors.JaxRuntimeError: inside jit, in place of MismatchError and DataError, with their text.
        TypeError: the result is differentiated.
    """
    return _exchanged("mean", tree, weight)


def sum(tree: PyTree) -> PyTree:
    """Return the sum over ranks of every leaf, in a new pytree that is bitwise identical on every rank.

    Its derivative in reverse mode is the sum over ranks of the cotangents, so each rank gets the gradient of the sum of
    all ranks' losses. In forward mode it is the sum of the tangents. Leaves may also be integers: arrays wrap on
    overflow, and a number that does not fit is an error. The rest is as for `weighted_mean`.
    """
    return _exchanged("sum", tree, 1.0)


def shard(batches: Iterable[PyTree], start: int = 0) -> Iterator[PyTree]:
    """Yield this rank's part of every batch, like `World.shard`, for any pytrees, including JAX arrays.

    Not collective, but every rank iterates over the same batches. The parts are NumPy arrays, which jitted functions
    accept. They are not copies if the batches are on the CPU. For each new number of samples, jit compiles again; there
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
        weights = [weight] if isinstance(weight, jax.Array) else []
        call = StagedCall(_exchange, operation, tuple(names), None if weights else weight)
        results = staged(call, [_array(leaf, operation) for leaf in leaves], weights)
    else:
        results = back(_exchange(operation, names, on_host(names, leaves), weight), leaves)
    return jax.tree.unflatten(form, results)


def _array(leaf: Leaf, operation: str) -> Leaf:
    """Convert a number to JAX's type for it. Numbers of a mean become floating, as in World.mean."""
    if isinstance(leaf, bool | int) and operation == "mean":
        leaf = float(leaf)
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _exchange(operation: str, names: Sequence[str], values: Sequence[Leaf], weight: Any) -> list[Leaf]:
    """Call World.sum or World.mean, depending on `operation`, with NumPy arrays and numbers by name."""
    world, tree = init(), dict(zip(names, values, strict=True))
    results = world.sum(tree) if operation == "sum" else world.mean(tree, weight)
    return [results[name] for name in names]


def _tell_parameters(arguments: Sequence[PyTree], result: PyTree) -> None:
    """Report to `mpitrain verify` the arguments whose gradients are in `result`, under the gradients' names."""
    observer = init().observer
    if observer is None:
        return
    names, _, _ = named_leaves(result)
    named = dict(_parameters_of(arguments, result, iter(names)))
    if is_traced(list(named.values())):
        tell_in_callback(tuple(named), list(named.values()))
    else:
        observer.saw_parameters(jax.device_get(named))


def _parameters_of(arguments: Sequence[PyTree], result: PyTree, names: Iterator[str]) -> Iterator[tuple[str, Leaf]]:
    """The leaves of each argument with the form of a part of `result`. Nested tuples are split into parts."""
    alike = [argument for argument in arguments if _is_alike(argument, result)]
    leaves = jax.tree.leaves(result)
    if alike and (len(alike) == 1 or alike[0] is arguments[0]):  # of several, the first, as for jax.grad
        yield from zip([next(names) for _ in leaves], jax.tree.leaves(alike[0]), strict=True)
    elif isinstance(result, tuple):
        for part in result:
            yield from _parameters_of(arguments, part, names)
    else:
        for _ in leaves:
            next(names)


def _is_alike(argument: PyTree, result: PyTree) -> bool:
    """True if `result` can be the gradient. A number is not enough, because a loss is a number too."""
    kinds = [
        (form, [(leaf.shape, leaf.dtype) for leaf in leaves if hasattr(leaf, "dtype")])
        for leaves, form in (jax.tree.flatten(argument), jax.tree.flatten(result))
    ]
    return kinds[0] == kinds[1] and any(shape for shape, _ in kinds[0][1])
