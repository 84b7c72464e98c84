"""OuterParameters: what the ranks had in common when a round began, and how far each has gone since then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import numpy

from mpitrain.adapters.adapter import Adapter
from mpitrain.adapters.fits import check_fits
from mpitrain.arrays import Array, is_device_array, namespace
from mpitrain.cuda.staging import like
from mpitrain.errors import CheckpointError
from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.exchange import Exchange
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.training.optimizers import Optimizer
from mpitrain.world import World

# In what a rank adds to the next outer step: samples x distance, samples, and what a codec has left out of a mean.
_GONE, _SAMPLES, _LEFT_OUT = "gone/", "samples", "left out/"


class OuterParameters:
    """The common parameters. `note` them, train, `exchange` how far the ranks have gone, and `update` them.

    Besides the trained parameters, buffers that change by means over samples, such as running means, take part. For
    those, the outer optimizer is not used.
    """

    def __init__(
        self, world: World, adapter: Adapter, outer: Optimizer | None, exchange: Callable[[World], Exchange]
    ) -> None:
        """Collective.

        Args:
            outer: moves the common parameters. None: they become the mean of the ranks' parameters.
        """
        self._world, self._adapter = world, adapter
        values = adapter.parameters()
        self._names = [parameter.name for parameter in adapter.layout]
        self._carried: dict[str, numpy.ndarray] = {}
        self._optimizers: dict[numpy.dtype, Optimizer] = {}
        parameters = [Parameter(name, values[name].shape, numpy.dtype(values[name].dtype)) for name in self._names]
        on_device = any(is_device_array(values[name]) for name in self._names)
        self._reducer = GradientReducer(world, parameters, exchange=exchange, on_device=on_device)
        self._plan = self._reducer.layout
        self._origin = {dtype: namespace(flat).empty_like(flat) for dtype, flat in self._reducer.flats.items()}
        self._origins = self._plan.named(self._origin)
        # Buffers come last in the layout, so the trained parameters of each dtype begin its flat buffer.
        num_buffers = getattr(adapter, "num_buffers", 0)
        places = list(zip(parameters, self._plan.places, strict=True))[: len(parameters) - num_buffers]
        self._trained = {parameter.dtype: end for parameter, (_, end) in places}
        if outer is not None:
            for dtype, count in self._trained.items():
                self._optimizers[dtype] = of_dtype = deepcopy(outer)
                of_dtype.start(self._origin[dtype][:count], [])

    def note(self) -> None:
        """Begin a round: the parameters of all ranks are equal now."""
        values = self._adapter.parameters()
        for name, origin in self._origins.items():
            origin[...] = values[name]

    def exchange(self, samples: float, all_samples: float) -> None:
        """Make the mean of how far the ranks have gone. Collective. Nothing changes yet.

        Args:
            samples: that this rank has trained with in this round.
            all_samples: the sum over all ranks. If it is 0, no rank has gone anywhere.

        Raises:
            NonFiniteError: a rank's parameters hold NaN or infinity. Raised on every rank, names rank and parameter.
        """
        self._has_gone = all_samples > 0
        if not self._has_gone:
            return
        more = float(self._carried[_SAMPLES]) if _SAMPLES in self._carried else 0.0
        self._reducer.begin(samples + more)
        values = self._adapter.parameters()
        for index in reversed(range(len(self._names))):
            name, gone = self._names[index], self._reducer.gradients[index]
            xp = namespace(gone)
            xp.subtract(self._origins[name], values[name], out=gone)
            if more:
                gone *= gone.dtype.type(samples / (samples + more))
                gone += like(self._carried[_GONE + name], gone) / gone.dtype.type(samples + more)
            self._reducer.ready(index, gone)
        self._reducer.finish()

    def update(self) -> None:
        """Move the common parameters by that mean, and give them to this rank."""
        if not self._has_gone:
            return
        self._carried = {}
        for dtype, mean in self._reducer.flats.items():
            trained = self._trained.get(dtype, 0) if self._optimizers else 0
            if trained:
                self._optimizers[dtype].update(mean[:trained])
            self._origin[dtype][trained:] -= mean[trained:]
        self.go_back()

    def go_back(self) -> None:
        """Give the common parameters to this rank."""
        self._adapter.load_parameters({**self._adapter.parameters(), **self._origins})

    def origin(self) -> dict[str, Array]:
        """Return a copy of the parameters of the last outer step, by name."""
        return {name: origin.copy() for name, origin in self._origins.items()}

    def state(self) -> dict[str, Any]:
        """Return a copy of what the outer optimizer keeps, by dtype and name; {}: there is none."""
        return {str(dtype): deepcopy(optimizer.state()) for dtype, optimizer in self._optimizers.items()}

    def restore(self, outer: Mapping[str, Any], origin: Mapping[str, Array]) -> None:
        """Go on from `state`, and from `origin` in the middle of a round; {}: none.

        Raises:
            CheckpointError: they belong to other parameters. Nothing has changed.
        """
        if origin:
            check_fits("parameters of the last outer step", origin, self._origins)
        if outer:
            if outer.keys() != {str(dtype) for dtype in self._optimizers}:
                raise CheckpointError(
                    f"the outer optimizer's state is for {', '.join(outer) or 'nothing'}; this strategy has one for "
                    f"{', '.join(map(str, self._optimizers)) or 'nothing'}: go on with the strategy of the checkpoint"
                )
            for dtype, optimizer in self._optimizers.items():
                optimizer.restore(outer[str(dtype)])
        for name, value in origin.items():
            self._origins[name][...] = like(value, self._origins[name])

    def own_state(self, samples: float) -> dict[str, dict[str, numpy.ndarray]]:
        """Return, on the host, what this rank adds to the next outer step: `residual`, and `carried` from other ranks.

        Their entries may be added up over ranks. `samples`: those that this rank has trained with in this round.
        """
        codec = self._reducer.state()
        residual = {_LEFT_OUT + name: value for name, value in codec.get("residual", {}).items()}
        carried = self._carried | {_LEFT_OUT + name: value for name, value in codec.get("carried", {}).items()}
        if samples:
            residual[_SAMPLES] = numpy.array(samples)
            values = self._adapter.parameters()
            for name, origin in self._origins.items():
                residual[_GONE + name] = _on_host((origin - values[name]) * origin.dtype.type(samples))
        return {"residual": residual, "carried": carried}

    def restore_own(self, state: Mapping[str, Mapping[str, numpy.ndarray]]) -> None:
        """Go on from an `own_state` of this rank, which has its parameters again; or from `carried` sums alone.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        carried = state.get("carried", {})
        codec = {
            key: {name.removeprefix(_LEFT_OUT): value for name, value in part.items() if name.startswith(_LEFT_OUT)}
            for key, part in state.items()
        }
        self._reducer.restore({key: part for key, part in codec.items() if part})
        self._carried = {name: value for name, value in carried.items() if not name.startswith(_LEFT_OUT)}

    def place(self) -> str:
        """A text that is equal if a rank's codec would leave out the same values."""
        return str(self._reducer.state().get("place", ""))

    def close(self) -> None:
        """Give back the communicator. Collective."""
        self._reducer.close()


def _on_host(value: Array) -> numpy.ndarray:
    host: numpy.ndarray = value.get() if is_device_array(value) else value
    return host
