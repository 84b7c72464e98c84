"""An optimizer of torch.optim with its schedule: the rate of each step, clipping, and the state of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from mpitrain.adapters.torch_checks import check_schedule
from mpitrain.adapters.torch_state import (
    Scheduler,
    check_optimizer_state,
    groups_of,
    optimizer_state,
    read_scheduler_state,
    restore_groups,
    restore_optimizer_state,
    scheduler_state,
)
from mpitrain.errors import CheckpointError
from mpitrain.optim.flat_optimizer import check, global_norm
from mpitrain.optim.schedules import Schedule


class ScheduledOptimizer:
    """TorchModule's optimizer, at the rate of `schedule`, on gradients of at most `clip_norm`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.Tensor],
        schedule: Schedule | Scheduler | None,
        clip_norm: float | None,
    ) -> None:
        """`named` are the module's parameters by name. See TorchModule for the other arguments.

        Raises:
            ConfigError: the schedule or the norm cannot be used here.
        """
        check_schedule(schedule, optimizer)
        if clip_norm is not None:
            check("clip_norm", clip_norm, "None or a finite number > 0", clip_norm > 0)
        self._optimizer, self._named = optimizer, named
        self._schedule, self._clip_norm = schedule, None if clip_norm is None else float(clip_norm)
        self._steps = 0
        self._measures_norm = False
        self._last_norm: float | None = None
        self._norm_of_all: Callable[[float], float] | None = None
        self._given_rate: float | None = None
        self._rate_factor = 1.0

    def step(self, gradients: Sequence[numpy.ndarray]) -> float:
        """Clip, make one step, and return its rate.

        Args:
            gradients: the gradients of all trained parameters, flat, in any number of arrays. They share the memory of
                p.grad. Clipping scales them in place.

        Raises:
            ConfigError: the schedule returns a rate that is not allowed.
        """
        self._clip(gradients)
        rate = self._next_rate() if self._given_rate is None else self._given_rate
        self._given_rate = None
        with self._scaled():
            self._optimizer.step()
        rate *= self._rate_factor
        self._rate_factor = 1.0
        self._steps += 1
        if isinstance(self._schedule, Scheduler):
            self._schedule.step()
        return rate

    def _next_rate(self) -> float:
        """Set the groups' rates for the next step. Return the rate of the first group."""
        groups = self._optimizer.param_groups
        if callable(self._schedule):
            rate = float(self._schedule(self._steps))
            check(f"learning_rate at step {self._steps}", rate, "a finite number >= 0", rate >= 0)
            for group in groups:
                _set_rate(group, rate)
        return float(groups[0]["lr"])

    def scale_next_rate(self, factor: float) -> None:
        """Make the next `step` multiply the rates of all groups by this finite number of at least 0."""
        check("factor of the learning rate", factor, "a finite number >= 0", factor >= 0)
        self._rate_factor = float(factor)

    @contextmanager
    def _scaled(self) -> Iterator[None]:
        """In this context, the groups have the rates of this step. A PyTorch scheduler reads the original rates
        afterwards."""
        groups = self._optimizer.param_groups if self._rate_factor != 1.0 else []
        before = [float(group["lr"]) for group in groups]
        for group, rate in zip(groups, before, strict=True):
            _set_rate(group, rate * self._rate_factor)
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                _set_rate(group, rate)

    def take_norm_of_all(self, norm_of_all: Callable[[float], float]) -> None:
        """From now on, the gradients are those of one server, and `norm_of_all` returns the norm of all servers'
        gradients."""
        self._norm_of_all = norm_of_all

    def divide(self, named: Mapping[str, torch.Tensor], norm_of_all: Callable[[float], float]) -> Callable[[], None]:
        """From now on, the optimizer has these pieces of the parameters, with the gradients of the pieces; see above.

        Return a function that undoes this.
        """
        before = self._named, self._norm_of_all

        def undo() -> None:
            self._named, self._norm_of_all = before

        self._named, self._norm_of_all = named, norm_of_all
        return undo

    def described(self) -> str:
        """Return the class and the current settings."""
        return f"{type(self._optimizer).__name__} {groups_of(self._optimizer)} clip_norm={self._clip_norm}"

    def plan_update(self) -> dict[str, Any]:
        """See DividedAdapter. The plan has all options of the groups, which a schedule or a hook may have set."""
        rate, groups = self._next_rate(), groups_of(self._optimizer)
        plan = {"step": self._steps, "rate": rate, "groups": groups, "measures_norm": self._measures_norm}
        return {**plan, "rate_factor": self._rate_factor}

    def follow_plan(self, plan: Mapping[str, Any]) -> None:
        """See DividedAdapter."""
        restore_groups(self._optimizer, plan["groups"])
        self._steps, self._given_rate, self._measures_norm = plan["step"], plan["rate"], plan["measures_norm"]
        self._rate_factor = plan["rate_factor"]

    def _clip(self, gradients: Sequence[numpy.ndarray]) -> None:
        self._last_norm = None
        if self._clip_norm is None and not self._measures_norm:
            return
        self._measures_norm = False
        wide = (part if part.dtype.itemsize > 2 else part.astype(numpy.float32) for part in gradients)
        norm = math.hypot(*(global_norm(part) for part in wide))
        self._last_norm = norm = norm if self._norm_of_all is None else self._norm_of_all(norm)
        if self._clip_norm is not None and self._clip_norm < norm < math.inf:
            for part in gradients:
                numpy.multiply(part, part.dtype.type(self._clip_norm / norm), out=part)

    def measure_gradient_norm(self) -> None:
        """See Adapter."""
        self._measures_norm = True

    def gradient_norm(self) -> float | None:
        """See Adapter."""
        return self._last_norm

    def state(self) -> dict[str, Any]:
        """Return `optimizer` with `step`, its `groups` and its `state` by parameter; and `schedule`, if there is a
        scheduler of PyTorch."""
        state: dict[str, Any] = {"optimizer": {"step": self._steps, **optimizer_state(self._optimizer, self._named)}}
        if isinstance(self._schedule, Scheduler):
            state["schedule"] = scheduler_state(self._schedule)
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of `state`, which may have further entries.

        Raises:
            CheckpointError: the state belongs to another optimizer or schedule. Nothing has changed.
        """
        optimizer = state["optimizer"]
        check_optimizer_state(self._optimizer, self._named, optimizer)
        if not isinstance(optimizer["step"], int) or optimizer["step"] < 0:
            raise CheckpointError(f"the optimizer's step is {optimizer['step']!r}; allowed: an int >= 0")
        if isinstance(self._schedule, Scheduler):
            schedule = read_scheduler_state(self._schedule, state["schedule"])
            self._schedule.load_state_dict(schedule)
        restore_optimizer_state(self._optimizer, self._named, optimizer)
        self._steps = optimizer["step"]


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
