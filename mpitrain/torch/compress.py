"""Gradient compression in DistributedDataParallel: a communication hook made from the codecs of
mpitrain.compression."""

# Do not add `from __future__ import annotations`: DDP checks the annotations of a hook, and accepts no strings.

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from mpitrain.allreduce.algorithm import Progress
from mpitrain.allreduce.compressed import compressed
from mpitrain.allreduce.low_rank import Factors, low_rank_steps
from mpitrain.compression import check_compression, make_codec, power_sgd
from mpitrain.compression.kernels import can_compile
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.torch.backend import MpiProcessGroup
from mpitrain.torch.channel import Channel

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
# Computes the sum of a bucket from its values, its residual and its parameters.
OnBucket = Callable[[numpy.ndarray, numpy.ndarray, Sequence[torch.Tensor]], Progress]


class _Kept:
    """The residual of one bucket, in the order of its parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor], values: numpy.ndarray) -> None:
        self.parameters = list(parameters)
        self.values = values

    def ids(self) -> list[int]:
        return [id(parameter) for parameter in self.parameters]

    def parts(self) -> Iterator[tuple[int, numpy.ndarray]]:
        """The part of each parameter, by its id."""
        begin = 0
        for parameter in self.parameters:
            yield id(parameter), self.values[begin : begin + parameter.numel()]
            begin += parameter.numel()


class BucketResiduals:
    """The residuals of one hook on one rank: what the codec has not sent of the gradients in DDP's buckets.

    They are kept by parameter, because DDP may change its buckets. DDP begins with one bucket, and makes the buckets of
    all later steps before its second step. A run that resumes begins with one bucket, too. In that step, the one bucket
    is split, and the buckets of the saved run are exchanged: a codec rounds whole blocks, and the owner of an element
    follows from its place, so other buckets would give different bits.

    Attributes:
        factors: by the parameter's id; see Slot.factors.
    """

    def __init__(self) -> None:
        self.factors: Factors = {}
        self._buckets: list[_Kept] = []
        self._parts: dict[int, numpy.ndarray] = {}  # views, by the parameter's id

    def add_to(self, parameters: Sequence[torch.Tensor], flat: numpy.ndarray, steps: OnBucket) -> Progress:
        """The sum of a bucket with its residual by `steps`, or of the buckets that the saved run had made of it."""
        buckets = self._of(parameters)
        if len(buckets) == 1 and buckets[0].ids() == [id(parameter) for parameter in parameters]:
            yield from steps(flat, buckets[0].values, parameters)
            return
        places = dict(_Kept(parameters, flat).parts())
        for kept in buckets:
            part = numpy.concatenate([places[one] for one in kept.ids()])
            yield from steps(part, kept.values, kept.parameters)
            for one, values in _Kept(kept.parameters, part).parts():
                places[one][:] = values

    def move(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        """Note the buckets that DDP has now."""
        for parameters in buckets:
            self._of(parameters)

    def state(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the buckets, by the names of their parameters, and the residual of each parameter. `names` maps ids to
        names."""
        return {
            "buckets": [[names[one] for one in kept.ids()] for kept in self._buckets],
            "residual": {names[one]: torch.from_numpy(part.copy()) for one, part in self._parts.items()},
            "factors": {names[one]: torch.from_numpy(factor.copy()) for one, factor in self.factors.items()},
        }

    def restore(self, state: Mapping[str, Any], named: Mapping[str, torch.Tensor]) -> None:
        """Continue from `state`.

        Raises:
            CheckpointError: it belongs to other parameters. Nothing has changed.
        """
        residual = state["residual"]
        for name, values in residual.items():
            if name not in named or named[name].numel() != values.numel():
                here = f"{named[name].numel()} elements" if name in named else "no such parameter"
                raise CheckpointError(f"the residual of {name} has {values.numel()} elements; the model has {here}")
        self._buckets, self._parts = [], {}
        self.factors = {id(named[name]): factor.numpy() for name, factor in state.get("factors", {}).items()}
        for names in state["buckets"]:
            self._keep([named[name] for name in names], [residual[name].numpy() for name in names])

    def _of(self, parameters: Sequence[torch.Tensor]) -> list[_Kept]:
        """The residuals that make up a bucket: those already known for it, or one made of their parts."""
        wanted = {id(parameter) for parameter in parameters}
        known = [kept for kept in self._buckets if wanted.issuperset(kept.ids())]
        if sum(len(kept.parameters) for kept in known) == len(wanted):
            return known
        zeros = [numpy.zeros(parameter.numel(), numpy.float32) for parameter in parameters]
        return [
            self._keep(parameters, [self._parts.get(id(p), zero) for p, zero in zip(parameters, zeros, strict=True)])
        ]

    def _keep(self, parameters: Sequence[torch.Tensor], parts: Sequence[numpy.ndarray]) -> _Kept:
        kept = _Kept(parameters, numpy.concatenate(parts))
        self._buckets = [one for one in self._buckets if set(one.ids()).isdisjoint(kept.ids())] + [kept]
        self._parts |= dict(kept.parts())
        return kept


