"""Weighted means of pytrees by a GradientReducer, which can compress them and names a rank with NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy

from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.exchange import make_exchange
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.job.start import init
from mpitrain.world import World


class TreeMeans:
    """The means of all trees of one kind. A tree with other names, shapes or dtypes gets a reducer of its own.

    A reducer stays until the end of the process.
    """

    def __init__(self, compression: str, *, gradients: bool) -> None:
        """`gradients`: the trees are gradients, which `mpitrain verify` compares and a trace shows."""
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
        """Return the means over ranks, what the codec has left out on this rank, and the factors. New arrays.

        Collective.

        Args:
            names, values: the leaves on the host.
            left: what was left out so far, like `values`; [] if nothing ever is.
            weight: of this rank, in samples.
            factors: where power_sgd goes on from the last step, by name; see GradientReducer.factors. None: another
                codec.

        Raises: what GradientReducer raises.
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
        if world is not self._world:  # the ranks go on in another World, where the old reducers have no ranks
            self._world, self._reducers = world, {}
        layout = tuple(Parameter(name, one.shape, one.dtype) for name, one in zip(names, values, strict=True))
        if layout not in self._reducers:
            exchange = partial(make_exchange, compression=self._compression)
            seen = world if self._gradients else replace(world, observer=None)
            self._reducers[layout] = reducer = GradientReducer(seen, layout, exchange=exchange)
            reducer.sends_gradients = self._gradients
        return self._reducers[layout]
