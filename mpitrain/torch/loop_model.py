"""A prepared model with its optimizer, for the outer steps of rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpitrain.adapters.fits import check_fits
from mpitrain.adapters.torch_arrays import array_of
from mpitrain.adapters.torch_buffers import ModuleBuffers
from mpitrain.adapters.torch_state import check_optimizer_state, optimizer_state, restore_optimizer_state
from mpitrain.adapters.torch_tensors import ModuleTensors
from mpitrain.adapters.torch_trained import Trained
from mpitrain.arrays import Array
from mpitrain.exchange.bucket import Parameter


class LoopModel(ModuleTensors):
    """See LocalModel. The loop makes the steps of the optimizer. This object does not keep the module alive."""

    def __init__(self, trained: Trained, buffers: ModuleBuffers, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(trained, buffers)
        self._optimizer = optimizer
        arrays = {name: array_of(buffers.tensor(name)) for name in buffers.floats}
        self._floats = [Parameter(name, array.shape, array.dtype) for name, array in arrays.items()]

    @property
    def layout(self) -> Sequence[Parameter]:
        """See LocalModel: the trained parameters, then the floating buffers."""
        return [*self._trained.layout, *self._floats]

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """See LocalModel. The changes of buffers are counted from these values."""
        super().load_parameters(values)
        self._buffers.keep([*self._buffers.floats, *self._buffers.others])

    def state(self) -> dict[str, Any]:
        """See LocalModel: `parameters`, and `optimizer` as of `optimizer_state`."""
        return {
            "parameters": self.parameters(),
            "optimizer": optimizer_state(self._optimizer, self._trained.named),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """See LocalModel."""
        check_fits("parameters", state["parameters"], self.parameters())
        check_optimizer_state(self._optimizer, self._trained.named, state["optimizer"])
        restore_optimizer_state(self._optimizer, self._trained.named, state["optimizer"])
        self.load_parameters(state["parameters"])
