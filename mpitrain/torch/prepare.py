"""Two lines that let an ordinary training loop run on all ranks: `import mpitrain.torch`, and `prepare`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy
import torch

from mpitrain.adapters.torch_arrays import array_of, tensor_of
from mpitrain.errors import ConfigError, DeviceError
from mpitrain.exchange.exchange import make_exchange
from mpitrain.job.start import init
from mpitrain.torch.gradients import Gradients
from mpitrain.torch.observed import expect_steps
from mpitrain.torch.sharded import ShardedData
from mpitrain.world import World

Model = TypeVar("Model", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

_PREPARED: WeakKeyDictionary[torch.nn.Module, Gradients] = WeakKeyDictionary()


def prepare(
    model: Model,
    optimizer: Optimizer,
    data: Iterable[Any],
    *,
    compression: str | None = None,
    algorithm: str | None = None,
    bucket_bytes: int | None = None,
    threaded: bool | None = None,
) -> tuple[Model, Optimizer, ShardedData]:
    """Let a training loop for one process run on all ranks, each with its part of every batch; the loop stays as it is.

        model, optimizer, data = mpitrain.torch.prepare(model, optimizer, data)
        for x, y in data:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    Every rank calls it, with the same model, optimizer and data; it needs no process group. A batch of `data` is that
    of all ranks together, and its loss a mean over samples: then the gradients that the optimizer sees are those of one
    process, to rounding, at any number of ranks, however a batch divides. They are exchanged while `backward` runs, and
    when it returns p.grad holds the means. Parameters and buffers get rank 0's values now; buffers stay equal (see
    mpitrain/adapters/torch_buffers.py).

    Args:
        model: on the CPU, its parameters float16, bfloat16, float32 or float64. Hooks are added to its parameters, and
            the same object is returned. Those with requires_grad=False now are left out, and must stay so.
        optimizer: of parameters of this model. A hook is added, and the same object is returned. The state it may have
            is the caller's: load the same one on all ranks.
        data: a DataLoader, whose samples rank 0 draws (so shuffling is that of one process) and whose workers then read
            this rank's samples alone; or any iterable that gives the same batches on every rank, of tensors and arrays
            with the samples along the first dimension. What a former call returned serves a second model.
        compression: of gradients between nodes, a name in mpitrain.compression.CODECS, "auto" or "none"; default: the
            world's setting.
        algorithm: that sums them, a name in mpitrain.allreduce.ALGORITHMS; default: the world's setting.
        bucket_bytes, threaded: as for GradientReducer.

    Raises:
        ConfigError: an optimizer that cannot work so (LBFGS, which takes several passes a step), sparse gradients, an
            optimizer of other parameters, a DistributedSampler, a model that was prepared before, or an option's value.
        DeviceError: a parameter is not on the CPU.
        MismatchError: the ranks differ in parameters, buffers or data. On every rank, naming the first difference.

    Use torch.utils.checkpoint with use_reentrant=False: the other kind ends backward passes inside of one, each with an
    exchange of all gradients, and parameters that come later are printed as unused. The means are right.

    `backward` weighs by the samples of the batch taken last from `data`: do not take one ahead.

    In the loop, `backward` and `step` raise GradientError (all kinds of it), on every rank wherever all can know.
    """
    world = init()
    _check(world, model, optimizer)
    expect_steps()
    _sync(world, model)
    sharded = data if isinstance(data, ShardedData) else ShardedData(world, data)
    exchange = partial(make_exchange, algorithm=algorithm, compression=compression)
    gradients = Gradients(world, model, sharded, exchange=exchange, bucket_bytes=bucket_bytes, threaded=threaded)
    optimizer.register_step_pre_hook(gradients.before_step)
    _PREPARED[model] = gradients
    return model, optimizer, sharded


def accumulate(model: torch.nn.Module) -> AbstractContextManager[None]:
    """A block whose backward passes add up gradients on this rank alone; the first one behind it exchanges the sum.

        for number, (x, y) in enumerate(data, 1):
            last = number % 4 == 0
            with contextlib.nullcontext() if last else mpitrain.torch.accumulate(model):
                (loss_fn(model(x), y) / 4).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    Every rank enters it for the same batches. Without it such a loop gives the same gradients, with an exchange for
    each batch. The sum is that of one process, also where the batches are of different sizes.

    Raises:
        ConfigError: the model was not prepared.
    """
    return gradients_of(model, "accumulate").accumulating()


def gradients_of(model: torch.nn.Module, call: str) -> Gradients:
    """Those of a model that prepare() had, for `call`.

    Raises:
        ConfigError: it was not prepared.
    """
    if model not in _PREPARED:
        raise ConfigError(f"{call}(model): this model was not given to prepare()")
    return _PREPARED[model]


def _check(world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All that can be wrong on this rank. Nothing is compared yet, so ranks that differ come to that later."""
    named = dict(model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False)]
    tensors = named | dict(model.named_buffers())
    elsewhere = [f"{name} is on {tensor.device}" for name, tensor in tensors.items() if tensor.device.type != "cpu"]
    problem = ""
    if model in _PREPARED:
        problem = "prepare() has had this model before; prepare it once, and keep what it returned"
    elif isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        problem = (
            f"prepare() cannot work with {type(optimizer).__name__}: a step of it takes several backward passes, or "
            "sparse gradients. Use another optimizer of torch.optim"
        )
    elif foreign:
        problem = (
            f"the optimizer has {len(foreign)} parameters that are not the model's, the first of shape "
            f"{tuple(foreign[0].shape)}; make it of model.parameters()"
        )
    elif sparse:
        problem = f"{', '.join(sparse)} gives sparse gradients; make it with sparse=False"
    if problem:
        raise ConfigError(f"{world.name()}: {problem}")
    if elsewhere:
        raise DeviceError(
            f"{world.name()}: prepare() takes a model on the CPU; {elsewhere[0]}. On GPUs use DistributedDataParallel "
            'with init_process_group("mpitrain")'
        )


def _sync(world: World, model: torch.nn.Module) -> None:
    """Rank 0's parameters and buffers on all ranks."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    values: dict[str, numpy.ndarray] = world.sync({name: array_of(tensor) for name, tensor in tensors.items()})
    if world.size > 1:
        for name, tensor in tensors.items():
            tensor.data.copy_(tensor_of(values[name]))
