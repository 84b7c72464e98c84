"""Layers of arrays on the GPU: in micro-batches they train as those of NumPy do, and stages are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import numpy
import pytest

from mpitrain import ArrayLayers, Parts, Pipeline, StopAtStep, Sync, Trainer, World
from mpitrain.arrays import Array, namespace
from mpitrain.data import ArrayData
from mpitrain.errors import ConfigError
from mpitrain.optim import SGD
from mpitrain.strategies import Strategy
from tests.ranks import layered
from tests.ranks.trainings import Record

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

COUNT, BATCH, STEPS = 45, 14, 6  # the last batch of an epoch has 3 samples


class OnPlace(layered.Dense):
    """The layer of the tests on the host, with parameters where the module `xp` has its arrays."""

    def __init__(self, number: int, xp: ModuleType) -> None:
        super().__init__(number)
        self.xp = xp

    def parameters(self) -> dict[str, Array]:
        return {name: self.xp.asarray(value) for name, value in super().parameters().items()}

    def forward(self, parameters: Mapping[str, Array], inputs: Array) -> tuple[Array, Any]:
        assert namespace(inputs) is self.xp
        output = self.xp.tanh(inputs @ parameters["weight"] + parameters["bias"])
        return output, (inputs, output)


def model(xp: ModuleType) -> ArrayLayers:
    layers = [OnPlace(number, xp) for number in range(layered.LAYERS)]
    optimizer = SGD(layered.RATE, momentum=layered.MOMENTUM, clip_norm=layered.CLIP)
    return ArrayLayers(layers, layered.square, optimizer)


def trained(xp: ModuleType, strategy: Callable[[], Strategy]) -> tuple[Trainer, list[float]]:
    def build(world: World) -> Parts:
        data = ArrayData(world, layered.samples(COUNT), global_batch=BATCH, shuffle=False)
        return Parts(model(xp), strategy(), data)

    record = Record()
    trainer = Trainer(build, [StopAtStep(STEPS), record])
    trainer.run()
    return trainer, [step.loss for step in record.steps]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(Sync, id="sync", marks=pytest.mark.nightly),
        pytest.param(partial(Pipeline, 1, micro_batches=5), id="1f1b", marks=pytest.mark.nightly),
        pytest.param(partial(Pipeline, 1, "gpipe", 3, recompute=True), id="gpipe, recomputed"),
        pytest.param(
            partial(Pipeline, "auto", num_stages=1, micro_batches=2, sample=layered.samples(4)),
            id="auto",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_layers_on_the_gpu_train_as_in_one_process(world: World, strategy: Callable[[], Strategy]) -> None:
    """Of NumPy without mpitrain, in float64: only the order of additions differs."""
    expected, losses = layered.plain(COUNT, BATCH, STEPS)
    trainer, found = trained(cupy, strategy)
    assert found == pytest.approx(losses, rel=1e-12)
    parameters = trainer.adapter.parameters()
    assert parameters.keys() == expected.keys()
    for name, value in parameters.items():
        assert isinstance(value, cupy.ndarray)
        numpy.testing.assert_allclose(value.get(), expected[name], rtol=1e-11, atol=1e-13)
    trainer.close()


def test_what_a_layer_on_the_gpu_costs(world: World) -> None:
    strategy = Pipeline("auto", num_stages=1, sample=layered.samples(4))
    strategy.begin(world, model(cupy))
    (costs,) = strategy.costs
    widths = list(zip(layered.WIDTHS, layered.WIDTHS[1:], strict=False))
    assert [cost.parameter_bytes for cost in costs] == [8 * (rows * columns + columns) for rows, columns in widths]
    assert [cost.activation_bytes for cost in costs] == [8 * 4 * (rows + columns) for rows, columns in widths]
    strategy.close()


def test_stages_on_gpus_are_refused(world: World) -> None:
    if world.size == 1:
        pytest.skip("needs two ranks")
    if world.size > layered.LAYERS:
        pytest.skip("there are 6 layers")
    with pytest.raises(ConfigError, match=r"parameters are on a GPU; stages work on the CPU only\. Use mt\.Sync"):
        Pipeline(world.size).begin(world, model(cupy))
