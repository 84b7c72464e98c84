"""A PyTorch module whose parameters several servers divide; see DividedAdapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpitrain.adapters.torch_buffers import ModuleBuffers
from mpitrain.adapters.torch_optimizer import ScheduledOptimizer
from mpitrain.adapters.torch_parts import TorchParts, check_dividable
from mpitrain.adapters.torch_tensors import ModuleTensors
from mpitrain.adapters.torch_trained import Trained
from mpitrain.exchange.bucket import Layout, Parameter
from mpitrain.exchange.division import Division


class DividedModule(ModuleTensors):
    """The part of TorchModule for servers. Each has the whole module, and updates a part."""

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
        self._parts: TorchParts | None = None  # None: there is one server, or none

    @property
    def layout(self) -> Sequence[Parameter]:
        """See Adapter: the trained parameters, then the changes of buffers."""
        return self._plan.parameters

    def divisions(self, num_servers: int) -> tuple[Division, Division]:
        """See DividedAdapter: whole tensors, the largest one first, to the server with the fewest bytes."""
        parts = TorchParts(self.layout, self.parameters(), num_servers)
        return parts.gradients, parts.parameters

    def dividable_optimizer(self) -> str:
        """See DividedAdapter.

        Raises:
            ConfigError: the optimizer is none of torch.optim, or has hooks around its step.
        """
        check_dividable(self._torch_optimizer)
        return self._optimizer.described()

    def update_only(self, number: int, num_servers: int, norm_of_all: Callable[[float], float]) -> None:
        """See DividedAdapter."""
        check_dividable(self._torch_optimizer)
        self._parts = TorchParts(self.layout, self.parameters(), num_servers, number)
        self._optimizer.take_norm_of_all(norm_of_all)

    def plan_update(self) -> dict[str, Any]:
        """See DividedAdapter."""
        return self._optimizer.plan_update()

    def follow_plan(self, plan: Mapping[str, Any]) -> None:
        """See DividedAdapter."""
        self._optimizer.follow_plan(plan)

    def part_state(self, number: int) -> dict[str, Any]:
        """See DividedAdapter."""
        assert self._parts is not None
        return self._parts.state(number, self.parameters(), self._torch_optimizer, self._trained.named)

    def take_part_state(self, number: int, state: Mapping[str, Any], gone: Sequence[str]) -> None:
        """See DividedAdapter."""
        assert self._parts is not None
        self._parts.take(state, gone, self.parameters(), self._torch_optimizer, self._trained.named)
