"""Local updates as functions over pytrees: ranks train on their own for some steps, followed by an outer step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpitrain.allreduce.algorithm import FLOATS
from mpitrain.compression import check_compression, power_sgd
from mpitrain.errors import ConfigError, NonFiniteError, TreeError
from mpitrain.jax.compressed import TreeMeans, check_float32
from mpitrain.jax.inside_jit import is_traced
from mpitrain.jax.leaves import Leaf, PyTree, back, leaves_like, named_leaves, on_host
from mpitrain.job.start import init
from mpitrain.reducer.exchange import OTHERS
from mpitrain.strategies.fragments import cannot_meet


class OuterState(NamedTuple):
    """The state that the functions of `rounds` pass from step to step.

    Attributes:
        common: the parameters of the last outer step; equal on all ranks.
        outer: the state of the outer optimizer; equal on all ranks.
        left_out: this rank's error-feedback residual, in the form of the parameters; () without a codec.
        samples: of this rank since the last outer step.
        steps: since the last outer step; equal on all ranks.
    """

    common: PyTree
    outer: PyTree
    left_out: PyTree
    samples: float
    steps: int


class RoundFunctions(NamedTuple):
    """Three functions; see `rounds`."""

    init: Callable[[PyTree], OuterState]
    update: Callable[..., tuple[PyTree, OuterState]]
    end: Callable[[PyTree, OuterState], tuple[PyTree, OuterState]]


def rounds(sync_every: int, outer: Any = None, *, compression: str = "none") -> RoundFunctions:
    """Return the functions of LocalSGD, or, with an outer optimizer, of DiLoCo.

        rounds = mpitrain.jax.rounds(50, outer=optax.sgd(0.7, momentum=0.9, nesterov=True))
        state = rounds.init(params)
        for x, y in mpitrain.jax.shard(batches):
            params, inner = step(params, inner, x, y)  # this rank alone
            params, state = rounds.update(params, state, len(x))
        params, state = rounds.end(params, state)

    `init(params)` returns an OuterState. The ranks must have equal parameters, and compare a checksum of them.
    `update(params, state, samples)` counts a step with this number of samples of this rank. Every `sync_every` steps an
    outer step follows, and all ranks continue from the same parameters. In between it returns `params`. `end(params,
    state)` ends the round at once: call it after the last step, and before the parameters are evaluated or saved. Every
    rank calls all three, outside jit. Only an outer step and `init` communicate. They do not change their arguments,
    and the state shares no array with the parameters: a step may change these in place, or donate them.

    In an outer step, the outer gradient is the mean over ranks, weighted by samples, of the parameters at the beginning
    of the round minus those at its end. mt.LocalSGD and mt.DiLoCo have the sources.

    Args:
        sync_every: steps of a round, at least 1.
        outer: None: all ranks continue from the mean of their parameters. Or an optimizer with `init(params)` and
            `update(gradients, state, params)`, as in optax. It returns the change to add to the common parameters, and
            the new state.
        compression: how the distances are compressed between nodes: a name in mpitrain.compression.CODECS or "none".

    Raises:
        ConfigError: `sync_every` or `compression` is not allowed.
        TreeError: by the functions: a leaf is not a floating array, or not float32 with a codec; `params` and `state`
            differ in form, shape or dtype; or the call is inside jit.
        MismatchError: the parameters of the ranks differ, in `init` or in their form. Raised on every rank.
        NonFiniteError: a parameter of a rank is NaN or infinite. Names rank and leaf. Raised on every rank.
        DataError: no rank has samples in a round. Raised on every rank.
    """
    if not isinstance(sync_every, int) or isinstance(sync_every, bool) or sync_every < 1:
        raise ConfigError(f"rounds(sync_every={sync_every!r}): it must be an int of at least 1")
    check_compression(compression, OTHERS)
    if compression.partition(":")[0] in (power_sgd.NAME, "auto"):
        raise ConfigError(f"rounds(compression={compression!r}): use a codec, such as int8, or none")
    means = TreeMeans(compression, gradients=False)

    def begin(params: PyTree) -> OuterState:
        names, leaves, form = _checked(params)
        if compression != "none":
            check_float32(f"rounds(compression={compression!r})", names, leaves, 'take compression="none"')
        checksum = 0
        for value in on_host(names, leaves):
            checksum = zlib.crc32(value.tobytes(), checksum)
        text = f"parameters with checksum {checksum:08x} (mpitrain.jax.broadcast gives all ranks those of rank 0)"
        init().agree("begin rounds", [text])
        left = () if compression == "none" else jax.tree.unflatten(form, [jnp.zeros_like(leaf) for leaf in leaves])
        common = _copied(form, leaves)
        return OuterState(common, outer.init(common) if outer else (), left, 0.0, 0)

    def update(params: PyTree, state: OuterState, samples: float) -> tuple[PyTree, OuterState]:
        _checked(params)
        counted = state._replace(samples=float(state.samples) + float(samples), steps=int(state.steps) + 1)
        return end(params, counted) if counted.steps >= sync_every else (params, counted)

    def end(params: PyTree, state: OuterState) -> tuple[PyTree, OuterState]:
        if not state.steps:
            return params, state
        names, leaves, form = _checked(params)
        common = leaves_like(names, leaves, form, state.common, "the state of the rounds")
        gone = [one - other for one, other in zip(common, leaves, strict=True)]
        left = leaves_like(names, leaves, form, state.left_out, "what was left out") if compression != "none" else []
        try:
            mean, rest, _ = means.of(
                names, on_host(names, gone), on_host(names, left) if left else [], float(state.samples)
            )
        except NonFiniteError as error:
            raise cannot_meet(error) from None
        moved, its_outer = _moved(outer, state.outer, names, form, common, back(mean, leaves))
        left_out = jax.tree.unflatten(form, back(rest, leaves)) if left else ()
        return jax.tree.unflatten(form, moved), OuterState(_copied(form, moved), its_outer, left_out, 0.0, 0)

    return RoundFunctions(begin, update, end)


def _copied(form: Any, leaves: Sequence[Leaf]) -> PyTree:
    """A tree with its own arrays: the program may write to the parameters' arrays, or donate them to a step."""
    return jax.tree.unflatten(form, [leaf.copy() for leaf in leaves])


def _moved(
    outer: Any, state: PyTree, names: Sequence[str], form: Any, common: Sequence[Leaf], mean: Sequence[Leaf]
) -> tuple[list[Leaf], PyTree]:
    """The common parameters after an outer step, and the state of the outer optimizer."""
    changes: Sequence[Leaf] = [-one for one in mean]
    if outer:
        gradient, parameters = (jax.tree.unflatten(form, leaves) for leaves in (mean, common))
        updates, state = outer.update(gradient, state, parameters)
        changes = leaves_like(names, common, form, updates, "what the outer optimizer returned", any_dtype=True)
    return [(one + change).astype(one.dtype) for one, change in zip(common, changes, strict=True)], state


def _checked(params: PyTree) -> tuple[tuple[str, ...], list[Leaf], Any]:
    names, leaves, form = named_leaves(params)
    if is_traced(leaves):
        raise TreeError("rounds inside jit: call its functions outside, after the step")
    for name, leaf in zip(names, leaves, strict=True):
        if getattr(leaf, "dtype", None) not in FLOATS:
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            allowed = ", ".join(map(str, FLOATS))
            raise TreeError(f"rounds of {name}: it is {kind}; allowed are arrays of {allowed}")
    return names, leaves, form
