"""What pipelines refuse, on every rank, and where they find NaN."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy
import pytest

from mpitrain import ArrayFunction, Balance, CompareReplicas, Pipeline, StopAtStep, Trainer, World
from mpitrain.arrays import Array
from mpitrain.errors import CheckpointError, ConfigError, MismatchError, NonFiniteError
from mpitrain.optim import SGD
from mpitrain.strategies.passes import StagePasses, StagePlace
from mpitrain.training.observe import _Watch

from .common import error_on_all, skip_alone
from .layered import LAYERS, Dense, builder, layered


def several_stages(world: World) -> None:
    skip_alone(world)
    if world.size > LAYERS:
        pytest.skip("there are 6 layers")


class Tanh:
    """A layer without parameters."""

    def parameters(self) -> dict[str, Array]:
        return {}

    def forward(self, parameters: Mapping[str, Array], inputs: Array) -> tuple[Array, Any]:
        output = numpy.tanh(inputs)
        return output, output

    def backward(self, parameters: Mapping[str, Array], kept: Any, gradient: Array) -> tuple[Array, dict[str, Array]]:
        return gradient * (1 - kept * kept), {}


INTERLEAVED = {"stages": "auto", "sample": 0, "schedule": "interleaved"}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"schedule": "2f2b"}, "schedule='2f2b'; allowed: 1f1b, eager_1f1b, gpipe, interleaved"),
        ({"activations": "fp16"}, "activations='fp16'; allowed: None, 'bf16'"),
        ({"micro_batches": 0}, "micro_batches=0; allowed: 1 or more"),
        ({"stages": 2, "schedule": "interleaved", "micro_batches": 3}, "micro_batches=3; allowed: a multiple of the 2"),
        ({"stages": [1, 2], "schedule": "interleaved"}, r"stages=\[1, 2\] with interleaved"),
        ({"stages": 1, "schedule": "interleaved"}, "allowed: 2 or more of both"),
        ({"stages": 2, "pieces": 4}, "pieces=4 with 1f1b, where a rank has one piece"),
        ({"stages": "best"}, "stages='best'; allowed: a number, a list of numbers, or 'auto'"),
        ({"stages": "auto"}, "stages='auto' without a sample"),
        ({"stages": 2, "num_stages": 2}, "num_stages or sample with stages=2"),
        (INTERLEAVED, "stages='auto' and no num_stages"),
        (INTERLEAVED | {"num_stages": 2, "micro_batches": 3}, "micro_batches=3; allowed: a multiple of the 2 stages"),
    ],
)
def test_values_that_are_not_allowed(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Pipeline(**values)


def test_ranks_that_form_no_pipelines(world: World) -> None:
    """All get the same error, also those whose own number of stages, or of micro-batches, is allowed."""
    more = world.size + 1
    text = error_on_all(world, ConfigError, lambda: Pipeline(more).replicas(world))
    assert f"{world.size} ranks cannot form pipelines of {more} stages" in text
    if world.size > 1:
        odd = world.rank == world.size - 1
        text = error_on_all(world, MismatchError, lambda: Pipeline(world.size + odd).replicas(world))
        assert f"stages={more}" in text
        text = error_on_all(world, MismatchError, lambda: Pipeline(micro_batches=2 + odd).begin(world, layered()))
        assert world.name(world.size - 1) in text


def test_parts_of_a_batch_that_differ(world: World) -> None:
    """As with data that were made for the World, and not for its replicas."""
    several_stages(world)
    strategy, model = Pipeline(world.size), layered()
    strategy.begin(world, model)
    batch = numpy.full((2, 5), float(world.rank)), numpy.zeros((2, 3))
    strategy.begin_step(2)
    text = error_on_all(world, MismatchError, lambda: model.loss_and_gradients(batch, strategy.on_gradient))
    assert f"{world.name(1)} has another part of the batch than {world.name(0)}" in text
    assert "pipeline.replicas(world)" in text


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (CompareReplicas, "the ranks have different layers"),
        (lambda: Balance(1), "all stages of a pipeline need the same part"),
        (lambda: _Watch(None, []), "mpitrain verify compares the samples and parameters of all ranks"),  # type: ignore[arg-type]
    ],
)
def test_hooks_for_equal_ranks(world: World, hook: Any, text: str) -> None:
    several_stages(world)
    trainer = Trainer(builder(32, 16, partial(Pipeline, world.size)), [StopAtStep(2)])
    assert text in error_on_all(world, ConfigError, lambda: hook().before_run(trainer))
    trainer.close()


def test_models_that_are_not_cut(world: World) -> None:
    """More stages than layers, a stage without parameters, shared parameters, and adapters without layers."""
    skip_alone(world)
    count = world.size
    few = [Dense(number) for number in range(count - 1)]
    text = error_on_all(world, ConfigError, lambda: Pipeline(count).begin(world, layered(few)))
    assert f"{count - 1} layers cannot be cut into {count} stages" in text
    bare = [Dense(0), *(Tanh() for _ in range(count - 1))]
    with pytest.raises(ConfigError, match="no parameters to train"):
        Pipeline(count).begin(world, layered(bare))
    text = error_on_all(
        world, ConfigError, lambda: Pipeline([1] * count).begin(world, layered(few + few + few + [Dense(0)]))
    )
    assert "Give the number of layers of every stage" in text
    function = ArrayFunction(lambda *_: 0.0, {"w": numpy.zeros(2)}, SGD(0.1))
    text = error_on_all(world, ConfigError, lambda: Pipeline(count).begin(world, function))
    assert "ArrayFunction has no list of layers" in text
    shared = Dense(0)
    value = shared.parameters()
    shared.parameters = lambda: value  # type: ignore[method-assign]
    both = [shared, shared] * count
    with pytest.raises(ConfigError, match="are one array; layers of ArrayLayers cannot share parameters"):
        Pipeline(count).begin(world, layered(both))


def test_numbers_of_samples_are_compared_in_every_step(world: World) -> None:
    several_stages(world)
    strategy, model = Pipeline(world.size), layered([Sums(number) for number in range(world.size)])
    strategy.begin(world, model)
    for odd in (False, True):
        count = 2 + (odd and world.rank == world.size - 1)
        strategy.begin_step(count)
        loss = model.loss_and_gradients((numpy.ones((count, 1)), numpy.ones((count, 1))), strategy.on_gradient)
        if not odd:
            strategy.finish_step(model, loss)
    text = error_on_all(world, MismatchError, lambda: strategy.finish_step(model, loss))
    assert f"{world.name(world.size - 1)} has another part of the batch than {world.name(0)} (3 samples, not 2)" in text
    strategy.close()


def test_finite_values_whose_sum_is_not(world: World) -> None:
    """They are not the place of NaN."""
    passes = StagePasses(world, StagePlace(0, 1, 1), "1f1b", 1, None)
    passes._look(numpy.full(8, 60000, numpy.float16), (0, 0), "the output")
    assert passes.not_finite is None
    passes._look(numpy.array([1, numpy.inf], numpy.float16), (1, 0), "the gradient")
    assert passes.not_finite == ((1, 0), "the gradient")


class Sums:
    """Gives one sample whatever it gets, so that stages can have different numbers and not fail."""

    def __init__(self, number: int) -> None:
        self.number = number

    def parameters(self) -> dict[str, Array]:
        return {"weight": numpy.full((1, 1), 0.5)}

    def forward(self, parameters: Mapping[str, Array], inputs: Array) -> tuple[Array, Any]:
        return inputs.sum(axis=0, keepdims=True) * parameters["weight"], inputs

    def backward(self, parameters: Mapping[str, Array], kept: Any, gradient: Array) -> tuple[Array, dict[str, Array]]:
        value = gradient.sum(axis=0, keepdims=True)
        return numpy.repeat(value * parameters["weight"], len(kept), axis=0), {"weight": value * kept.sum()}


class Spoiled(Dense):
    """The third micro-batch of the second step becomes NaN here."""

    def __init__(self, number: int, place: str) -> None:
        super().__init__(number)
        self.place, self.calls = place, 0

    def forward(self, parameters: Mapping[str, Array], inputs: Array) -> tuple[Array, Any]:
        output, kept = super().forward(parameters, inputs)
        if self.place == "forward" and self._is_due():
            output = output * numpy.nan
        return output, kept

    def backward(self, parameters: Mapping[str, Array], kept: Any, gradient: Array) -> tuple[Any, dict[str, Array]]:
        given, of_parameters = super().backward(parameters, kept, gradient)
        return (given * numpy.nan if self.place == "backward" and self._is_due() else given), of_parameters

    def _is_due(self) -> bool:
        self.calls += 1
        return self.calls == 4 + 3


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_where_nan_comes_from(world: World, schedule: str, place: str) -> None:
    """The error names rank, stage and micro-batch, and parameters stay those of the step before."""
    several_stages(world)
    stage = world.size // 2
    layers = [Dense(number) for number in range(LAYERS)]
    first = next(n for n in range(LAYERS) if _stage_of(n, world.size) == stage)
    layers[first] = Spoiled(first, place)
    build = builder(32, 16, partial(Pipeline, world.size, schedule, 4), layers)
    trainer = Trainer(build, [StopAtStep(9)])
    trainer.step()
    before = {name: value.copy() for name, value in trainer.adapter.parameters().items()}
    text = error_on_all(world, NonFiniteError, trainer.step)
    is_loss = stage == world.size - 1
    named = "the loss of" if is_loss else "the output of"
    words = f"{named if place == 'forward' else 'the gradient by the inputs of'} micro-batch 2"
    assert text.startswith(f"{world.name(stage)}, stage {stage} of pipeline 0: {words} was the first to hold NaN")
    assert "Step 2" in text
    for name, value in trainer.adapter.parameters().items():
        assert value.tobytes() == before[name].tobytes()
    trainer.step()
    trainer.close()


def _stage_of(layer: int, stages: int) -> int:
    """The stage of a layer: the first stages have one more."""
    sizes = [LAYERS // stages + (stage < LAYERS % stages) for stage in range(stages)]
    return next(stage for stage in range(stages) if layer < sum(sizes[: stage + 1]))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("5.weight", numpy.zeros((2, 2)), r"5\.weight of shape \(2, 2\), the model 5\.weight of shape \(6, 3\)"),
        ("0.bias", None, r"nothing for 0\.bias, the model 0\.bias of shape \(6,\)"),
        ("6.weight", numpy.zeros(3), r"a parameter 6\.weight, the model layers 0 to 5"),
    ],
)
def test_a_checkpoint_with_other_parameters(world: World, name: str, value: Any, text: str) -> None:
    """The stages that do not have the parameter refuse it too, and nothing changes."""
    several_stages(world)
    strategy, model = Pipeline(world.size), layered()
    strategy.begin(world, model)
    strategy.own_state()
    state, before = model.state(), {key: one.copy() for key, one in model.parameters().items()}
    state["parameters"] = {key: one + 1 for key, one in state["parameters"].items() if key != name}
    if value is not None:
        state["parameters"][name] = value
    with pytest.raises(CheckpointError, match=text):
        model.restore(state)
    for key, one in model.parameters().items():
        assert one.tobytes() == before[key].tobytes()
    strategy.close()
