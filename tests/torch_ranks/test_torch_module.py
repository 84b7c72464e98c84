"""A PyTorch module under the Trainer: on any number of ranks it is trained as by PyTorch alone in one process."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

from mpitrain import (
    Accumulate,
    ArrayData,
    Checkpoint,
    CompareReplicas,
    GradientNorm,
    Hook,
    LossScale,
    Parts,
    Step,
    StopAtStep,
    Sync,
    TorchModule,
    Trainer,
    World,
    evaluate,
    warmup_cosine,
)
from mpitrain.errors import NonFiniteError
from mpitrain.exchange.bucket import plan_layout
from mpitrain.exchange.remarks import remarks_of
from mpitrain.shard import part_of
from mpitrain.training.checkpoint.names import split
from mpitrain.training.data.order import permuted
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone

INPUTS, CLASSES, SEED = 6, 3, 3
COUNT, GLOBAL_BATCH, STEPS = 71, 23, 9  # last batches of 2 samples: fewer than ranks, from 3 ranks on


class Net(torch.nn.Module):
    """With a frozen layer, two layers that share their weight, a parameter that is not used, and constant buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(INPUTS, 5)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.one = torch.nn.Linear(5, 5, bias=False)
        self.two = torch.nn.Linear(5, 5, bias=False)
        self.two.weight = self.one.weight
        self.spare = torch.nn.Parameter(torch.ones(2))
        self.last = torch.nn.Linear(5, CLASSES)
        self.register_buffer("deviation", torch.tensor(1 / 3))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.first(x / self.deviation)))
        return self.last(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Normed(torch.nn.Module):
    """Batch norm over samples and places, so that one sample is enough; its counter is an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(1, 4, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4 * INPUTS, CLASSES)
        self.register_buffer("called", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.called.fill_(True)
        return self.last(torch.relu(self.norm(self.convolution(x[:, None]))).flatten(1))


def mean_loss(module: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return cross_entropy(module(x), y)


def samples(dtype: str = "float64") -> tuple[numpy.ndarray, numpy.ndarray]:
    rng = numpy.random.default_rng(7)
    x = rng.standard_normal((COUNT, INPUTS))
    return x.astype(dtype), (x @ rng.standard_normal((INPUTS, CLASSES))).argmax(axis=1)


def made(kind: type[torch.nn.Module], dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind().to(dtype)


def sgd(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """Weight decay on a group of its own, and a function of the step."""
    trained = [its for its in module.parameters() if its.requires_grad]
    groups = [
        {"params": [its for its in trained if its.ndim > 1], "weight_decay": 0.01},
        {"params": [its for its in trained if its.ndim < 2]},
    ]
    schedule = warmup_cosine(0.3, warmup_steps=3, total_steps=20)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True), {"schedule": schedule}


def adam(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """A scheduler of PyTorch that changes momentum too, and clipping."""
    optimizer = torch.optim.AdamW([its for its in module.parameters() if its.requires_grad], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
    return optimizer, {"schedule": schedule, "clip_norm": 0.5}


def builder(
    kind: type[torch.nn.Module],
    optimizer: Callable[[torch.nn.Module], tuple[torch.optim.Optimizer, dict[str, Any]]],
    *,
    dtype: torch.dtype = torch.float64,
    most: int | None = None,
    **options: Any,
) -> Callable[[World], Parts]:
    def build(world: World) -> Parts:
        module = made(kind, dtype, seed=1 + world.rank)  # the others get rank 0's
        made_optimizer, more = optimizer(module)
        adapter: Any = TorchModule(module, mean_loss, made_optimizer, **{**more, **options})
        if most:
            adapter = Accumulate(adapter, per_rank_batch=most)
        data = samples(str(dtype).removeprefix("torch."))
        return Parts(adapter, Sync(), ArrayData(world, data, global_batch=GLOBAL_BATCH, seed=SEED))

    return build


class Record(Hook):
    """Keeps every step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.steps.append(step)


def batches() -> Iterator[numpy.ndarray]:
    """The numbers of the samples of every step."""
    epoch = 0
    while True:
        order = permuted(numpy.arange(COUNT), COUNT, (SEED, epoch))
        yield from (order[begin : begin + GLOBAL_BATCH] for begin in range(0, COUNT, GLOBAL_BATCH))
        epoch += 1


def bare_torch(kind: Any, optimizer: Any, parts: int) -> tuple[dict[str, numpy.ndarray], list[float], list[float]]:
    """The same training by PyTorch alone: state_dict, losses, rates.

    With the batch in so many parts, each through a copy of the module, and their mean weighted by samples: for batch
    norm, which looks at a part alone.
    """
    module = made(kind)
    its_optimizer, options = optimizer(module)
    schedule, clip_norm = options["schedule"], options.get("clip_norm")
    x, y = (torch.from_numpy(its) for its in samples())
    trained = {name: its for name, its in module.named_parameters() if its.requires_grad}
    losses, rates = [], []
    for step, chosen in zip(range(STEPS), batches(), strict=False):
        gradients: dict[str, Any] = {}
        buffers = {name: torch.zeros_like(its, dtype=torch.float64) for name, its in module.named_buffers()}
        loss = 0.0
        for part in (part_of(len(chosen), number, parts) for number in range(parts)):
            share = (part.stop - part.start) / len(chosen)
            if not share:
                continue
            replica = copy.deepcopy(module)
            its_loss = cross_entropy(replica(x[chosen[part]]), y[chosen[part]])
            its_loss.backward()
            loss += share * its_loss.item()
            for name, its in replica.named_parameters():
                if its.grad is not None:
                    gradients[name] = gradients.get(name, 0) + share * its.grad
            for name, its in replica.named_buffers():
                buffers[name] += share * its
        for name, its in trained.items():
            its.grad = gradients.get(name)
        if clip_norm:
            norm = math.sqrt(sum(float((its**2).sum()) for its in gradients.values()))
            torch._foreach_mul_(list(gradients.values()), min(1.0, clip_norm / norm))
        if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
            rates.append(its_optimizer.param_groups[0]["lr"])
            its_optimizer.step()
            schedule.step()
        else:
            rates.append(schedule(step))
            for group in its_optimizer.param_groups:
                group["lr"] = rates[-1]
            its_optimizer.step()
        losses.append(loss)
        for name, its in module.named_buffers():
            its.copy_(buffers[name] if its.is_floating_point() else buffers[name].round())
    return {name: its.detach().numpy() for name, its in module.state_dict().items()}, losses, rates


def bits(trainer: Trainer) -> dict[str, bytes]:
    """Everything that a checkpoint keeps."""
    return {
        name: value.tobytes() if isinstance(value, numpy.ndarray) else repr(value).encode()
        for part in split(trainer.state())
        for name, value in part.items()
    }


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize(("kind", "optimizer"), [(Net, sgd), (Net, adam), (Normed, adam)])
def test_training_equals_pytorch_alone(world: World, kind: Any, optimizer: Any, most: int | None) -> None:
    if kind is Normed and most:
        pytest.skip("in pieces the batch norm is another one")
    record = Record()
    trainer = Trainer(builder(kind, optimizer, most=most), [StopAtStep(STEPS), record, CompareReplicas(1)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    texts = [str(warning.message).partition(".")[0] for warning in caught]
    unused = "no rank's loss depends on these parameters, so the optimizer leaves them alone: spare"
    assert texts == ([unused] if kind is Net else [])
    expected, losses, rates = bare_torch(kind, optimizer, world.size if kind is Normed else 1)
    numpy.testing.assert_allclose([step.loss for step in record.steps], losses, rtol=1e-11)
    numpy.testing.assert_allclose([step.learning_rate for step in record.steps], rates, rtol=1e-15)
    found = trainer.adapter.parameters()
    assert {*expected} == {*found} | ({"two.weight"} if kind is Net else set())
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        # Adam divides by a root of squares: where a gradient is next to nothing, its rounding counts.
        numpy.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-11, err_msg=name)
    assert_same_bits(world, *found.values())
    assert min(losses) < losses[0]
    if kind is Normed:
        assert found["norm.num_batches_tracked"] == STEPS
        assert found["called"]
    else:
        assert found["deviation"].tobytes() == numpy.float64(torch.tensor(1 / 3).double()).tobytes()


def test_a_run_that_is_resumed_has_the_same_bits(world: World, shared: Path) -> None:
    def run(steps: int, *hooks: Hook) -> Trainer:
        scale = LossScale(2.0**20, growth_interval=3)
        build = builder(Normed, adam, precision="fp16", loss_scale=scale, dtype=torch.float32)
        trainer = Trainer(build, [StopAtStep(steps), *hooks])
        trainer.run()
        return trainer

    whole = run(18)
    skipped = whole.adapter.loss_scale.skipped_steps
    assert 2 < skipped < 12
    assert whole.adapter.parameters()["norm.num_batches_tracked"] == 18 - skipped
    run(8, Checkpoint(shared, steps=100))
    resumed = run(18, Checkpoint(shared, steps=100))
    assert bits(resumed) == bits(whole)
    assert_same_bits(world, *resumed.adapter.parameters().values())


def test_a_state_of_one_process_goes_on_on_any_number_of_ranks(world: World) -> None:
    """4 steps with the whole batch, here on every rank by itself; then the rest together."""
    module = made(Net)
    optimizer, options = adam(module)
    alone = TorchModule(module, mean_loss, optimizer, **options)
    plan = plan_layout(alone.layout)
    flats = {dtype: numpy.empty(count, dtype) for dtype, count in plan.counts.items()}
    views = plan.views(flats)
    x, y = samples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, chosen in zip(range(4), batches(), strict=False):
            unused: list[int] = []

            def take(index: int, gradient: Any, unused: list[int] = unused) -> None:
                if gradient is None:
                    unused.append(index)
                else:
                    views[index][...] = gradient

            alone.loss_and_gradients((x[chosen], y[chosen]), take)
            alone.apply_gradients(flats, remarks_of([(tuple(unused), alone.note())]))
        trainer = Trainer(builder(Net, adam), [StopAtStep(STEPS)])
        for _ in range(4):
            next(trainer.data)
        trainer.restore({**trainer.state(), "step": 4, "adapter": alone.state()})
        trainer.run()
    expected, _, _ = bare_torch(Net, adam, 1)
    for name, value in trainer.adapter.parameters().items():
        numpy.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-11, err_msg=name)
    assert {*split(trainer.state())[0]} == {f"adapter/{name}" for name in split(alone.state())[0]}


def test_a_replica_is_repaired(world: World) -> None:
    """A buffer that differs on the last rank, and all that the optimizer and the scheduler keep."""
    skip_alone(world)

    class Flip(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            if step.number == 4 and world.rank == world.size - 1:
                trainer.adapter.parameters()["norm.running_var"].view("u1")[9] ^= 8

    expected = Trainer(builder(Normed, adam), [StopAtStep(6)])
    expected.run()
    trainer = Trainer(builder(Normed, adam), [StopAtStep(6), Flip(), CompareReplicas(1, repair="root")])
    trainer.run()
    assert bits(trainer) == bits(expected)


@pytest.mark.filterwarnings("ignore:no rank's loss depends on these parameters.*spare")
def test_16_bits_learn_as_float32_does(world: World) -> None:
    """One rounding to bf16 is 2^-9 of a value, to fp16 2^-12; a loss of order 1 may be off by some of these.

    In a model without kinks, or a ReLU that tips over would part two runs by more.
    """
    losses = {}
    for precision in ("float32", "bf16", "fp16"):
        record = Record()
        scale = LossScale(2.0**10) if precision == "fp16" else None
        build = builder(Net, sgd, dtype=torch.float32, precision=precision, loss_scale=scale)
        trainer = Trainer(build, [StopAtStep(STEPS), record])
        trainer.run()
        losses[precision] = numpy.array([step.loss for step in record.steps])
        assert str(trainer.adapter.precision) == {"bf16": "bfloat16", "fp16": "float16"}.get(precision, precision)
        assert all(
            value.dtype == "float32" for value in trainer.adapter.parameters().values() if value.dtype.kind == "f"
        )
    for precision, unit in (("bf16", 2.0**-9), ("fp16", 2.0**-12)):
        distance = abs(losses[precision] - losses["float32"]).max()
        assert unit / 16 < distance < 20 * unit, (precision, distance / unit)


def test_nan_is_named_and_changes_nothing(world: World) -> None:
    odd = world.size - 1

    def loss(module: Any, batch: Any) -> torch.Tensor:
        value = mean_loss(module, batch)
        return value * module.last.bias[0] / 0 if bad and world.rank == odd else value

    def build(world: World) -> Parts:
        parts = builder(Normed, adam)(world)
        module = made(Normed)
        optimizer, more = adam(module)
        return Parts(TorchModule(module, loss, optimizer, **more), parts.strategy, parts.data)

    bad = False
    trainer = Trainer(build)
    trainer.step()
    before = bits(trainer)
    bad = True
    text = error_on_all(world, NonFiniteError, trainer.step)
    assert f"{world.name(odd)}: the gradient of " in text
    assert any(f"gradient of {name} holds NaN or infinity" in text for name in trainer.adapter.parameters())
    assert {**bits(trainer), "data/cursor": before["data/cursor"]} == before
    bad = False
    assert math.isfinite(trainer.step().loss)
    assert_same_bits(world, *trainer.adapter.parameters().values())


def test_with_the_hooks_and_metrics_of_the_trainer(world: World) -> None:
    """Evaluation in between, with the module in another mode; the norm is that of the mean gradient."""
    x, y = samples()
    norms = []

    class Norms(Hook):
        def before_step(self, trainer: Trainer) -> None:
            trainer.adapter.measure_gradient_norm()

        def after_step(self, trainer: Trainer, step: Step) -> None:
            norms.append(trainer.adapter.gradient_norm())

    module = made(Net)
    with pytest.warns(UserWarning, match="spare"):
        optimizer = torch.optim.SGD([its for its in module.parameters() if its.requires_grad], lr=0.1)

        def build(world: World) -> Parts:
            data = ArrayData(world, (x, y), global_batch=COUNT, shuffle=False)
            return Parts(TorchModule(module, mean_loss, optimizer), Sync(), data)

        trainer = Trainer(build, [StopAtStep(1), Norms()])
        alone = copy.deepcopy(module)
        trainer.run()
    cross_entropy(alone(torch.from_numpy(x)), torch.from_numpy(y)).backward()
    expected = math.sqrt(sum(float((its.grad**2).sum()) for its in alone.parameters() if its.grad is not None))
    assert norms == pytest.approx([expected], rel=1e-12)
    assert GradientNorm  # the meter makes the same two calls

    def metrics(batch: Any) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(mean_loss(module, [torch.from_numpy(its) for its in batch]))}

    found = evaluate(world, metrics, (x, y))["loss"]
    with torch.no_grad():
        assert found == pytest.approx(float(mean_loss(module, (torch.from_numpy(x), torch.from_numpy(y)))), rel=1e-12)
