"""`prepare` lets an ordinary training loop run on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpitrain.adapters.torch_arrays import array_of, tensor_of
from mpitrain.adapters.torch_buffers import ModuleBuffers
from mpitrain.adapters.torch_checks import check_plain
from mpitrain.errors import ConfigError, DeviceError, everywhere
from mpitrain.job.start import init
from mpitrain.reducer.by_network import compression_by_network
from mpitrain.reducer.exchange import Exchange, make_exchange
from mpitrain.strategies import Strategy
from mpitrain.strategies.local_updates import LocalUpdates
from mpitrain.strategies.sync import Sync
from mpitrain.torch.batch_weight import Weight, newest_weight, tell, weight_of
from mpitrain.torch.gradients import Gradients, trained_of
from mpitrain.torch.local_gradients import LocalGradients
from mpitrain.torch.loop_buffers import BufferMeans
from mpitrain.torch.loop_strategies import check_optimizer, check_strategy, virtual_ranks_of
from mpitrain.torch.observed import expect_steps, steps_alone
from mpitrain.torch.sharded import ShardedData
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.torch.virtual_gradients import VirtualGradients
from mpitrain.world.world import World

Model = TypeVar("Model", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

_REFUSED = torch.optim.LBFGS, torch.optim.SparseAdam
_WEIGHTS: WeakKeyDictionary[torch.nn.Module, Callable[[Any, Any], Any]] = WeakKeyDictionary()
_PREPARED: WeakKeyDictionary[torch.nn.Module, Gradients] = WeakKeyDictionary()


def prepare(
    model: Model,
    optimizer: Optimizer,
    data: Iterable[Any],
    *,
    strategy: Strategy | None = None,
    weight: Weight | None = None,
    form: Any = None,
    compression: str | None = None,
    network: str | None = None,
    algorithm: str | None = None,
    bucket_bytes: int | None = None,
    threaded: bool | None = None,
) -> tuple[Model, Optimizer, ShardedData]:
    """Make a training loop for one process run on all ranks, each with its part of every batch. The loop is unchanged.

        model, optimizer, data = mpitrain.torch.prepare(model, optimizer, data)
        for x, y in data:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    Every rank calls this with the same model, optimizer and data. It needs no process group. A batch of `data` is the
    batch of all ranks together, and its loss must be a mean over samples, or over what `weight` says. Then the
    optimizer gets the gradients of one process, up to rounding, for any number of ranks and any batch size. They are
    exchanged while `backward` runs; when it returns, p.grad holds the means. Parameters and buffers get rank 0's values
    now. Buffers stay equal (see mpitrain/adapters/torch_buffers.py).

    Args:
        model: is on the CPU; its parameters are float16, bfloat16, float32 or float64. Its parameters get hooks, and
            the same object is returned. Parameters that have requires_grad=False now are left out, and must stay
            frozen.
        optimizer: has parameters of this model. It gets a hook, and the same object is returned. Its state is not
            synchronised: if it has one, load the same state on all ranks.
        data: a DataLoader, or any iterable that yields the same batches on every rank. Rank 0 draws the samples of a
            DataLoader, so the order is that of one process; its workers read only this rank's samples, and `collate_fn`
            gets these, so a batch may have any form. All other batches are divided: tensors and arrays along the first
            dimension; see `form`. For a second model, pass the data that the first call returned.
        strategy: LocalSGD, DiLoCo, StreamingDiLoCo or SparseLoCo: each rank steps with its own gradients, and an
            outer step follows optimizer.step() where it is due; see `end_round`. All ranks make the same steps.
            Sync(virtual_ranks=): bitwise identical results on any number of ranks; the loop iterates over
            `virtual_batches`. Default: Sync.
        weight: what the loss on this rank is a mean over, if not samples: a number of 0 or more, such as the number of
            tokens that count, or a function that returns it. The function gets this rank's part of the batch and the
            model's newest output, and is called at most once per pass of the model. See also `weight`. Ranks without
            samples weigh
            0. Default: the number of samples.
        form: which parts of a whole batch have one entry for each sample: "samples" or "whole", or a dict, list or
            tuple of these like the batch; None where the kind of the part decides. It is for iterables of batches only.
            Default: the attribute `batch_form` of the data or its data set, if any.
        compression: how gradients are compressed between nodes: a name in mpitrain.compression.CODECS, "power_sgd",
            "auto" or "none". Default: the World's setting.
        network: in place of `compression`, the rate of each node's link, such as "1Gbit/s": by it, the model and the
            number of nodes, a codec that costs no loss is chosen, or none. Rank 0 prints which, why, and the loss that
            was measured with it. On one node, nothing is compressed.
        algorithm: the allreduce algorithm, a name in mpitrain.allreduce.ALGORITHMS. Default: the World's setting.
        bucket_bytes, threaded: as for GradientReducer. These and the three above are for Sync only:
            MPITRAIN_COMPRESSION sets the compression of an outer step.

    Raises:
        ConfigError: the model is a DistributedDataParallel, the optimizer takes several passes per step (LBFGS) or has
            other parameters than the model, gradients are sparse, the data has a DistributedSampler, the model was
            prepared before, a form is malformed, or an option is not allowed. Or the strategy cannot train in a loop of
            the user's own, because it warms up or makes steps itself.
        DeviceError: a parameter is not on the CPU.
        MismatchError: the ranks differ in parameters, buffers or data. Raised on every rank; it names the first
            difference.

    Use torch.utils.checkpoint with use_reentrant=False. With True, it runs backward passes inside the backward pass.
    Each of these ends with an exchange of all gradients, and parameters that come later are reported as unused. The
    means are still correct.

    `backward` weights gradients by the samples of the batch taken last from `data`, so do not take a batch ahead, or in
    another thread.

    In the loop, `backward` and `step` raise MismatchError, GradientError and its subclasses, on every rank if all ranks
    can detect the error. After an error of `backward` on every rank, each p.grad is None, and all can continue with the
    next batch. With local updates, the step is refused.
    """
    world = init()
    _check(world, model, optimizer)
    of_sync: dict[str, object] = {"compression": compression, "network": network, "algorithm": algorithm}
    of_sync |= {"bucket_bytes": bucket_bytes, "threaded": threaded}
    given = [name for name, value in of_sync.items() if value is not None]
    check_strategy(world, strategy, given, has_weight=weight is not None)
    if weight is not None and not callable(weight):
        weight = weight_of(world, weight)
    if isinstance(strategy, LocalUpdates):
        check_optimizer(world, model, optimizer)
    expect_steps()
    if world.watch:
        world.watch.trains("prepare", None)
    _sync(world, model)
    virtual = virtual_ranks_of(strategy)
    sharded = data if isinstance(data, ShardedData) else ShardedData(world, data, virtual, form)
    if sharded.virtual != virtual:
        raise everywhere(
            ConfigError(
                "prepare() was given data of another prepare() or of shard(), which is divided for "
                f"{sharded.virtual or 'no virtual ranks'}, and the strategy asks for {virtual or 'none'}; give the "
                "loader itself, or the same strategy"
            )
        )
    gradients: Gradients
    if isinstance(strategy, LocalUpdates):
        gradients = rounds = LocalGradients(world, model, optimizer, sharded, strategy)
        optimizer.register_step_post_hook(rounds.after_step)
        steps_alone(optimizer)
        model.register_state_dict_pre_hook(_tell_of_round)  # type: ignore[no-untyped-call]
    elif virtual:
        gradients = VirtualGradients(world, model, sharded, bucket_bytes=bucket_bytes, threaded=threaded)
    else:
        trained = trained_of(world, model)
        if network is not None:
            compression = compression_by_network(world, network, trained.layout)
        exchange: Callable[[World], Exchange] = partial(make_exchange, algorithm=algorithm, compression=compression)
        if isinstance(strategy, Sync) and strategy.exchange is not make_exchange:
            exchange = strategy.exchange
        gradients = Gradients(
            world,
            model,
            sharded,
            exchange=exchange,
            bucket_bytes=bucket_bytes,
            threaded=threaded,
            buffers=BufferMeans(world, ModuleBuffers(model)),
            trained=trained,
        )
    if weight is not None:
        sharded.weight.default = weight
    if callable(weight):
        _WEIGHTS[model] = weight
        model.register_forward_hook(_weigh)
    optimizer.register_step_pre_hook(gradients.before_step)
    _watch_other_steps()
    gradients.optimizer = ref(optimizer)
    _PREPARED[model] = gradients
    return model, optimizer, sharded


def accumulate(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context in which backward passes add up gradients on this rank alone. The first backward pass after it
    exchanges the sum.

        for number, (x, y) in enumerate(data, 1):
            last = number % 4 == 0
            with contextlib.nullcontext() if last else mpitrain.torch.accumulate(model):
                (loss_fn(model(x), y) / 4).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    Every rank enters the context for the same batches. Without it, such a loop computes the same gradients, with an
    exchange for each batch. The sum is that of one process, even if batches differ in size.

    Raises:
        ConfigError: the model was not prepared.
    """
    return gradients_of(model, "accumulate").accumulating()


