"""load_parameters of each LocalModel copies the values. Strategies give their own buffers, and change them later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest

import mpitrain as mt


def array_function() -> Any:
    values = {"w": numpy.zeros((3, 2), "float32"), "b": numpy.zeros(4, "float32")}
    return mt.ArrayFunction(lambda *_: 0.0, values, mt.optim.SGD(1.0))


def accumulated() -> Any:
    return mt.Accumulate(array_function(), per_rank_batch=2)


def module() -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def torch_module() -> Any:
    made = module()
    torch = pytest.importorskip("torch")
    return mt.TorchModule(made, lambda *_: 0.0, torch.optim.SGD(made.parameters(), lr=0.1))


def loop_model() -> Any:
    made = module()
    torch = pytest.importorskip("torch")
    from mpitrain.adapters.torch_buffers import ModuleBuffers
    from mpitrain.adapters.torch_trained import Trained
    from mpitrain.torch.local_gradients import LoopModel

    model = LoopModel(Trained(made, "a test"), ModuleBuffers(made), torch.optim.SGD(made.parameters(), lr=0.1))
    model.kept = made  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize("make", [array_function, accumulated, torch_module, loop_model])
def test_the_values_are_copied(make: Callable[[], Any]) -> None:
    model = make()
    values = {name: numpy.full_like(value, 2) for name, value in model.parameters().items()}
    assert len(values) > 1
    model.load_parameters(values)
    for value in values.values():
        value[...] = 3
    for name, value in model.parameters().items():
        numpy.testing.assert_array_equal(value, numpy.full_like(values[name], 2))
