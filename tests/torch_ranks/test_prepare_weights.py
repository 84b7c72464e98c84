"""Losses that are means over tokens, class weights, masked positions or boxes: gradients are those of one process."""

from __future__ import annotations

import contextlib
import io
import math
import pickle
from typing import Any

import pytest
import torch

import mpitrain as mt
import mpitrain.torch
from mpitrain import World
from mpitrain.errors import ConfigError, DataError, GradientError, MismatchError
from tests.ranks.common import error_on_all, skip_alone

from .prepared import compare, mlp, samples, sgd

CLASS_WEIGHTS = torch.tensor([0.2, 3.0, 0.7], dtype=torch.float64)


def tokens(count: int = 33, length: int = 6) -> Any:
    """Sequences of inputs, and their labels, of which very different numbers count."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(count, length, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (count, length), generator=generator)
    ends = torch.arange(count) * 5 % (length + 1)
    ends[-1] = 2  # the last batch has this one alone
    y[torch.arange(length) >= ends[:, None]] = -100
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


def token_loss(model: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def class_loss(model: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(x), y, CLASS_WEIGHTS)


def box_loss(model: Any, x: Any, y: Any) -> Any:
    """As of a detector: the sum over boxes by their number, which differs for each image, and may be 0."""
    boxes = x[:, 0] > 0
    return (model(x)[boxes] ** 2).sum() / boxes.sum().clamp(min=1)


def count_tokens(batch: Any, output: Any) -> Any:
    assert output is None or output.shape[:2] == batch[1].shape
    return (batch[1] != -100).sum()


def dataset() -> Any:
    x, y = samples()
    x[-1, 0] = 1.0  # the only sample of the last batch has a box
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


CASES = {
    "tokens": (tokens, token_loss, count_tokens),
    "class weights": (dataset, class_loss, lambda batch, _: CLASS_WEIGHTS[batch[1]].sum()),
    "boxes": (dataset, box_loss, lambda batch, _: (batch[0][:, 0] > 0).sum()),
    "masked outputs": (tokens, token_loss, lambda batch, output: ((output[..., 0] > -99) & (batch[1] >= 0)).sum()),
}


@pytest.mark.parametrize("how", ["prepare", "weight"])
@pytest.mark.parametrize("case", CASES)
def test_losses_that_are_not_means_over_samples(world: World, case: str, how: str) -> None:
    """And their means over all batches, in training and in an evaluation."""
    make_data, loss_of, count = CASES[case]
    found: list[float] = []

    def run(model: Any, optimizer: Any, data: Any) -> None:
        ours = hasattr(data, "share")
        for batch in data:
            optimizer.zero_grad()
            loss = loss_of(model, *batch)
            if ours and how == "weight":
                mpitrain.torch.weight(count(batch, model(batch[0])))
            loss.backward()
            optimizer.step()
            found.append((data.mean(loss) if ours else loss).item())
        test = mpitrain.torch.shard(make_data()) if ours else make_data()
        with torch.no_grad():
            for batch in test:
                loss, weight = loss_of(model, *batch), None
                if ours and how == "weight":
                    weight = count(batch, model(batch[0]))
                found.append((test.mean(loss, weight=weight) if ours else loss).item())

    compare(world, mlp(), make_data, run=run, **({"weight": count} if how == "prepare" else {}))
    assert found[: len(found) // 2] == pytest.approx(found[len(found) // 2 :], rel=1e-13)


@pytest.mark.parametrize("apart", [False, True])
def test_accumulated(world: World, apart: bool) -> None:
    """Means over the tokens of each batch, of which two make a step. A mean over samples would be another one."""

    def run(model: Any, optimizer: Any, data: Any) -> None:
        for number, (x, y) in enumerate(data, 1):
            last = number % 2 == 0 or number == 5
            own = apart and hasattr(data, "share") and not last
            with mpitrain.torch.accumulate(model) if own else contextlib.nullcontext():
                loss = token_loss(model, x, y)  # NaN where nothing counts
                (loss if is_weighted else loss.nan_to_num()).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    is_weighted = True
    compare(world, mlp(), tokens, run=run, weight=count_tokens)
    is_weighted = False
    if world.size > 1:
        with pytest.raises(AssertionError, match="not close"):
            compare(world, mlp(), tokens, run=run)


def test_a_number_and_two_losses(world: World) -> None:
    """Each loss has its weight. Equal weights are a mean over the ranks that have samples."""

    def run(model: Any, optimizer: Any, data: Any) -> None:
        for x, y in data:
            optimizer.zero_grad()
            for own in (y != -100).long(), (y == 1).long():
                if hasattr(data, "share"):
                    mpitrain.torch.weight(own.sum(), data)
                loss = (model(x).square().sum(2) * own).sum() / own.sum().clamp(min=1)
                loss.backward()
            optimizer.step()

    data = tokens()
    data.dataset.tensors[1][0, 1] = 1  # each batch has a 1
    compare(world, mlp(), lambda: data, run=run)
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    x = torch.arange(1.0, 2 * world.size, dtype=torch.float64)[:, None]
    model, _, data = mpitrain.torch.prepare(model, sgd(model.parameters()), [x], weight=3)
    for own in data:
        model(own).mean().backward()
        own_mean = own.mean().item()
        assert data.mean(own.mean()) == pytest.approx(world.mean(own_mean))
        assert model.weight.grad.item() == pytest.approx(world.mean(own_mean))


def stepping(loss_of: Any, means: list[float] | None = None) -> Any:
    """A loop that notes its means."""

    def run(model: Any, optimizer: Any, data: Any) -> None:
        for batch in data:
            optimizer.zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            optimizer.step()
            if means is not None:
                means.append((data.mean(loss) if hasattr(data, "share") else loss).item())

    return run


def test_rounds(world: World) -> None:
    """One step a round, with the weights of the outer step: the mean over tokens of the ranks' parameters."""
    plain = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    options: Any = {"strategy": mt.LocalSGD(1), "weight": count_tokens, "tolerance": 1e-6}
    compare(world, mlp(), tokens, make_optimizer=plain, run=stepping(token_loss), **options)