RESIDUALS: WeakKeyDictionary[Hook, BucketResiduals] = WeakKeyDictionary()  # of each hook


def compress(codec: str) -> Hook:
    """Make a hook for DDP that sends gradients between nodes as `codec` encodes them, with error feedback.

        model = DistributedDataParallel(net)
        model.register_comm_hook(None, mpitrain.torch.compress("bf16"))

    Inside a node, gradients travel uncompressed. The first argument of `register_comm_hook` is the process group; None
    is the group of all ranks. Sums are made in float32. The mean gives every rank the same weight, as DDP's own does.
    The part of a gradient that the codec does not send is added to the same gradient in the next step. `residuals`
    returns this residual for a checkpoint. Sources: mpitrain/allreduce/direct.py.

    Args:
        codec: a name in mpitrain.compression.CODECS, or power_sgd; with its setting if it has one, as in "top_k:0.05"
            and "power_sgd:2". The sums of power_sgd use MPITRAIN_ALGORITHM, as the group's other sums do. A codec has
            its own algorithm.

    Raises:
        ConfigError: there is no such codec or setting; or, in the backward pass, a gradient is not float32, or the
            group does not use the backend mpitrain.
    """
    if not isinstance(codec, str):
        raise _no_strategy(f"compress({type(codec).__name__})")
    check_compression(codec)  # raises
    sums: dict[MpiProcessGroup, OnBucket] = {}
    residuals = BucketResiduals()

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        group = group_of(state)
        world, buffer = group._channel.world, bucket.buffer()
        if buffer.dtype != torch.float32:
            raise ConfigError(
                f"{world.name()}: compress({codec!r}) takes float32 gradients, not {buffer.dtype}; make the model's "
                "parameters float32, or leave the hook out"
            )
        if group not in sums:
            sums[group] = _sum_of(group._channel, codec, residuals)
        parameters, steps = bucket.parameters(), sums[group]

        def work(flat: numpy.ndarray) -> Progress:
            return residuals.add_to(parameters, flat, steps) if world.size > 1 and flat.size else iter(())

        buffer.div_(world.size)
        call = group.call_of_ours(f"all_reduce by {codec}", buffer, work)
        mean: torch.futures.Future[torch.Tensor] = call.get_future().then(lambda done: done.value()[0])
        return mean

    RESIDUALS[hook] = residuals
    return hook


def _sum_of(channel: Channel, compression: str, residuals: BucketResiduals) -> OnBucket:
    """Make the sum of a bucket. Its parameters have the shapes that power_sgd needs."""
    world = channel.world
    if compression.partition(":")[0] != power_sgd.NAME:
        steps = compressed(world, make_codec(compression)).steps
        return lambda flat, residual, _: steps(flat, residual)

    def total(flat: numpy.ndarray, residual: numpy.ndarray | None = None, /) -> Progress:
        return channel.sums.steps(flat, residual)  # not kept: the channel frees its memory when the group ends

    if world.num_nodes == 1:
        return lambda flat, *_: total(flat)
    products, rank = power_sgd.Products(can_compile()), power_sgd.rank_of(compression)
    products.warm_up()
    low_rank = low_rank_steps(world, total, products)

    def work(flat: numpy.ndarray, residual: numpy.ndarray, parameters: Sequence[torch.Tensor]) -> Progress:
        tensors = [(id(parameter), tuple(parameter.shape)) for parameter in parameters]
        return low_rank(flat, residual, power_sgd.plan(tensors, rank), residuals.factors)

    return work


def _no_strategy(call: str) -> ConfigError:
    """Return the error for a strategy that was given in place of something else."""
    return ConfigError(
        f"{call}: DistributedDataParallel exchanges the gradients of every step. It takes the name of a codec, such as "
        'compress("int8"), and no strategy. To train with local updates, leave DistributedDataParallel out: '
        "mpitrain.torch.prepare(module, optimizer, data, strategy=...). All strategies work with mt.Trainer and "
        "mt.TorchModule"
    )


def group_of(state: Any) -> MpiProcessGroup:
    """Return the process group with which a hook of `compress` was registered.

    Raises:
        ConfigError: the group uses another backend, or `state` is a strategy.
    """
    group = dist.group.WORLD if state is None else state
    if hasattr(state, "finish_step"):  # as every Strategy has
        raise _no_strategy(f"register_comm_hook({type(state).__name__}(), ...)")
    if not isinstance(group, MpiProcessGroup):
        raise ConfigError(f"compress() works in groups of the backend mpitrain, not in {group!r}")
    return group