def virtual_batches(model: torch.nn.Module, batch: Any) -> Iterator[Any]:
    """Yield the samples of each virtual rank of this rank, for a model that `prepare` had with virtual ranks.

        model, optimizer, data = mpitrain.torch.prepare(model, optimizer, data, strategy=mt.Sync(virtual_ranks=8))
        for batch in data:
            optimizer.zero_grad()
            for x, y in mpitrain.torch.virtual_batches(model, batch):
                loss_fn(model(x), y).backward()
            optimizer.step()

    Collective: every rank loops over it once for each batch, to the end, with at least one backward pass for each
    virtual rank. In the loop, PyTorch's, NumPy's and Python's own random numbers on the CPU depend on the seed, the
    batch and the virtual rank. After the loop they continue as if the loop had not drawn any. p.grad then holds the
    means over all samples of the batch, added to its earlier content, and the buffers are equal on all ranks. See
    docs/explanation/numerics.md.

    Before the first step, every rank also gets rank 0's first virtual batch two or three times, for the probe.

    Args:
        batch: the newest batch of the prepared data, unchanged. Its tensors and arrays are copied.

    Raises:
        ConfigError: the model was not prepared with virtual ranks.
        DataError: the batch is not the newest one.
        GradientError: a loop made no backward pass, or the loop over the previous batch has not ended. Or ranks compute
            different bits from the same samples: raised on every rank.
    """
    gradients = gradients_of(model, "virtual_batches")
    if not isinstance(gradients, VirtualGradients):
        raise ConfigError(
            "virtual_batches(model, batch): the model was prepared without virtual ranks; give "
            "strategy=mt.Sync(virtual_ranks=...) to prepare(), or loop over the data alone"
        )
    return gradients.passes(batch)


