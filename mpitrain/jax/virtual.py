"""Virtual ranks for JAX: a mean over the samples of a batch, bitwise identical on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy

from mpitrain.collectives.trees import aligned_copy
from mpitrain.errors import DataError, TreeError
from mpitrain.jax.inside_jit import is_traced
from mpitrain.jax.leaves import PyTree, back, named_leaves, on_host
from mpitrain.job.start import init
from mpitrain.strategies.virtual_ranks import VirtualRanks, check_virtual_ranks, digest_of, probe
from mpitrain.world.world import World

Result = TypeVar("Result")
_CALL = "virtual_mean"


def virtual_mean(
    function: Callable[[Any, Any, Any], Result], virtual_ranks: int, seed: int = 0
) -> Callable[[Any, Any, int], Result]:
    """Return a function of a whole batch whose result is bitwise identical on 1 to `virtual_ranks` ranks.

        loss_and_gradient = mpitrain.jax.virtual_mean(jax.jit(jax.value_and_grad(loss)), 8)
        for number, batch in enumerate(batches):
            value, gradient = loss_and_gradient(params, batch, number)

    The batch is cut into `virtual_ranks` parts, each rank computes its parts one after the other, and the exact sum of
    the results, each times its share of the samples, is rounded once. Every rank calls the returned function
    `averaged(params, batch, step)` outside jit:

    - params: any pytree, with the same bits on every rank.
    - batch: the batch of all ranks together, the same on every rank: a pytree of arrays with the samples along the
      first dimension. A rank reads only its own samples; if it has none, the first part.
    - step: its number, an int of at least 0, the same on every rank. It changes the key.

    At the first call, every rank also computes rank 0's first part two or three times, and the ranks compare the bits.
    XLA's threads are set by PJRT_NPROC: give it the same value in every run. See docs/explanation/numerics.md.

    Args:
        function: `function(params, part, key)` returns a pytree of floating leaves, each a mean over the samples of a
            part, such as a loss and gradients, or the running means of batch norm. `key` is a key of jax.random that
            depends on the seed, the step and the number of the part alone. Jit it.
        virtual_ranks: the number of parts, at least the number of ranks.
        seed: of the keys, at least 0.

    The returned function raises:
        ConfigError: the virtual ranks cannot be divided between the ranks. Raised on every rank.
        MismatchError: the ranks call it with different steps or batches, or results differ in form. Raised on every
        rank. DataError: the batch has no samples, or its arrays differ in length; or the step is not such a number.
        TreeError: a result is not floating; or the call is inside jit. GradientError: ranks do not compute the same
        bits of the same samples. Raised on every rank.
    """
    virtual = VirtualRanks(virtual_ranks, seed)
    begun: list[World] = []

    def averaged(params: PyTree, batch: PyTree, step: int) -> Result:
        world = init()
        leaves, form = jax.tree.flatten(batch)
        if is_traced([*leaves, *jax.tree.leaves(params)]):
            raise TreeError(f"{_CALL} inside jit: jit the function that it gets, and call it outside")
        if world not in begun:
            check_virtual_ranks(world, virtual, call=_CALL)
        length = _length(world, leaves, step)
        world.agree("begin a step of virtual ranks", [f"step {step}, {length} samples"])

        def arguments(number: int) -> tuple[Any, Any, Any]:
            part = virtual.part(length, length, number)
            samples = [aligned_copy(numpy.asarray(leaf[part])) for leaf in leaves]
            return params, jax.tree.unflatten(form, samples), _key(virtual, step, number)

        if world not in begun:
            threads = f"XLA {os.environ.get('PJRT_NPROC', 'as many as cores')}"
            probe(world, lambda: _digests(function(*arguments(0))), threads)
            begun[:] = [world]
        counts, results = [], []
        for number in virtual.of_rank(world):
            part = virtual.part(length, length, number)
            counts.append(part.stop - part.start)
            if counts[-1]:
                results.append(function(*arguments(number)))
        if not results:  # this rank has no samples: a result of the same form, which does not count
            results = [function(*arguments(0))]
        names, models, result_form = named_leaves(results[0])
        trees = [dict(zip(names, on_host(names, jax.tree.leaves(one)), strict=True)) for one in results]
        weights = [count / length for count in counts if count] or [0.0]
        means = world.arrays.weighted_sum(trees, weights)
        result: Result = jax.tree.unflatten(result_form, back([means[name] for name in names], models))
        return result

    return averaged


def _digests(result: PyTree) -> dict[str, str]:
    names, leaves, _ = named_leaves(result)
    digests: dict[str, str] = {}
    for name, leaf in zip(names, on_host(names, leaves), strict=True):
        digests |= digest_of(f"the result {name}", numpy.asarray(leaf))
    return digests


def _key(virtual: VirtualRanks, step: int, number: int) -> Any:
    """A key of jax.random that depends only on these numbers."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(virtual.seed), step), number)


def _length(world: World, leaves: list[Any], step: Any) -> int:
    """Return the number of samples of a batch. Raises DataError: see virtual_mean."""
    if not isinstance(step, int | numpy.integer) or isinstance(step, bool) or step < 0:
        raise DataError(
            f"{world.name()}: {_CALL}: step={step!r}; it must be an int of at least 0, the same on all ranks"
        )
    lengths = sorted({len(leaf) if getattr(leaf, "ndim", 0) else -1 for leaf in leaves})
    if len(lengths) != 1 or lengths[0] < 1:
        raise DataError(
            f"{world.name()}: {_CALL}: the arrays of a batch have {lengths} samples along the first dimension (-1: "
            "none); they must have the same number, at least 1"
        )
    return lengths[0]
