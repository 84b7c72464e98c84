"""The checks that TorchModule makes before the first step, and of a loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from mpitrain.adapters.torch_state import Scheduler
from mpitrain.errors import ConfigError, DeviceError, GradientError
from mpitrain.optim.schedules import Schedule


def check_plain(module: torch.nn.Module, call: str) -> None:
    """Refuse a module that exchanges its gradients itself. `call` is for the message."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"{call} has got a DistributedDataParallel, which exchanges the gradients of every step itself, so "
            "they would be exchanged twice, and even with local updates. Give its inner module, the attribute "
            "`module`"
        )


def check_places(module: torch.nn.Module) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name} has no shape yet; run a batch through the module first")
        if tensor.device.type != "cpu":
            raise DeviceError(
                f"{name} is on {tensor.device}; TorchModule trains on the CPU. On GPUs, use the module with PyTorch's "
                "own loop and mpitrain.torch, or use ArrayFunction with CuPy"
            )
    kept = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in kept and buffer.is_complex():
            raise ConfigError(
                f"the buffer {name} is {buffer.dtype}; its changes have no mean here. If it never changes, "
                "register it with persistent=False; otherwise register two real buffers"
            )


def check_optimizer(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]
) -> None:
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{kind} computes the loss again within a step (a closure); TorchModule exchanges the gradients of one "
            "backward pass per step. Use another optimizer, such as torch.optim.AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError("SparseAdam needs sparse gradients; TorchModule exchanges dense ones. Use torch.optim.Adam")
    if not trained:
        raise ConfigError("the module has no parameters to train; is requires_grad False for all?")
    known, given = set(named.values()), [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for tensor in given:
        if tensor not in known:
            raise ConfigError(
                f"the optimizer has a parameter of shape {tuple(tensor.shape)} that the module does not have; "
                "register it in the module, otherwise its values would differ between ranks"
            )
    for name, tensor in trained.items():
        if all(tensor is not other for other in given):
            raise ConfigError(
                f"{name} is trained (requires_grad) but not in the optimizer; give it to {kind}, or freeze it with "
                "requires_grad_(False)"
            )


def check_schedule(schedule: Schedule | Scheduler | None, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError("ReduceLROnPlateau needs a metric, which a step does not have; call it in a hook of your own")
    if isinstance(schedule, Scheduler):
        if schedule.optimizer is not optimizer:
            raise ConfigError("the schedule belongs to another optimizer; make one for this optimizer")
    elif schedule is not None:
        rates = {float(group["lr"]) for group in optimizer.param_groups}
        if not callable(schedule) or len(rates) > 1:
            raise ConfigError(
                f"schedule is {schedule!r}, for groups with the rates {', '.join(map(str, sorted(rates)))}; a function "
                "of the step sets one rate for all groups. Use a scheduler of torch.optim.lr_scheduler, which sets one "
                "for each"
            )


def checked_loss(loss: Any) -> Any:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        kind = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise GradientError(f"the loss is {kind}; it must be a tensor of one number: the mean over the samples")
    if not loss.requires_grad:
        raise GradientError("the loss depends on no parameter; was it computed under torch.no_grad(), or detached?")
    return loss if loss.dtype == torch.float64 else loss.float()  # a scaled loss may be too large for 16 bits