def end_round(model: torch.nn.Module) -> None:
    """End the round of a model that `prepare` had with local updates: all ranks get the common parameters.

        mpitrain.torch.end_round(model)
        mpitrain.torch.save(model.state_dict(), path)

    Collective, between optimizer.step() and the next backward(). Call it after the last step, and before the model is
    evaluated or saved. If the ranks have the same parameters already, as after the last step of a round and with Sync,
    nothing happens. Otherwise an outer step follows now, and a new round begins.

    Raises:
        ConfigError: the model was not prepared.
        NonFiniteError: a parameter of a rank is NaN or infinite. Raised on every rank, with nothing changed.
    """
    gradients_of(model, "end_round").end_round()


def weight(number: Any, data: ShardedData | None = None) -> None:
    """Set the weight of this rank's mean over its part of the newest batch, for later backward passes and means.

        for x, y in data:
            mpitrain.torch.weight((y != -100).sum())  # the tokens over which cross_entropy takes the mean
            cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()

    Every rank calls this for the same batch, before backward(); `data.mean(loss)` uses it too. The weight is valid
    until the next batch is taken, or until the next call, for example between two losses. A rank without samples weighs
    0. With a weight, a loss that is a mean over tokens, boxes or class weights gives the gradients of one process.

    Args:
        number: 0 or more; a tensor of one element is accepted.
        data: the data that prepare() or shard() returned. Default: the data of the batch that was taken last.

    Raises:
        DataError: no batch is in use, or it is not one number.
        ConfigError: the data has virtual ranks.
    """
    tell(init(), None if data is None else data.weight, number)


