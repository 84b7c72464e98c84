"""Parameters, optimizer states and Python objects from one rank to all, and objects from all ranks to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from mpitrain.horovod.process_sets import ProcessSet, global_process_set
from mpitrain.horovod.state import current
from mpitrain.horovod.torch import moving
from mpitrain.horovod.torch.submission import synchronize


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Replace tensors by those of `root_rank`. All ranks of the job call this.

    Args:
        params: a state_dict, or a list of tensors or of pairs of name and tensor, such as `model.named_parameters()`.
        root_rank: the rank whose values are sent.

    Raises:
        ValueError: `params` is something else.
        HorovodInternalError: the ranks' tensors differ in name, shape or dtype.
    """
    if isinstance(params, dict):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(
            f"{current().world.name()}: broadcast_parameters takes a state_dict or a list of tensors, not "
            f"{type(params).__name__}"
        )
    handles = [
        moving.broadcast_async_(tensor.data, root_rank, None if name is None else f"parameter.{name}")
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,  # noqa: ARG001 - Horovod's scripts give it
) -> None:
    """Replace the state and the options of an optimizer, such as the learning rate, by those of `root_rank`.

    All ranks of the job call this. If the optimizer of `root_rank` has no state yet, parameters without a gradient get
    one of zeros, as with Horovod.

    Args:
        optimizer: an optimizer of torch, or what DistributedOptimizer returns.
        root_rank: the rank whose state is sent.
        model: ignored; Horovod needs it for sparse gradients.

    Raises:
        ValueError: the optimizer is an LBFGS, whose state is nested; or this rank's optimizer has other parameters.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{current().world.name()}: the state of torch.optim.LBFGS cannot be broadcast; send "
            "optimizer.state_dict() with broadcast_object"
        )
    state = optimizer.state_dict()
    is_root = current().world.rank == root_rank
    tensors: list[tuple[str, torch.Tensor]] = []
    plan = broadcast_object(_planned(state, tensors) if is_root else None, root_rank, "optimizer.state")
    if not is_root:
        state = _made(plan, tensors)
    broadcast_parameters(tensors, root_rank)
    if not is_root:
        optimizer.load_state_dict(state)
    if not state["state"]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


class _TensorPlace(NamedTuple):
    """Stands for a tensor in a state that is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def _planned(value: Any, tensors: list[tuple[str, torch.Tensor]]) -> Any:
    """The same nesting with places for its tensors, which are added to `tensors`."""
    if isinstance(value, torch.Tensor):
        place = _TensorPlace(f"optimizer.{len(tensors)}", tuple(value.shape), value.dtype, value.device.type)
        tensors.append((place.name, value))
        return place
    if isinstance(value, dict):
        return {key: _planned(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list):
        return [_planned(inner, tensors) for inner in value]
    return value


def _made(value: Any, tensors: list[tuple[str, torch.Tensor]]) -> Any:
    """The same nesting with new tensors in their places, which are added to `tensors`."""
    if isinstance(value, _TensorPlace):
        tensors.append((value.name, torch.empty(value.shape, dtype=value.dtype, device=value.device)))
        return tensors[-1][1]
    if isinstance(value, dict):
        return {key: _made(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list):
        return [_made(inner, tensors) for inner in value]
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of `root_rank`, a rank of the job, on all ranks of a set, by pickle.

    The object of the other ranks is ignored. `root_rank` gets its own object back.
    """
    of_length, of_content = _names(name)
    is_root = current().world.rank == root_rank
    content = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8) if is_root else torch.empty(0)
    length = torch.tensor([content.numel()])
    synchronize(moving.broadcast_async_(length, root_rank, of_length, process_set))
    if not is_root:
        content = torch.empty(int(length), dtype=torch.uint8)
    synchronize(moving.broadcast_async_(content, root_rank, of_content, process_set))
    return obj if is_root else pickle.loads(content.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks of a set, in rank order and by pickle."""
    of_length, of_content = _names(name)
    content = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    lengths = synchronize(moving.allgather_async(torch.tensor([content.numel()]), of_length, process_set))
    whole = synchronize(moving.allgather_async(content, of_content, process_set))
    return [pickle.loads(part.numpy().tobytes()) for part in whole.split(lengths.tolist())]


def _names(name: str | None) -> tuple[str | None, str | None]:
    """The names of the two calls for an object. By default they have none: the ranks' objects may differ in type."""
    return (None, None) if name is None else (f"object.{name}.length", f"object.{name}")
