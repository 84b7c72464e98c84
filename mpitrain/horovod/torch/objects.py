"""Broadcasts of parameters, optimizer states and Python objects, and an allgather of objects."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import numpy
import torch

from mpitrain.adapters.torch_arrays import tensor_of
from mpitrain.allreduce.algorithm import Progress
from mpitrain.arguments import pickled
from mpitrain.collectives import moves
from mpitrain.horovod.elastic.torch_state import on_host
from mpitrain.horovod.named_call import Details, NamedCall
from mpitrain.horovod.process_sets import (
    ProcessSet,
    barrier,
    current,
    global_process_set,
    refused_by_all,
    submit,
)
from mpitrain.horovod.torch.calls import begin_allgather, begin_broadcast, root_of
from mpitrain.state.packed import pack, unpack

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Replace tensors by those of `root_rank`. All ranks of the job call this.

    Args:
        params: a state_dict, or a list of tensors or of pairs of name and tensor, such as `model.named_parameters()`.
        root_rank: the rank whose values are sent.

    Raises:
        ValueError: `params` is something else.
        HorovodInternalError: the ranks' tensors differ in name, shape or dtype.
    """
    with refused_by_all("barrier", None, global_process_set):
        if isinstance(params, dict):
            pairs = sorted(params.items())
        elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
            pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
        else:
            raise ValueError(
                f"broadcast_parameters takes a state_dict or a list of tensors, not {type(params).__name__}"
            )
    barrier()  # a rank that fails before the calls reports it here
    handles = [
        begin_broadcast(
            tensor.data, root_rank, None if name is None else f"parameter.{name}", global_process_set, in_place=True
        )
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        handle.ended()


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
    is_root = current().world.rank == root_rank
    packed: dict[str, Any] = {}
    plan: Any = None
    with refused_by_all("broadcast_object", "optimizer.state", global_process_set):
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "the state of torch.optim.LBFGS cannot be broadcast; send optimizer.state_dict() with broadcast_object"
            )
        state = optimizer.state_dict()
        if is_root:
            packed = pack("the state of the optimizer", on_host(state))
            plan = packed["pickle"], {key: (array.shape, array.dtype) for key, array in packed["arrays"].items()}
    content, kinds = broadcast_object(plan, root_rank, "optimizer.state")
    arrays = packed["arrays"] if is_root else {key: numpy.empty(*kind) for key, kind in kinds.items()}
    broadcast_parameters([(f"optimizer.{key}", tensor_of(array)) for key, array in arrays.items()], root_rank)
    if not is_root:
        state = unpack({"pickle": content, "arrays": arrays})
        optimizer.load_state_dict(state)
    if not state["state"]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of `root_rank`, a rank of the job, on all ranks of a set, by pickle.

    The object of the other ranks is ignored. `root_rank` gets its own object back.
    """

    def make(call: NamedCall) -> None:
        root, world = root_of(root_rank, process_set), call.channel.world
        content = bytearray(pickled(obj)) if world.rank == root else bytearray()
        call.tell(f"from {world.name(root)}", detail=(len(content),))

        def work(details: Details) -> Progress:
            content.extend(bytes(details[root][0] - len(content)))
            return moves.broadcast(world, numpy.frombuffer(content, numpy.uint8), root)

        if world.size > 1:
            call.work = work
        call.finish = lambda: obj if world.rank == root else pickle.loads(content)

    return submit("broadcast_object", name, process_set, make, hurries=False).ended()


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks of a set, in rank order and by pickle."""
    with refused_by_all("allgather_object", name, process_set):
        content = torch.frombuffer(bytearray(pickled(obj)), dtype=torch.uint8)
    call = begin_allgather("allgather_object", [content], name, process_set, hurries=False)
    (whole,) = call.ended()
    lengths = [length for (length,) in call.details]
    return [pickle.loads(part.numpy().tobytes()) for part in whole.split(lengths)]
