"""Pipeline with layers of PyTorch: against a loop of PyTorch alone, for every schedule and cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

from mpitrain import Checkpoint, Parts, Pipeline, StopAtStep, Sync, TorchLayers, TorchModule, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.errors import ConfigError
from mpitrain.strategies import Strategy
from mpitrain.strategies.passes import StagePasses
from tests.ranks.common import skip_alone
from tests.ranks.trainings import Record

INPUTS, CLASSES, COUNT, BATCH, STEPS = 6, 3, 45, 14, 9
CLIP = 0.3
LAYERS = 6


def layer(number: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(number)
        if number == LAYERS - 1:
            return torch.nn.Linear(5, CLASSES).double()
        linear = torch.nn.Linear(INPUTS if number == 0 else 5, 5)
        return torch.nn.Sequential(linear, torch.nn.LayerNorm(5), torch.nn.Tanh()).double()


def samples() -> tuple[numpy.ndarray, numpy.ndarray]:
    rng = numpy.random.default_rng(7)
    return rng.standard_normal((COUNT, INPUTS)), rng.integers(0, CLASSES, COUNT)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def builder(strategy: Callable[[], Strategy], *, ready: bool = False) -> Callable[[World], Parts]:
    """`ready`: the layers are modules of a Sequential, not functions that make modules."""

    def build(world: World) -> Parts:
        made = strategy()
        replicas = made.replicas(world) if isinstance(made, Pipeline) else world
        data = ArrayData(replicas, samples(), global_batch=BATCH, shuffle=False)
        layers: Any = [partial(layer, number) for number in range(LAYERS)]
        layers = torch.nn.Sequential(*(one() for one in layers)) if ready else layers
        return Parts(TorchLayers(layers, cross_entropy, adam, clip_norm=CLIP), made, data)

    return build


def plain(steps: int) -> tuple[dict[str, numpy.ndarray], list[float]]:
    """Train in one process, with PyTorch alone."""
    module = torch.nn.Sequential(*(layer(number) for number in range(LAYERS)))
    optimizer, (x, y) = adam(module.parameters()), map(torch.from_numpy, samples())
    losses, begin = [], 0
    for _ in range(steps):
        part = slice(begin, min(begin + BATCH, COUNT))
        begin = 0 if part.stop == COUNT else part.stop
        optimizer.zero_grad()
        loss = cross_entropy(module(x[part]), y[part])
        loss.backward()
        gradients = [one.grad for one in module.parameters() if one.grad is not None]
        norm = torch.sqrt(sum((one**2).sum() for one in gradients))  # clip_grad_norm_ adds 1e-6 to it
        for gradient in gradients:
            gradient.mul_(min(1.0, CLIP / float(norm)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {name: value.numpy() for name, value in module.state_dict().items()}, losses


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_it_is_training_in_one_process(world: World, schedule: str) -> None:
    """With clipping, AdamW, batches that nothing divides, and fewer samples than micro-batches."""
    expected, losses = plain(STEPS)
    divisors = [stages for stages in range(1, 7) if world.size % stages == 0]
    for stages in [one for one in divisors if schedule != "interleaved" or 2 <= one <= 3]:
        record = Record()
        strategy = partial(Pipeline, stages, schedule, 6, recompute=schedule == "gpipe")
        trainer = Trainer(builder(strategy, ready=schedule == "gpipe"), [StopAtStep(STEPS), record])
        trainer.run()
        assert [step.loss for step in record.steps] == pytest.approx(losses, rel=1e-12)
        trainer.own_state()
        found = trainer.state()["adapter"]["parameters"]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            numpy.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12)
        trainer.close()


def test_checkpoints_are_those_of_a_sequential(world: World, shared: Path) -> None:
    """From TorchModule with Sync to stages, to other stages, and back, with AdamW's state."""

    def of_module(world: World) -> Parts:
        module = torch.nn.Sequential(*(layer(number) for number in range(LAYERS)))
        data = ArrayData(world, samples(), global_batch=BATCH, shuffle=False)
        loss = lambda module, batch: cross_entropy(module(batch[0]), batch[1])  # noqa: E731
        return Parts(TorchModule(module, loss, adam(module.parameters()), clip_norm=CLIP), Sync(), data)

    most = world.size if world.size <= LAYERS else 1
    builds = [of_module, builder(partial(Pipeline, most, micro_batches=3)), builder(Sync), of_module]
    record = Record()
    for number, build in enumerate(builds, 1):
        trainer = Trainer(build, [StopAtStep(2 * number), Checkpoint(shared, 2), record])
        trainer.run()
        trainer.close()
    whole = Record()
    trainer = Trainer(of_module, [StopAtStep(8), whole])
    trainer.run()
    trainer.close()
    assert [step.loss for step in record.steps] == pytest.approx([step.loss for step in whole.steps], rel=1e-12)


def test_what_is_refused(world: World) -> None:
    """Tied parameters by name, buffers that change with samples, and layers that are none."""
    skip_alone(world)
    if world.size > LAYERS:
        pytest.skip("there are 6 layers")
    tied = [torch.nn.Linear(5, 5) for _ in range(world.size)]
    tied[-1].weight = tied[0].weight
    last = world.size - 1
    for layers, said in (
        (tied, rf"{last}\.weight \(stage {last}\) and 0\.weight \(stage 0\)"),
        ([torch.nn.BatchNorm1d(5) for _ in range(world.size)], r"have the buffer \d\.running_var"),
        ([torch.nn.Linear(5, 5), *(torch.nn.Tanh() for _ in range(world.size))], "no parameters to train"),
        ([lambda: 5] * world.size, r"is a int; give a torch\.nn\.Module"),
    ):
        with pytest.raises(ConfigError, match=said):
            Pipeline(world.size).begin(world, TorchLayers(layers, cross_entropy, adam))  # type: ignore[arg-type]


