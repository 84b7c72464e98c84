"""The division of a TorchModule between servers: whole tensors, as optimizers of PyTorch step whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from mpitrain.adapters.torch_arrays import tensor_of
from mpitrain.adapters.torch_state import plain
from mpitrain.arrays import Array, is_array
from mpitrain.errors import ConfigError
from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.division import Division, divide_whole, owners_of


class TorchParts:
    """The parts of one module for a number of servers.

    Attributes:
        gradients, parameters: see DividedAdapter.divisions.
        number: of the server that this process is; None: it is a worker.
    """

    def __init__(
        self,
        layout: Sequence[Parameter],
        arrays: Mapping[str, Array],
        num_servers: int,
        number: int | None = None,
    ) -> None:
        """
        Args:
            layout: of TorchModule.
            arrays: the parameters of TorchModule by name. Those that `layout` does not have never change by themselves:
                frozen parameters, and buffers that are not floating, which all servers set alike.
        """
        self.number = number
        pulled = [Parameter(name, array.shape, array.dtype) for name, array in arrays.items()]
        moving = {parameter.name for parameter in layout}
        still = [parameter for parameter in pulled if parameter.name not in moving]
        self._owners = {**owners_of(still, num_servers), **owners_of(layout, num_servers)}
        self.gradients = divide_whole(layout, self._owners, num_servers)
        self.parameters: Division = divide_whole(pulled, self._owners, num_servers)

    def owns(self, name: str, number: int | None = None) -> bool:
        """Whether a server, this one by default, has a parameter or buffer."""
        return self._owners[name] == (self.number if number is None else number)

    def views(self, flats: Mapping[numpy.dtype, Array]) -> dict[int, Array]:
        """Return the gradients of this server's part, by index, which share the memory of the part's flat buffers."""
        assert self.number is not None
        layout, part = self.gradients.layout, self.gradients.parts[self.number]
        return {
            index: flats[parameter.dtype][begin - part[parameter.dtype].start :][: end - begin].reshape(parameter.shape)
            for index, (parameter, (begin, end)) in enumerate(zip(layout.parameters, layout.places, strict=True))
            if self.owns(parameter.name)
        }

    def state(
        self,
        number: int,
        arrays: Mapping[str, Array],
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.Tensor],
    ) -> dict[str, Any]:
        """Return parameters, buffers and optimizer state of a server's part, by name."""
        state: dict[str, Any] = {f"model {name}": array for name, array in arrays.items() if self.owns(name, number)}
        for name, parameter in named.items():
            if self.owns(name, number):
                for key, value in optimizer.state.get(parameter, {}).items():
                    state[f"optimizer {key} {name}"] = plain(value)
        return state

    def take(
        self,
        state: Mapping[str, Any],
        gone: Sequence[str],
        arrays: Mapping[str, Array],
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.Tensor],
    ) -> None:
        """The reverse of `state`. What it does not name stays, but for what is `gone`."""
        for entry in [*state, *gone]:
            kind, _, rest = entry.partition(" ")
            if kind == "model":
                array_of_model = arrays[rest]
                array_of_model[...] = state[entry]
                continue
            key, _, name = rest.partition(" ")
            of_parameter = optimizer.state[named[name]]
            if entry in state:
                value = state[entry]
                of_parameter[key] = tensor_of(numpy.array(value)) if is_array(value) else value
            else:
                del of_parameter[key]
                if not of_parameter:
                    del optimizer.state[named[name]]


def check_dividable(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError unless each tensor's step depends on nothing of other tensors."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    problem = ""
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
        problem = f"{kind} is no optimizer of torch.optim, so its step of one tensor may"
    elif optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        problem = f"{kind} has hooks around its step (register_step_pre_hook, register_step_post_hook), which may"
    if problem:
        raise ConfigError(f"{problem} depend on others, which are on other servers. Start one server")