@uncompiled
def _weigh(model: torch.nn.Module, _: Any, output: Any) -> None:
    """The model's hook after a forward pass. A function of the module, so that the model can be copied and pickled."""
    newest = newest_weight()
    if newest is not None and model in _WEIGHTS:
        newest.say_later(_WEIGHTS[model], output)


def _tell_of_round(model: torch.nn.Module, *_: Any) -> None:
    """The model's hook before state_dict(). A function of the module, so that the model can be copied and pickled."""
    if model in _PREPARED:
        _PREPARED[model].tell_of_round()


def gradients_of(model: torch.nn.Module, call: str) -> Gradients:
    """The gradients of a model that prepare() had, for `call`.

    Raises:
        ConfigError: the model was not prepared.
    """
    if model not in _PREPARED:
        raise ConfigError(f"{call}(model): this model was not given to prepare()")
    return _PREPARED[model]


def _check(world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check what can be wrong on this rank alone. Differences between ranks are found later."""
    check_plain(model, f"{world.name()}: prepare()")
    named = dict(model.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False)]
    tensors = named | dict(model.named_buffers())
    elsewhere = [f"{name} is on {tensor.device}" for name, tensor in tensors.items() if tensor.device.type != "cpu"]
    problem = ""
    if model in _PREPARED:
        problem = "this model was prepared before; call prepare() once, and keep what it returned"
    elif isinstance(optimizer, _REFUSED):
        problem = _refusal(optimizer)
    elif foreign:
        problem = (
            f"the optimizer has {len(foreign)} parameters that are not the model's, the first of shape "
            f"{tuple(foreign[0].shape)}; make the optimizer from model.parameters()"
        )
    elif sparse:
        problem = f"{', '.join(sparse)} has sparse gradients; make the layer with sparse=False"
    if problem:
        raise ConfigError(f"{world.name()}: {problem}")
    if elsewhere:
        raise DeviceError(
            f"{world.name()}: prepare() takes a model on the CPU; {elsewhere[0]}. On GPUs use DistributedDataParallel "
            'with init_process_group("mpitrain")'
        )


def _refusal(optimizer: torch.optim.Optimizer) -> str:
    return (
        f"prepare() cannot work with {type(optimizer).__name__}: a step of it takes several backward passes, or needs "
        "sparse gradients. Use another optimizer of torch.optim"
    )


@cache
def _watch_other_steps() -> None:
    register_optimizer_step_pre_hook(_before_other_steps)


@uncompiled
def _before_other_steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Check the steps of optimizers that prepare() was not given, but that have parameters of its models."""
    changed = None
    for gradients in tuple(_PREPARED.values()):
        if gradients.optimizer() is not optimizer and gradients.trains(optimizer):
            if isinstance(optimizer, _REFUSED):
                raise ConfigError(f"{init().name()}: {_refusal(optimizer)}")
            changed = gradients.before_step(optimizer, *(changed or (args, kwargs))) or changed
    return changed


def _sync(world: World, model: torch.nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    values: dict[str, numpy.ndarray] = world.broadcast({name: array_of(tensor) for name, tensor in tensors.items()})
    if world.size > 1:
        for name, tensor in tensors.items():
            tensor.data.copy_(tensor_of(values[name]))
