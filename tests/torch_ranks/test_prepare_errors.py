"""Errors of prepare() and of a loop after it: each one says what to do, and none is a wait."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import mpitrain.torch
from mpitrain import LocalSGD, Sync, World
from mpitrain.errors import ConfigError, DataError, GradientError, MismatchError, NonFiniteError
from mpitrain.job.failure import remark_on_part
from tests.ranks.common import error_on_all, skip_alone

from .prepared import assert_equal_everywhere, batches, loop, mlp, samples, sgd


def prepared(model: Any = None) -> tuple[Any, Any, Any]:
    model = mlp() if model is None else model
    return mpitrain.torch.prepare(model, sgd(model.parameters()), batches())


def loss_of(model: Any, batch: Any) -> Any:
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)


def test_models_and_optimizers_that_cannot_work(world: World) -> None:
    model = mlp()
    sparse = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True))
    for its, optimizer, text in (
        (model, torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (model, torch.optim.SparseAdam(model.parameters()), "SparseAdam"),
        (model, sgd(mlp().parameters()), "4 parameters that are not the model's"),
        (sparse, sgd(sparse.parameters()), "0 has sparse gradients; make the layer with sparse=False"),
    ):
        with pytest.raises(ConfigError, match=text):
            mpitrain.torch.prepare(its, optimizer, batches())
    with pytest.raises(ConfigError, match="not given to prepare"):
        mpitrain.torch.accumulate(model)
    with pytest.raises(ConfigError, match="there is no compression 'zip'"):
        mpitrain.torch.prepare(model, sgd(model.parameters()), batches(), compression="zip")
    for options, text in (
        ({"network": "fast"}, "network: 'fast' is not a number with a unit, as in 1Gbit/s"),
        ({"network": "1Gbit/s", "compression": "int8"}, "compression and network together: network chooses"),
        ({"network": "1Gbit/s", "algorithm": "ring"}, "network and algorithm together: network chooses"),
        ({"network": "1Gbit/s", "strategy": LocalSGD(2)}, "network together with LocalSGD"),
        ({"network": "1Gbit/s", "strategy": Sync(virtual_ranks=8)}, "network together with virtual_ranks=8"),
    ):
        error = error_on_all(
            world,
            ConfigError,
            lambda its=options: mpitrain.torch.prepare(model, sgd(model.parameters()), batches(), **its),
        )
        assert text in error
    prepared(model)
    with pytest.raises(ConfigError, match="this model was prepared before"):
        prepared(model)
    frozen = mlp().requires_grad_(False)
    assert "no parameters" in error_on_all(world, ConfigError, lambda: prepared(frozen))


def test_models_that_differ(world: World) -> None:
    skip_alone(world)
    odd = world.rank == world.size - 1
    wide = torch.nn.Linear(5, 4 if odd else 3)
    assert "['bias'] float32 (4,)" in error_on_all(world, MismatchError, lambda: prepared(wide))
    half_frozen = torch.nn.Linear(5, 3)
    half_frozen.bias.requires_grad_(not odd)
    assert "bias float32 (3,)" in error_on_all(world, MismatchError, lambda: prepared(half_frozen))


def test_nan_without_a_scaler(world: World) -> None:
    """Nothing is changed, and all ranks name the rank that had it."""
    model, optimizer, data = prepared()

    def run() -> None:
        for number, batch in enumerate(data):
            before.append(model[0].weight.detach().clone())
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            (loss * float("nan") if number == 1 and world.rank == world.size - 1 else loss).backward()
            optimizer.step()

    before: list[Any] = []
    text = error_on_all(world, NonFiniteError, run)
    assert f"{world.name(world.size - 1)}: the gradient of " in text
    assert torch.equal(before[-1], model[0].weight)
    assert len(before) == 2
    loop(model, optimizer, data)  # and all may continue
    assert_equal_everywhere(world, model)


def test_passes_that_cannot_count(world: World) -> None:
    model, optimizer, data = prepared()
    with pytest.raises(GradientError, match="no batch of the prepared data is in use"):
        loss_of(model, batches()[0]).backward()
    for batch in data:
        with mpitrain.torch.accumulate(model):
            loss_of(model, batch).backward()
        with pytest.raises(GradientError, match="put the last backward\\(\\) before a step outside"):
            optimizer.step()
    model = mlp()
    model[0].requires_grad_(False)
    model, optimizer, data = prepared(model)
    model[0].requires_grad_(True)
    text = error_on_all(world, GradientError, lambda: loop(model, optimizer, data))
    assert "0.bias, 0.weight had requires_grad=False at prepare()" in text
    model, optimizer, data = prepared()
    model.to(torch.float32)
    with pytest.raises(GradientError, match=r"2.bias is torch.strided torch.float32 on cpu; at prepare\(\)"):
        next(loss_of(model, (x.float(), y)).backward() for x, y in data)
    model, optimizer, data = prepared()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4, 2))]})
    with pytest.raises(GradientError, match=r"a parameter of shape \(4, 2\) that the model did not have at prepare"):
        loop(model, optimizer, data)


@pytest.mark.parametrize(
    "layer", [torch.nn.BatchNorm1d(5), torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.GroupNorm(4, 4))]
)
def test_norms_of_one_sample(world: World, layer: Any) -> None:
    """A part of one sample cannot be normalised. One process can do so with the whole batch, so all ranks say why."""
    skip_alone(world)
    model = torch.nn.Sequential(copy.deepcopy(layer), torch.nn.LazyLinear(3))
    model(torch.zeros(2, 5))
    x, y = samples(torch.float32)
    full, rest = 2 * world.size, 2 * world.size - 1
    given = [(x[:full], y[:full]), (x[:rest], y[:rest])]
    model, optimizer, data = mpitrain.torch.prepare(model, sgd(model.parameters()), given)
    text = error_on_all(world, DataError, lambda: loop(model, optimizer, data))
    assert f"batch 1 has {rest} samples for {world.size} ranks, so a rank computes with one of them, and " in text
    gc.collect()  # the loop that the error has ended
    # Where each sample has several values, as an image has, or in an evaluation, nothing is wrong.
    image = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 5)), torch.nn.BatchNorm1d(1), torch.nn.Flatten(1))
    image, optimizer, data = mpitrain.torch.prepare(image, sgd(image.parameters()), given)
    loop(image, optimizer, data)
    image.eval()
    with torch.no_grad():
        assert len([torch.nn.BatchNorm1d(5).eval()(x) for x, _ in mpitrain.torch.shard(given)]) == 2
    # Nothing looks at the layers afterwards.
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_nan_from_one_sample(world: World) -> None:
    """The reason that all ranks can give is named beside the usual ones."""
    skip_alone(world)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), _Scaled(), torch.nn.Linear(4, 3))
    x, y = samples(torch.float32)
    given = [(x[: 2 * world.size - 1], y[: 2 * world.size - 1])]
    model, optimizer, data = mpitrain.torch.prepare(model, sgd(model.parameters()), given)
    try:
        loop(model, optimizer, data)
        raise AssertionError("no error")
    except NonFiniteError as error:
        remark = remark_on_part(error, world)
    last = world.name(world.size - 1)
    assert remark.startswith(f"{last}: it computed with 1 sample of a batch of {2 * world.size - 1}, "), remark


class _Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / ((x - x.mean(0)).square().sum(0) / (len(x) - 1)).sqrt()  # as std(0), without its warning


def test_an_error_in_a_backward_pass(world: World) -> None:
    """Where all ranks catch it, the step that was begun is said to be open."""
    model, optimizer, data = prepared()

    def fail(gradient: Any) -> None:
        if failing:
            raise ZeroDivisionError("in a hook")

    failing = True
    model[0].weight.register_hook(fail)
    batch = next(iter(data))
    with pytest.raises(ZeroDivisionError, match="in a hook"):
        loss_of(model, batch).backward()
    failing = False
    with pytest.raises(GradientError, match=r"came twice in one step\. If an error has"):
        loss_of(model, batch).backward()
    # Nor is this one exchanged: none of its gradients has come in before.
    model[0](batch[0]).sum().backward(inputs=[model[0].weight])
    with pytest.raises(GradientError, match="a backward\\(\\) that an error ended in the middle of its exchange"):
        optimizer.step()
