"""An optimizer's state by parameter name, in nested dicts of arrays and numbers, and back.

PyTorch's own `state_dict` numbers the parameters, in the order in which the script passed them. Here as there, the
options of a group (its rate, momentum, decay) belong to the state, because schedulers and some optimizers keep their
state in them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy
import torch

from mpitrain.adapters.torch_arrays import array_of, tensor_of
from mpitrain.arrays import is_array
from mpitrain.errors import CheckpointError

Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler


def optimizer_state(optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return `groups`, the options by group number, and `state` by parameter name; its arrays share tensors' memory.

    Raises:
        CheckpointError: the optimizer keeps a state that belongs to none of the parameters `named`.
    """
    names = {parameter: name for name, parameter in named.items()}
    unknown = [key for key in optimizer.state if key not in names]
    if unknown:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps a state under {str(unknown[0])[:60]!r}, which is not a parameter of the "
            "module; a checkpoint holds state by parameter"
        )
    return {
        "groups": groups_of(optimizer),
        "state": {
            names[parameter]: {key: plain(value) for key, value in entry.items()}
            for parameter, entry in optimizer.state.items()
        },
    }


def check_optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], state: Mapping[str, Any]
) -> None:
    """Raise CheckpointError unless `state` belongs to such an optimizer for these parameters."""
    kind = type(optimizer).__name__
    groups = state["groups"]
    if groups.keys() != {str(number) for number in range(len(optimizer.param_groups))}:
        raise CheckpointError(
            f"the checkpoint has {len(groups)} groups of parameters, this {kind} {len(optimizer.param_groups)}; "
            "is it a checkpoint of this training?"
        )
    for number, group in enumerate(optimizer.param_groups):
        for option in groups[str(number)]:
            if option not in group:
                raise CheckpointError(
                    f"the checkpoint's optimizer has an option {option}, this {kind} has none; "
                    "is it the same optimizer with the same kind of schedule?"
                )
    for name, entry in state.get("state", {}).items():
        if name not in named:
            raise CheckpointError(f"the checkpoint has optimizer state for {name}; the module has no such parameter")
        own = {key: plain(value) for key, value in optimizer.state.get(named[name], {}).items()}
        if own and {key: numpy.shape(value) for key, value in own.items()} != {
            key: numpy.shape(value) for key, value in entry.items()
        }:
            raise CheckpointError(
                f"the checkpoint's optimizer state for {name} is {', '.join(entry)}, that of this {kind} "
                f"{', '.join(own)}, or of another shape; is it the same optimizer?"
            )


def restore_optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], state: Mapping[str, Any]
) -> None:
    """Reverse `optimizer_state`; `state` is copied. Call check_optimizer_state first."""
    restore_groups(optimizer, state["groups"])
    kept = state.get("state", {})
    for name, parameter in named.items():
        optimizer.state.pop(parameter, None)
        if name in kept:
            optimizer.state[parameter] = {
                key: tensor_of(numpy.array(value)) if is_array(value) else value for key, value in kept[name].items()
            }


def groups_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return `groups` of an `optimizer_state`, as JSON values."""
    return {str(number): _options(group) for number, group in enumerate(optimizer.param_groups)}


def restore_groups(optimizer: torch.optim.Optimizer, groups: Mapping[str, Any]) -> None:
    """Set the options of an optimizer's groups to those in `groups` of an `optimizer_state`."""
    for number, group in enumerate(optimizer.param_groups):
        for option, value in groups[str(number)].items():
            if isinstance(group[option], torch.Tensor):
                group[option].fill_(value)
            else:
                group[option] = tuple(value) if isinstance(group[option], tuple) else value


def state_bytes(state: Any) -> numpy.ndarray:
    """Return a state_dict() of PyTorch as the bytes of `torch.save`, uint8, as a checkpoint can hold them."""
    file = io.BytesIO()
    torch.save(state, file)
    return numpy.frombuffer(file.getvalue(), numpy.uint8)


def read_state_bytes(content: Any, part: str, reader: str) -> Any:
    """Reverse `state_bytes`, without running code of the content. `part` and `reader` are for the error.

    Raises:
        CheckpointError: the content is not such a state.
    """
    try:
        return torch.load(io.BytesIO(numpy.asarray(content, numpy.uint8).tobytes()), weights_only=True)
    except Exception as error:  # unpickling may raise anything
        raise CheckpointError(f"the checkpoint's {part} cannot be read for {reader}: {error}") from None


def scheduler_state(scheduler: Scheduler) -> numpy.ndarray:
    """Return the whole state of a PyTorch scheduler, as `state_bytes`."""
    return state_bytes(scheduler.state_dict())


def read_scheduler_state(scheduler: Scheduler, state: Any) -> dict[str, Any]:
    """Return the argument for `scheduler.load_state_dict`.

    Raises:
        CheckpointError: the state does not belong to such a scheduler.
    """
    kind = type(scheduler).__name__
    read = read_state_bytes(state, "schedule", kind)
    keys = set(read) if isinstance(read, dict) else set()
    if keys != scheduler.state_dict().keys():
        raise CheckpointError(f"the checkpoint's schedule holds {', '.join(sorted(keys))}; is it a {kind}?")
    return dict(read)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among a group's options; no other option can change."""
    values = {name: _option(plain(value)) for name, value in group.items() if name != "params"}
    return {name: value for name, value in values.items() if _is_number(value) or _are_numbers(value)}


def _option(value: Any) -> Any:
    """Return a number of NumPy, or of a tensor, as a Python number. A schedule or a script may set an option to one."""
    if isinstance(value, list | tuple):
        return [_option(entry) for entry in value]
    return value.item() if isinstance(value, numpy.generic) or (is_array(value) and value.size == 1) else value


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_number(entry) for entry in value)


def plain(value: Any) -> Any:
    """Return a tensor as an array over its memory, and any other value unchanged."""
    return array_of(value) if isinstance(value, torch.Tensor) else value
