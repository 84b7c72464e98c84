"""A PyTorch module under the Trainer: on any number of ranks it is trained as by PyTorch alone in one process."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

from mpitrain import (
    Checkpoint,
    CompareReplicas,
    Hook,
    Parts,
    Step,
    StopAtStep,
    TorchModule,
    Trainer,
    World,
)
from mpitrain.data.order import permuted
from mpitrain.errors import MismatchError, NonFiniteError
from mpitrain.optim import LossScale
from mpitrain.world.shard import part_of
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone

from .torch_modules import (
    COUNT,
    GLOBAL_BATCH,
    SEED,
    STEPS,
    Net,
    Normed,
    adam,
    bits,
    builder,
    made,
    mean_loss,
    samples,
    sgd,
)
from .torch_modules import STRATEGIES as DIVISIONS


class Record(Hook):
    """A hook that keeps every step."""

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

    The batch is in so many parts, because batch norm looks at a part alone. Each part goes through a copy of the
    module, and the mean of the gradients is weighted by samples.
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
    unused = "no rank's loss depends on these parameters, so the optimizer skips them: spare"
    assert texts == ([unused] if kind is Net else [])
    expected, losses, rates = bare_torch(kind, optimizer, world.size if kind is Normed else 1)
    numpy.testing.assert_allclose([step.loss for step in record.steps], losses, rtol=1e-11)
    numpy.testing.assert_allclose([step.learning_rate for step in record.steps], rates, rtol=1e-15)
    found = trainer.adapter.parameters()
    assert {*expected} == {*found} | ({"two.weight"} if kind is Net else set())
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        # Adam divides by a root of squares, so the rounding of a tiny gradient counts.
        numpy.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-11, err_msg=name)
    assert_same_bits(world, *found.values())
    assert min(losses) < losses[0]
    if kind is Normed:
        assert found["norm.num_batches_tracked"] == STEPS
        assert found["called"]
    else:
        assert found["deviation"].tobytes() == numpy.float64(torch.tensor(1 / 3).double()).tobytes()


@pytest.mark.filterwarnings("ignore:no rank's loss depends on these parameters.*spare")
def test_16_bits_learn_as_float32_does(world: World) -> None:
    """One rounding to bf16 is 2^-9 of a value, and to fp16 2^-12. A loss of order 1 may be off by some of these.

    The model has no kinks: a ReLU that flips would part two runs by more.
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


def test_a_replica_is_repaired(world: World) -> None:
    """A buffer differs on the last rank. The repair also copies what the optimizer and the scheduler keep."""
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


@pytest.mark.parametrize("strategy", DIVISIONS)
def test_nan_is_named_and_changes_nothing(world: World, strategy: str) -> None:
    odd = world.size - 1

    def loss(module: Any, batch: Any) -> torch.Tensor:
        value = mean_loss(module, batch)
        return value * module.last.bias[0] / 0 if bad and world.rank == odd else value

    def build(world: World) -> Parts:
        module = made(Normed)
        optimizer, more = adam(module)
        adapter = TorchModule(module, loss, optimizer, **more)
        return Parts(adapter, DIVISIONS[strategy](), builder(Normed, adam)(world).data)

    bad = False
    trainer = Trainer(build)
    trainer.step()
    trainer.own_state()
    before = bits(trainer)
    bad = True
    text = error_on_all(world, NonFiniteError, trainer.step)
    assert f"{world.name(odd)}: the gradient of " in text
    assert any(f"gradient of {name} holds NaN or infinity" in text for name in trainer.adapter.parameters())
    trainer.own_state()
    assert {**bits(trainer), "data/cursor": before["data/cursor"]} == before
    bad = False
    assert math.isfinite(trainer.step().loss)
    assert_same_bits(world, *trainer.adapter.parameters().values())
    trainer.close()


@pytest.mark.parametrize(("step", "most"), [(1, None), (3, 2)])
@pytest.mark.parametrize("what", ["a number of the gradient of ", "steps of the optimizer, ", "learning rates"])
def test_an_optimizer_that_differs_on_one_rank(world: World, what: str, step: int, most: int | None) -> None:
    """It uses other gradients, none, or another rate in one step, also in the last one; with Accumulate too."""
    skip_alone(world)

    def odd(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        optimizer, _ = sgd(module)
        count = 0

        def change(*_: object) -> None:
            nonlocal count
            count += 1
            if count != step or world.rank != world.size - 1:
                return
            if what == "learning rates":
                optimizer.param_groups[0]["lr"] *= 2
            for parameter in module.parameters():
                if parameter.grad is not None and what.startswith("a number"):
                    parameter.grad.mul_(2)
                elif what.startswith("steps"):
                    parameter.grad = None

        optimizer.register_step_pre_hook(change)
        return optimizer, {}

    text = error_on_all(world, MismatchError, Trainer(builder(Normed, odd, most=most), [StopAtStep(3)]).run)
    assert what in text
