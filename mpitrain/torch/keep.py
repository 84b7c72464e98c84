"""keep() for PyTorch loops: model, optimizer and data, and the state that belongs to each rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from mpitrain.adapters.torch_random import random_state, set_random_state
from mpitrain.errors import ConfigError
from mpitrain.job.start import init
from mpitrain.state.keep import KeptPart, KeptState, RankState
from mpitrain.state.packed import pack, unpack
from mpitrain.torch.gradients import Gradients
from mpitrain.torch.local_gradients import LocalGradients
from mpitrain.torch.residuals import OfHook, residuals_of
from mpitrain.torch.sharded import ShardedData
from mpitrain.torch.uncompiled import uncompiled


@uncompiled
def keep(*parts: KeptPart, **values: Any) -> KeptState:
    """Keep a training loop's state in memory that outlives the ranks. This is mpitrain.keep for PyTorch. Collective.

        model, optimizer, data = mpitrain.torch.prepare(model, optimizer, data)
        kept = mpitrain.torch.keep(model, optimizer, data, scheduler)
        for epoch in range(data.epoch, 3):
            for x, y in data:
                ...
                optimizer.step()
                kept.update()

    Loop over `data` only to train, and always to the end: `data.epoch` counts these loops. After the inner loop, use
    only what is kept, because after a restart the loop may have no batch left.

    Under `mpitrain run`, a restart resumes after the newest `update` with a checkpoint, also within an epoch. If the
    number of ranks and their nodes are unchanged, it has the same random numbers (of PyTorch, NumPy and Python, on the
    CPU), and the error-feedback residual.

    Call it after `prepare`, or after DistributedDataParallel and its `register_comm_hook`.

    Args:
        parts: everything that changes in the loop: model, optimizers, schedulers, GradScaler, the data of `prepare` or
            `shard`. Each has state_dict() and load_state_dict(), and the same state on every rank.
        values: see mpitrain.keep.

    Raises:
        ConfigError: a part has no state_dict, or has another state on every rank (FSDP, ZeroRedundancyOptimizer, a
            model with local updates). Or a value has a state_dict, and belongs to the parts.
        CheckpointError: see mpitrain.keep.
    """
    with init().together("keep the state of a loop"):
        for part in parts:
            _check(part)
        if any(isinstance(one, LocalGradients) for one in _residuals_in(parts)):
            raise ConfigError(
                f"{init().name()}: keep() was given a model that prepare() trains with local updates, and each rank "
                "has another state in a round. Train it with mt.Trainer and mt.TorchModule, whose in-memory "
                "checkpoints continue within a round; or save model.state_dict() and residuals(model) to a file"
            )
    names = [type(part).__name__ for part in parts]
    named = {
        name if names.count(name) == 1 else f"{name} {names[: number + 1].count(name)}": part
        for number, (name, part) in enumerate(zip(names, parts, strict=True))
    }
    for residuals in _residuals_in(parts):
        if isinstance(residuals, Gradients) and not any(part is residuals.data for part in parts):
            init().print(
                "mpitrain: keep() was not given the data of prepare(), so a restart begins with the first batch; give "
                "it with the model: keep(model, optimizer, data)"
            )
    if _lacks_scheduler(parts):
        init().print(
            "mpitrain: keep() was not given the scheduler of the optimizer, so a restart begins its schedule again; "
            "give it with the optimizer: keep(model, optimizer, data, scheduler)"
        )
    return KeptState(values, named, TorchRankState(parts))


class TorchRankState(RankState):
    """The random numbers of a rank, and its error-feedback residual."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts, self._residuals = parts, _residuals_in(parts)

    def state(self) -> dict[str, Any]:
        if len(_residuals_in(self._parts)) > len(self._residuals):
            raise ConfigError(
                f"{init().name()}: keep() came before prepare() or before register_comm_hook() of a codec, so "
                "a restart could not restore the codec's residual; call keep() after them"
            )
        residuals = [one.state() for one in self._residuals]
        place = str([init().node_ranks, *(one.get("place") for one in residuals)])
        return {"place": place, **pack("the state of a rank", (random_state(), residuals))}

    def restore(self, state: dict[str, Any] | None) -> None:
        if state is None:
            if any(one.state() for one in self._residuals):
                init().print(
                    "mpitrain: what the codec has not sent of the gradients is not restored, because the "
                    "ranks are placed differently. The next step continues without it"
                )
            for data in self._data():
                data.go_on_as_drawn()
            return
        random, residuals = unpack(state)
        for one, residual in zip(self._residuals, residuals, strict=True):
            if residual:
                one.restore(residual)
        set_random_state(random)
        for data in self._data():
            data.set_random_after(random)

    def _data(self) -> list[ShardedData]:
        return [part for part in self._parts if isinstance(part, ShardedData)]


def _residuals_in(parts: Sequence[Any]) -> list[OfHook | Gradients]:
    """Return the objects that keep the residuals of the models in `parts` that have any, or may have some."""
    kept: list[OfHook | Gradients] = []
    for part in parts:
        if isinstance(part, torch.nn.Module):
            with suppress(ConfigError):  # neither prepared nor with a codec's hook
                kept.append(residuals_of(part))
    return kept


def _lacks_scheduler(parts: Sequence[Any]) -> bool:
    """Whether an optimizer among `parts` has a scheduler, and no part can be that scheduler or hold it."""
    others = (torch.nn.Module, torch.optim.Optimizer, ShardedData, torch.amp.GradScaler)
    return all(isinstance(part, others) for part in parts) and any(
        "initial_lr" in group  # which every scheduler but ReduceLROnPlateau writes there
        for part in parts
        if isinstance(part, torch.optim.Optimizer)
        for group in part.param_groups
    )


def _check(part: Any) -> None:
    """Raise ConfigError unless a part has a state, the same on every rank."""
    kind, name = type(part).__name__, init().name()
    if isinstance(part, DataLoader) and not hasattr(part, "state_dict"):
        raise ConfigError(
            f"{name}: keep() was given a DataLoader, which does not know its position; give it the data of "
            "mpitrain.torch.prepare() or mpitrain.torch.shard(loader), and loop over that"
        )
    if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
        raise ConfigError(
            f"{name}: keep() was given a {kind} without state_dict() and load_state_dict(); give numbers, arrays and "
            "other values by name: keep(model, optimizer, data, best=0.0)"
        )
    if _is_divided(part):
        raise ConfigError(
            f"{name}: each rank has another part of the state of this {kind}, and keep() takes parts that are whole on "
            "every rank, as with DistributedDataParallel and prepare(); save this one with torch.distributed.checkpoint"
        )


def _is_divided(part: Any) -> bool:
    """Whether FSDP or ZeRO has divided a part among the ranks. This is only possible if their modules are loaded."""
    fsdp, optim = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "optim"))
    tensors: list[Any] = []
    if isinstance(part, torch.nn.Module):
        tensors = list(part.parameters())
        if fsdp and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in part.modules()):
            return True
    elif isinstance(part, torch.optim.Optimizer):
        tensors = [parameter for group in part.param_groups for parameter in group["params"]]
        if optim and isinstance(part, optim.ZeroRedundancyOptimizer):
            return True
    return any(hasattr(tensor, "full_tensor") for tensor in tensors)
