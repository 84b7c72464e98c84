"""A small PyTorch module, its adapter, and one step of it without a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mpitrain import TorchModule  # noqa: E402
from mpitrain.reducer.bucket import plan_layout  # noqa: E402
from mpitrain.reducer.means import remarks_of  # noqa: E402
from mpitrain.state.names import split  # noqa: E402

X = numpy.random.default_rng(0).standard_normal((8, 3)).astype("float32")


def squares(module: Any, batch: Any) -> Any:
    return module(batch).square().mean()


def small(seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def adapted(optimizer: Callable[..., Any] = torch.optim.Adam, module: Any = None, **options: Any) -> TorchModule:
    module = module or small()
    return TorchModule(module, squares, optimizer(module.parameters(), lr=0.1), **options)


def one_step(adapter: Any, batch: Any = X) -> tuple[float, dict[str, numpy.ndarray]]:
    """Make a step as the strategy Sync does on one rank. Return the loss, and copies of the gradients by name."""
    plan = plan_layout(adapter.layout)
    flats = {dtype: numpy.full(count, numpy.nan, dtype) for dtype, count in plan.counts.items()}
    views = plan.named(flats)
    names = list(views)

    unused = []

    def on_gradient(index: int, gradient: numpy.ndarray | None) -> None:
        assert numpy.isnan(views[names[index]].astype("f8")).all(), "twice"
        if gradient is None:
            unused.append(index)
            gradient = numpy.zeros_like(views[names[index]])
        numpy.copyto(views[names[index]], gradient, casting="no")

    loss = adapter.loss_and_gradients(batch, on_gradient)
    remarks = remarks_of([(tuple(unused), adapter.note())])
    if adapter.loss_scale:
        for flat in flats.values():
            flat[:] = flat / adapter.loss_scale.value
    handed_in = {name: view.copy() for name, view in views.items()}
    adapter.apply_gradients(flats, remarks)
    return loss, handed_in


def bits(adapter: TorchModule) -> dict[str, bytes]:
    tensors, values = split(adapter.state())
    return {name: its.tobytes() for name, its in tensors.items()} | {
        name: repr(its).encode() for name, its in values.items()
    }


def with_optimizer(make: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        module = small()
        return TorchModule(module, squares, make(module), **options)

    return call
