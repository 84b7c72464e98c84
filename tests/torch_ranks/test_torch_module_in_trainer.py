"""A PyTorch module with the rest of the Trainer: resume, repair, an error in a step, hooks."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

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
    Sync,
    TorchModule,
    Trainer,
    World,
    evaluate,
)
from mpitrain.data import ArrayData
from mpitrain.errors import MismatchError, NonFiniteError
from mpitrain.meters import GradientNorm
from mpitrain.optim import LossScale
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone

from .torch_modules import COUNT, Net, Normed, adam, bits, builder, made, mean_loss, samples, sgd


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
    """The norm is that of the mean gradient, and an evaluation gives the loss of the module."""
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


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("what", ["a number of the gradient of ", "steps of the optimizer, ", "learning rates"])
@pytest.mark.parametrize("most", [None, 2])
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
