"""Tell `mpitrain verify` of a loop in JAX: the parameters, which are an argument of the function in `mean`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax

from mpitrain.jax.leaves import Leaf, PyTree, named_leaves
from mpitrain.jax.traced import is_traced, tell_in_callback
from mpitrain.job.start import init


def tell_parameters(arguments: Sequence[PyTree], result: PyTree) -> None:
    """Tell `mpitrain verify` of the arguments whose gradients `result` has, under the gradients' names."""
    observer = init().observer
    if observer is None:
        return
    names, _, _ = named_leaves(result)
    named = dict(_gradients(arguments, result, iter(names)))
    if is_traced(list(named.values())):
        tell_in_callback(tuple(named), list(named.values()))
    else:
        observer.saw_parameters(jax.device_get(named))


def _gradients(arguments: Sequence[PyTree], result: PyTree, names: Iterator[str]) -> Iterator[tuple[str, Leaf]]:
    """The leaves of each argument with the form of a part of `result`; the parts are those of tuples in tuples."""
    alike = [argument for argument in arguments if _is_alike(argument, result)]
    leaves = jax.tree.leaves(result)
    if alike and (len(alike) == 1 or alike[0] is arguments[0]):  # more of them: it is the first, as for jax.grad
        yield from zip([next(names) for _ in leaves], jax.tree.leaves(alike[0]), strict=True)
    elif isinstance(result, tuple):
        for part in result:
            yield from _gradients(arguments, part, names)
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