def test_a_first_piece_without_parameters(world: World) -> None:
    """The stage has its parameters in its second piece; the result is that of one rank."""
    skip_alone(world)
    if world.size % 2:
        pytest.skip("there are 2 stages")

    def train(world: World, strategy: Strategy) -> dict[str, numpy.ndarray]:
        layers = [torch.nn.Flatten(), *(partial(layer, number) for number in (0, 2, 5))]
        model = TorchLayers(layers, cross_entropy, adam)
        strategy.begin(world, model)
        strategy.begin_step(8)
        batch = samples()[0][:8].reshape(8, 2, 3), samples()[1][:8]
        strategy.finish_step(model, model.loss_and_gradients(batch, strategy.on_gradient))
        values = {name: value.copy() for name, value in model.parameters().items()}
        strategy.close()
        return values

    expected = train(world, Sync())
    for recompute in (False, True):
        for name, value in train(world, Pipeline(2, "interleaved", 2, recompute=recompute)).items():
            numpy.testing.assert_allclose(value, expected[name], rtol=1e-6)


@pytest.mark.parametrize("ready", [False, True])
def test_stages_by_what_layers_cost(world: World, *, ready: bool) -> None:
    """The bytes are those of the model, the generator continues as without, and the training is that of one process."""
    _, losses = plain(4)
    x, y = samples()
    strategy = Pipeline("auto", micro_batches=3, sample=(x[:4], y[:4]), num_stages=min(world.size, 2 - world.size % 2))
    record, before = Record(), torch.get_rng_state()
    trainer = Trainer(builder(lambda: strategy, ready=ready), [StopAtStep(4), record])
    assert torch.equal(torch.get_rng_state(), before)
    trainer.run()
    assert [step.loss for step in record.steps] == pytest.approx(losses, rel=1e-12)
    for costs in strategy.costs:
        assert [cost.parameter_bytes for cost in costs] == [8 * (7 * 5 + 10), *[8 * (6 * 5 + 10)] * 4, 8 * 6 * 3]
        # Linear keeps its input; LayerNorm its input, the mean and the deviation of each sample; Tanh its output.
        first, last = costs[0].activation_bytes, costs[-1].activation_bytes
        assert (first, last) == (8 * 4 * (6 + 5 + 2 + 5), 8 * 4 * 5)
        assert all(cost.seconds > 0 for cost in costs)
    trainer.close()
    # A rank has room for the gradients of its own layers only: those that were measured have none.
    modules = [layer(number) for number in range(LAYERS)]
    TorchLayers(modules, cross_entropy, adam).layer_costs((x[:4], y[:4]), recompute=False)
    assert [one.grad for module in modules for one in module.parameters()] == [None] * (4 * 5 + 2)


class Sometimes(torch.nn.Module):
    """Uses its weight only for samples that begin with a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((5,), 2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x[0, 0] > 0 else x


def test_when_gradients_of_parameters_are_handed_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last backward pass, unless that does not come to them, or if another piece has the same parameter."""
    stages = 2 if world.size % 2 == 0 else 1
    torch.manual_seed(5)
    tied, first = torch.nn.Linear(5, 5).double(), Sometimes()
    layers = [torch.nn.Sequential(first, tied), torch.nn.Linear(5, 5).double(), tied, torch.nn.Linear(5, 5).double()]
    x = numpy.array([[1.0, 2, 3, 4, 5], [-1, 1, 2, -3, 1]])
    whole = torch.nn.Sequential(*layers)
    for row in torch.from_numpy(x):
        (whole(row[None]).square().mean() / 2).backward()
    expected = {name: one.grad for name, one in whole.named_parameters()}
    strategy = Pipeline(stages, "interleaved" if stages > 1 else "1f1b", 2)
    model = TorchLayers(layers, lambda output, _: output.square().mean(), partial(torch.optim.SGD, lr=0.5))
    strategy.begin(world, model)
    names, during, found = [entry.name for entry in model.layout], [], {}
    backward = StagePasses._backward

    def noted(self: Any, one: Any, *, is_last: bool) -> None:
        before = set(found)
        backward(self, one, is_last=is_last)
        assert is_last or set(found) == before
        during.extend(found.keys() - before)

    def seen(index: int, gradient: Any) -> None:
        found[names[index]] = gradient.copy()
        strategy.on_gradient(index, gradient)

    monkeypatch.setattr(StagePasses, "_backward", noted)
    strategy.begin_step(2)
    loss = model.loss_and_gradients((x, numpy.zeros(2)), seen)
    late = {"0.0.weight"} if stages == 1 else {"0.0.weight", "0.1.weight", "0.1.bias"}
    assert set(during) == set(names) - late
    for name, gradient in found.items():
        numpy.testing.assert_allclose(gradient, expected[name], rtol=1e-12, atol=1e-12)
    strategy.finish_step(model, loss)
    strategy.close()
