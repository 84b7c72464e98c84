"""The tensors of a PyTorch module by name, as a LocalModel has them."""

from __future__ import annotations

from collections.abc import Mapping

from mpitrain.adapters.torch_arrays import array_of
from mpitrain.adapters.torch_buffers import ModuleBuffers
from mpitrain.adapters.torch_trained import Trained
from mpitrain.arrays import Array


class ModuleTensors:
    """The common part of TorchModule and of the model of a prepared loop."""

    def __init__(self, trained: Trained, buffers: ModuleBuffers) -> None:
        self._trained, self._buffers = trained, buffers

    @property
    def num_buffers(self) -> int:
        """See LocalModel.layout."""
        return len(self._buffers.floats)

    def parameters(self) -> dict[str, Array]:
        """See LocalModel: by the names of the module's `state_dict`, with frozen parameters and persistent buffers."""
        named = self._trained.named.items()
        return {**{name: array_of(parameter) for name, parameter in named}, **self._buffers.arrays()}

    def load_parameters(self, values: Mapping[str, Array]) -> None:
        """See LocalModel."""
        for name, array in self.parameters().items():
            array[...] = values[name]
