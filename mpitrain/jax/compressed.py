"""The mean of gradients in the form of a codec. What it leaves out is a state that the program hands on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy

from mpitrain.compression import check_compression, power_sgd
from mpitrain.errors import ConfigError, TreeError
from mpitrain.jax.leaves import Leaf, PyTree, back, leaves_like, named_leaves, on_host
from mpitrain.jax.traced import as_callback, is_traced
from mpitrain.jax.tree_means import TreeMeans
from mpitrain.job.start import init


class CompressedMean(NamedTuple):
    """Two functions, as of a transformation in optax; see `compressed_mean`."""

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


def compressed_mean(codec: str) -> CompressedMean:
    """Return the functions of a weighted mean over ranks that sends gradients between nodes as `codec` encodes them.

        mean = mpitrain.jax.compressed_mean("int8")
        left = mean.init(params)
        for x, y in mpitrain.jax.shard(batches):
            value, gradients = loss_and_gradient(params, x, y)
            gradients, left = mean.update(gradients, left, weight=len(x))

    `left` has the form of the gradients, in float32: what the codec has left out on this rank so far. `update` adds it
    to the gradients before it encodes them, and returns the new one. It belongs to this rank: save it for each rank,
    and go on from it with the same ranks on the same nodes, or from zeros. On one node nothing is compressed: it is
    sent once, and is 0 from then on.

    `init(gradients)` returns zeros. `update(gradients, left, params=None, *, weight=1.0)` is collective, inside jit and
    outside; `params` is ignored. It changes none of its arguments. Their names, shapes and the codec are equal on all
    ranks. Inside jit, an error is a jax.errors.JaxRuntimeError with its text.

    Args:
        codec: a name in mpitrain.compression.CODECS, with its setting if it takes one, as in "top_k:0.05".

    Raises:
        ConfigError: there is no such codec; or it is power_sgd, whose state has other forms than the gradients.
        TreeError: by the functions: a leaf is not a float32 array, or `left` differs from the gradients in form, shape
            or dtype.
        NonFiniteError: by `update`: a gradient of a rank holds NaN or infinity. Names the rank. Raised on every rank.
        MismatchError, DataError: by `update`: see `weighted_mean`.
    """
    check_compression(codec)
    if codec.partition(":")[0] == power_sgd.NAME:
        raise ConfigError(
            f"{init().name()}: compressed_mean({codec!r}): power_sgd also keeps factors, which do not have the form of "
            "the gradients. Use another codec, such as int8 or top_k"
        )
    means = TreeMeans(codec, gradients=True)

    def zeros(gradients: PyTree) -> PyTree:
        names, leaves, form = named_leaves(gradients)
        check_float32(f"compressed_mean({codec!r})", names, leaves)
        return jax.tree.unflatten(form, [jnp.zeros_like(leaf) for leaf in leaves])

    def update(
        gradients: PyTree,
        left: PyTree,
        params: PyTree = None,  # noqa: ARG001
        *,
        weight: Any = 1.0,
    ) -> tuple[PyTree, PyTree]:
        names, leaves, form = named_leaves(gradients)
        check_float32(f"compressed_mean({codec!r})", names, leaves)
        both = [*leaves, *leaves_like(names, leaves, form, left, "what was left out")]

        def work(values: Sequence[numpy.ndarray], weight: Any) -> list[numpy.ndarray]:
            mean, rest = means.of(names, values[: len(names)], values[len(names) :], float(weight))
            return [*mean, *rest]

        if is_traced([weight, *both]):
            results = as_callback(work, [jnp.asarray(leaf) for leaf in both], weight)
        else:
            results = back(work(on_host([*names, *names], both), weight), both)
        return jax.tree.unflatten(form, results[: len(names)]), jax.tree.unflatten(form, results[len(names) :])

    return CompressedMean(zeros, update)


def check_float32(
    call: str, names: Sequence[str], leaves: Sequence[Leaf], otherwise: str = "exchange it with weighted_mean"
) -> None:
    """Raise TreeError unless all leaves are arrays of float32. `otherwise`: what else to do than to convert them."""
    for name, leaf in zip(names, leaves, strict=True):
        if getattr(leaf, "dtype", None) != numpy.float32:
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise TreeError(
                f"{init().name()}: {call} of {name}: it is {kind}; codecs take arrays of float32. Convert it, or "
                f"{otherwise}"
            )