def test_nothing_counts(world: World) -> None:
    """No image has a box, or all but the first: a loss of 0 is one, and a mean over nothing is NaN."""
    for boxes in (0, 1):
        means: list[float] = []
        x, y = samples()
        x[boxes:, 0] = -1.0
        given = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
        compare(world, mlp(), lambda given=given: given, run=stepping(box_loss, means), weight=CASES["boxes"][2])
        assert means[:5] == pytest.approx(means[5:], rel=1e-13)
    model, _, data = prepared()
    x, y = next(iter(data))
    loss = token_loss(model, x, torch.full_like(y, -100))
    assert math.isnan(data.mean(loss, weight=0))


def prepared(**options: Any) -> Any:
    model = mlp()
    return mpitrain.torch.prepare(model, sgd(model.parameters()), tokens(), **options)


def step(model: Any, data: Any, weight: Any) -> None:
    x, y = next(iter(data))
    if weight is not None:
        mpitrain.torch.weight(weight)
    token_loss(model, x, y).backward()


def test_weights_that_cannot_be(world: World) -> None:
    list(mpitrain.torch.shard(tokens()))
    with pytest.raises(DataError, match="while no batch of prepared data is in use"):
        mpitrain.torch.weight(1)
    model, _, data = prepared()
    for bad, text in ((float("nan"), "has weight nan"), (-1, "has weight -1.0")):
        assert text in error_on_all(world, DataError, lambda bad=bad: step(*prepared()[::2], bad))
    for bad, text in (("many", "a str"), (torch.ones(2), "the shape (2,)"), ([], "the shape (0,)")):
        with pytest.raises(DataError) as found:
            step(model, data, bad)
        assert text in str(found.value)
    virtual = mt.Sync(virtual_ranks=8)
    assert "weight= together with virtual_ranks=8" in error_on_all(
        world, ConfigError, lambda: prepared(strategy=virtual, weight=1)
    )
    model, _, data = prepared(strategy=virtual)
    with pytest.raises(ConfigError, match="with virtual ranks"):
        step(model, data, 1)


def test_a_weight_of_one_rank_alone(world: World) -> None:
    skip_alone(world)
    model, _, data = prepared()
    odd = world.rank == world.size - 1
    text = error_on_all(world, MismatchError, lambda: step(model, data, 5 if odd else None))
    assert "step with a weight of the program's own" in text
    text = error_on_all(world, MismatchError, lambda: prepared(weight=1 if odd else None))
    assert "options weight" in text


def test_a_weight_for_other_data(world: World) -> None:
    """The batch that was taken last is not that of the model; an evaluation within the loop is no mistake."""
    model, optimizer, data = prepared()
    for batch in mpitrain.torch.shard(tokens()):
        mpitrain.torch.weight(len(batch[0]))
    loop_of = zip(data, mpitrain.torch.shard(tokens()), strict=True)
    (x, y), _ = next(loop_of)
    mpitrain.torch.weight((y != -100).sum())
    with pytest.raises(GradientError, match=r"call weight\(n, data\)"):
        token_loss(model, x, y).backward()
    mpitrain.torch.weight((y != -100).sum(), data)
    token_loss(model, x, y).backward()
    optimizer.step()


def test_habits(world: World) -> None:
    """A mean is a float, and has item(); a saved one is a plain float."""
    model, optimizer, data = prepared()
    stepping(token_loss)(model, optimizer, data)
    mean = data.mean(1.5)
    assert (mean, mean.item(), f"{mean:.2f}", repr(mean), type(mean.item())) == (1.5, 1.5, "1.50", "1.5", float)
    assert pickle.loads(pickle.dumps(mean)) == 1.5
    file = io.BytesIO()
    torch.save({"loss": mean}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"loss": 1.5}
