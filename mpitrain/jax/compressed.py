"""The mean of gradients, compressed by a codec. The residual is a state that the program passes from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy

from mpitrain.compression import check_compression, power_sgd
from mpitrain.errors import TreeError
from mpitrain.jax.inside_jit import as_callback, is_traced
from mpitrain.jax.leaves import Leaf, PyTree, back, leaves_like, named_leaves, on_host
from mpitrain.job.start import init
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.world.world import World


class PowerSgdState(NamedTuple):
    """The state of `compressed_mean("power_sgd")`.

    Attributes:
        left_out: this rank's error-feedback residual, in the form of the gradients.
        factors: the factors from which the next step continues, by name of the leaf: float32[rank, columns]. Equal on
            all ranks.
    """

    left_out: PyTree
    factors: dict[str, Any]


class CompressedMean(NamedTuple):
    """Two functions, as in an optax transformation; see `compressed_mean`."""

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


def compressed_mean(codec: str) -> CompressedMean:
    """Return the functions of a weighted mean over ranks that sends gradients between nodes as `codec` encodes them.

        mean = mpitrain.jax.compressed_mean("int8")
        left = mean.init(params)
        for x, y in mpitrain.jax.shard(batches):
            value, gradients = loss_and_gradient(params, x, y)
            gradients, left = mean.update(gradients, left, weight=len(x))

    `left` has the form of the gradients, in float32: the error-feedback residual of this rank. `update` adds the
    residual to the gradients before it encodes them, and returns the new one. The residual belongs to this rank: save
    it for each rank, and continue from it with the same ranks on the same nodes, or from zeros. On one node nothing is
    compressed: the residual is sent once, and is 0 from then on. With power_sgd, `left` is a PowerSgdState.

    `init(gradients)` returns zeros. `update(gradients, left, params=None, *, weight=1.0)` is collective, inside jit and
    outside; `params` is ignored. It does not change its arguments. Names, shapes and the codec must be equal on all
    ranks. Inside jit, an error is a jax.errors.JaxRuntimeError with its text.

    Args:
        codec: a name in mpitrain.compression.CODECS, or power_sgd, with its setting if it takes one, as in "top_k:0.05"
            and "power_sgd:2".

    Raises:
        ConfigError: there is no such codec, or it does not have this setting.
        TreeError: by the functions: a leaf is not a float32 array, or `left` differs from the gradients in form, shape
            or dtype.
        NonFiniteError: by `update`: a gradient of a rank holds NaN or infinity. Names the rank. Raised on every rank.
        MismatchError, DataError: by `update`: see `weighted_mean`.
    """
    check_compression(codec)
    has_factors = codec.partition(":")[0] == power_sgd.NAME
    rank = power_sgd.rank_of(codec) if has_factors else 0
    means = TreeMeans(codec, gradients=True)

    def matrices(names: Sequence[str], leaves: Sequence[Leaf]) -> list[power_sgd.Matrix]:
        tensors = zip(names, (tuple(leaf.shape) for leaf in leaves), strict=True)
        return power_sgd.plan(tensors, rank).matrices if has_factors else []

    def zeros(gradients: PyTree) -> PyTree:
        names, leaves, form = named_leaves(gradients)
        check_float32(f"compressed_mean({codec!r})", names, leaves)
        left = jax.tree.unflatten(form, [jnp.zeros_like(leaf) for leaf in leaves])
        factors = {str(one.key): jnp.asarray(power_sgd.first_factor(one)) for one in matrices(names, leaves)}
        return PowerSgdState(left, factors) if has_factors else left

    def update(
        gradients: PyTree,
        left: PyTree,
        params: PyTree = None,  # noqa: ARG001
        *,
        weight: Any = 1.0,
    ) -> tuple[PyTree, PyTree]:
        names, leaves, form = named_leaves(gradients)
        check_float32(f"compressed_mean({codec!r})", names, leaves)
        before, factors = _divided(left) if has_factors else (left, {})
        shapes = {str(one.key): (one.rank, one.columns) for one in matrices(names, leaves)}
        kinds = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
        keys, models, its_form = named_leaves(kinds)
        given = [
            *leaves,
            *leaves_like(names, leaves, form, before, "what was left out"),
            *leaves_like(keys, models, its_form, factors, "the factors of power_sgd"),
        ]
        end, last = len(names), 2 * len(names)

        def work(values: Sequence[numpy.ndarray], weight: Any) -> list[numpy.ndarray]:
            known = dict(zip(keys, values[last:], strict=True))
            mean, rest, known = means.of(names, values[:end], values[end:last], float(weight), known)
            return [*mean, *rest, *(known[key] for key in keys)]

        if is_traced([weight, *given]):
            results = as_callback(work, [jnp.asarray(leaf) for leaf in given], weight)
        else:
            results = back(work(on_host([*names, *names, *keys], given), weight), given)
        mean, rest = jax.tree.unflatten(form, results[:end]), jax.tree.unflatten(form, results[end:last])
        if has_factors:
            return mean, PowerSgdState(rest, jax.tree.unflatten(its_form, results[last:]))
        return mean, rest

    return CompressedMean(zeros, update)


def _divided(state: Any) -> tuple[PyTree, PyTree]:
    if not isinstance(state, PowerSgdState):
        raise TreeError(
            f"{init().name()}: compressed_mean of power_sgd got a {type(state).__name__} as its state; give "
            "the PowerSgdState that its `init` or its last `update` has returned"
        )
    return state.left_out, state.factors


def check_float32(
    call: str, names: Sequence[str], leaves: Sequence[Leaf], otherwise: str = "exchange it with weighted_mean"
) -> None:
    """Raise TreeError unless all leaves are arrays of float32. `otherwise`: the alternative to converting them, for the
    error."""
    for name, leaf in zip(names, leaves, strict=True):
        if getattr(leaf, "dtype", None) != numpy.float32:
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise TreeError(
                f"{init().name()}: {call} of {name}: it is {kind}; codecs take arrays of float32. Convert it, or "
                f"{otherwise}"
            )


class TreeMeans:
    """The means of all trees of one kind. A tree with other names, shapes or dtypes gets its own reducer.

    Reducers stay until the end of the process.
    """

    def __init__(self, compression: str, *, gradients: bool) -> None:
        """`gradients`: the trees are gradients, so `mpitrain verify` compares them and a trace shows them."""
        self._compression, self._gradients = compression, gradients
        self._world: World | None = None
        self._reducers: dict[tuple[Parameter, ...], GradientReducer] = {}

    def of(
        self,
        names: Sequence[str],
        values: Sequence[numpy.ndarray],
        left: Sequence[numpy.ndarray],
        weight: float,
        factors: Mapping[str, numpy.ndarray] | None = None,
    ) -> tuple[list[numpy.ndarray], list[numpy.ndarray], dict[str, numpy.ndarray]]:
        """Return the means over ranks, this rank's error-feedback residual, and the factors. New arrays.

        Collective.

        Args:
            names, values: the leaves on the host.
            left: the residual, like `values`; [] if there is never one.
            weight: of this rank, in samples.
            factors: the factors of power_sgd from the last step, by name; see GradientReducer.factors. None: another
                codec.

        Raises: as GradientReducer.
        """
        reducer = self._reducer_of(names, values)
        if left:
            given = dict(zip(names, left, strict=True))
            reducer.restore({"residual": given})
            if any(one.any() for one in left) and "residual" not in reducer.state():  # on one node: send it once
                reducer.restore({"carried": given})
        if factors:
            reducer.restore_factors(factors)
        reducer.begin(float(weight))
        for index, value in enumerate(values):
            reducer.ready(index, value)
        reducer.finish()
        residual = reducer.state().get("residual") if left else None
        means = [mean.copy() for mean in reducer.gradients]
        rest = [residual[name] for name in names] if residual else [numpy.zeros_like(one) for one in left]
        return means, rest, {**(factors or {}), **reducer.factors()}

    def _reducer_of(self, names: Sequence[str], values: Sequence[numpy.ndarray]) -> GradientReducer:
        world = init()
        if world is not self._world:  # the ranks continue in another World, where the old reducers have no ranks
            self._world, self._reducers = world, {}
        layout = tuple(Parameter(name, one.shape, one.dtype) for name, one in zip(names, values, strict=True))
        if layout not in self._reducers:
            exchange = partial(make_exchange, compression=self._compression)
            seen = world if self._gradients else world.replaced(observer=None)
            self._reducers[layout] = reducer = GradientReducer(seen, layout, exchange=exchange)
            reducer.sends_gradients = self._gradients
        return self._reducers[layout]
