"""The division of a TorchModule between servers: whole tensors, because PyTorch's optimizers step whole tensors.

See DividedAdapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch

from mpitrain.adapters.torch_arrays import tensor_of
from mpitrain.adapters.torch_buffers import ModuleBuffers
from mpitrain.adapters.torch_optimizer import ScheduledOptimizer
from mpitrain.adapters.torch_state import plain
from mpitrain.adapters.torch_trained import ModuleTensors, Trained
from mpitrain.arrays import Array, is_array
from mpitrain.errors import ConfigError
from mpitrain.reducer.bucket import Layout, Parameter
from mpitrain.reducer.division import Division, divide_whole, owners_of


class _Parts:
    """The parts of one module for a number of servers.

    Attributes:
        gradients, parameters: see DividedAdapter.divisions.
        number: the number of this server; None: the process is a worker.
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


class DividedModule(ModuleTensors):
    """The part of TorchModule for servers. Each server has the whole module, and updates a part."""

    def __init__(
        self,
        trained: Trained,
        buffers: ModuleBuffers,
        torch_optimizer: Any,
        optimizer: ScheduledOptimizer,
        plan: Layout,
    ) -> None:
        """`torch_optimizer` is of torch.optim. `plan` has the trained parameters, and then the changes of buffers."""
        super().__init__(trained, buffers)
        self._torch_optimizer, self._optimizer, self._plan = torch_optimizer, optimizer, plan
        self._parts: _Parts | None = None  # None: there is at most one server

    @property
    def layout(self) -> Sequence[Parameter]:
        """See Adapter: the trained parameters, then the changes of buffers."""
        return self._plan.parameters

    def divisions(self, num_servers: int) -> tuple[Division, Division]:
        """See DividedAdapter: whole tensors, the largest one first, to the server with the fewest bytes."""
        parts = _Parts(self.layout, self.parameters(), num_servers)
        return parts.gradients, parts.parameters

    def dividable_optimizer(self) -> str:
        """See DividedAdapter.

        Raises:
            ConfigError: the optimizer is none of torch.optim, or has hooks around its step.
        """
        _check_dividable(self._torch_optimizer)
        return self._optimizer.described()

    def update_only(self, number: int, num_servers: int, norm_of_all: Callable[[float], float]) -> None:
        """See DividedAdapter."""
        _check_dividable(self._torch_optimizer)
        self._parts = _Parts(self.layout, self.parameters(), num_servers, number)
        self._optimizer.take_norm_of_all(norm_of_all)

    def plan_update(self) -> dict[str, Any]:
        """See DividedAdapter."""
        return self._optimizer.plan_update()

    def follow_plan(self, plan: Mapping[str, Any]) -> None:
        """See DividedAdapter."""
        self._optimizer.follow_plan(plan)

    def part_state(self, number: int) -> dict[str, Any]:
        """See DividedAdapter: parameters, buffers and the optimizer's state."""
        assert self._parts is not None
        owns = partial(self._parts.owns, number=number)
        state: dict[str, Any] = {f"model {name}": array for name, array in self.parameters().items() if owns(name)}
        for name, parameter in self._trained.named.items():
            if owns(name):
                for key, value in self._torch_optimizer.state.get(parameter, {}).items():
                    state[f"optimizer {key} {name}"] = plain(value)
        return state

    def take_part_state(self, number: int, state: Mapping[str, Any], gone: Sequence[str]) -> None:
        """See DividedAdapter. Entries that the state does not name stay, except those in `gone`."""
        arrays, of_optimizer = self.parameters(), self._torch_optimizer.state
        for entry in [*state, *gone]:
            kind, _, rest = entry.partition(" ")
            if kind == "model":
                array_of_model = arrays[rest]
                array_of_model[...] = state[entry]
                continue
            key, _, name = rest.partition(" ")
            parameter = self._trained.named[name]
            if entry in state:
                value = state[entry]
                of_optimizer[parameter][key] = tensor_of(numpy.array(value)) if is_array(value) else value
            else:
                del of_optimizer[parameter][key]
                if not of_optimizer[parameter]:
                    del of_optimizer[parameter]


def _check_dividable(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError unless the step of each tensor is independent of all other tensors."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    problem = ""
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
        problem = f"{kind} is no optimizer of torch.optim, so its step of one tensor may"
    elif optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        problem = f"{kind} has hooks around its step (register_step_pre_hook, register_step_post_hook), which may"
    if problem:
        raise ConfigError(f"{problem} depend on others, which are on other servers. Start one server")
