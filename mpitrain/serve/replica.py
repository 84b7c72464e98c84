"""The parameters of a worker, as they were pulled from the servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from mpitrain.adapters.adapter import Adapter
from mpitrain.errors import MismatchError
from mpitrain.exchange.division import counts_of
from mpitrain.serve.store import divisions_of


class Replica:
    """A copy of the parameters. Each part of it comes from one server.

    Attributes:
        versions: of the parts, by server; -1: none has come.
    """

    def __init__(self, adapter: Adapter, num_servers: int = 1) -> None:
        self._adapter = adapter
        _, division = divisions_of(adapter, num_servers)
        self._plan, self._parts = division.layout, division.parts
        self._flats = {dtype: numpy.empty(count, dtype) for dtype, count in self._plan.counts.items()}
        self._has_changed = False
        self.versions = [-1] * num_servers

    def forget(self) -> None:
        """Take in that the servers are others now."""
        self.versions = [-1] * len(self.versions)

    def take(self, fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray], server: int = 0) -> None:
        """Take in a result of `ParameterStore.since` of a server. `load` must follow.

        Raises:
            MismatchError: it belongs to other parameters. The parameters have not changed.
        """
        runs, part = fields["runs"], self._parts[server]
        flats = {str(dtype): self._flats[dtype][own] for dtype, own in part.items()}
        if len(runs) != len(arrays):
            raise MismatchError(f"the server has sent {len(arrays)} arrays of parameters for {len(runs)} dtypes")
        for (name, of_dtype), array in zip(runs.items(), arrays, strict=True):
            flat, count = flats.get(name), sum(end - begin for begin, end in of_dtype)
            if flat is None or array.dtype != flat.dtype or array.shape != (count,):
                raise MismatchError(
                    f"the server has sent parameters {array.dtype}{array.shape}; allowed are {name}({count},) of "
                    f"{', '.join(f'{one}({size},)' for one, size in counts_of(part).items())}"
                )
            if not all(0 <= begin <= end <= flat.size for begin, end in of_dtype):
                raise MismatchError(f"the server has sent parameters beyond {name}({flat.size},): {of_dtype}")
        for (name, of_dtype), array in zip(runs.items(), arrays, strict=True):
            done = 0
            for begin, end in of_dtype:
                flats[name][begin:end] = array[done : done + end - begin]
                done += end - begin
        self._has_changed |= bool(runs)
        self.versions[server] = fields["version"]

    def load(self) -> None:
        """Give the parameters to the model, if some have come."""
        if self._has_changed:
            self._adapter.load_parameters(self._plan.named(self._flats))
        self._has_changed = False
