"""mpitrain.torch.Trainer: the parameters and metrics of one process, resume, the folder of the run, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mpitrain as mt
import mpitrain.torch
from mpitrain import World
from mpitrain.errors import ConfigError, DataError, MismatchError
from tests.ranks.common import error_on_all, skip_alone

from .prepared import BATCH, NUM_SAMPLES, assert_equal_everywhere, loader, mlp, samples, sgd

cross_entropy = torch.nn.functional.cross_entropy


EPOCHS, STEPS_PER_EPOCH = 3, -(-NUM_SAMPLES // BATCH)


def right(outputs: Any, targets: Any) -> Any:
    return outputs.argmax(1) == targets


def made(dropout: float = 0.0) -> tuple[Any, Any]:
    """A model and its optimizer, the same on every rank and at every call."""
    torch.manual_seed(0)
    model = mlp()
    if dropout:
        model.append(torch.nn.Dropout(dropout))
    return model, sgd(model.parameters())


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def plain(scheduler_interval: str = "") -> Any:
    """The model after the same training, as everybody writes it for one process."""
    model, optimizer = made()
    scheduler = halved(optimizer) if scheduler_interval else None
    data = loader(shuffle=True)
    torch.manual_seed(3)
    for _ in range(EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if scheduler_interval == "step":
                scheduler.step()
        if scheduler_interval == "epoch":
            scheduler.step()
    return model


def trained(world: World, *, dropout: float = 0.0, scheduler_interval: str = "", **options: Any) -> tuple[Any, Any]:
    """A model after training by Trainer, and what `fit` returned. Each rank is seeded otherwise; rank 0's counts."""
    model, optimizer = made(dropout)
    if scheduler_interval:
        options |= {"scheduler": halved(optimizer), "scheduler_interval": scheduler_interval}
    options = {"loss": cross_entropy, "max_epochs": EPOCHS, "directory": None} | options
    torch.manual_seed(3 + world.rank)
    metrics = mpitrain.torch.Trainer(model, optimizer, loader(shuffle=True), **options).fit()
    assert_equal_everywhere(world, model)
    return model, metrics


def assert_close(model: Any, other: Any, tolerance: float) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scheduler_interval", ["", "epoch", "step"])
def test_the_parameters_are_those_of_one_process(world: World, scheduler_interval: str) -> None:
    """Also of the last batch of an epoch, of one sample, which leaves most ranks without one."""
    model, metrics = trained(world, scheduler_interval=scheduler_interval)
    assert_close(model, plain(scheduler_interval), 1e-12)
    assert metrics == {}


def test_a_batch_of_another_form_and_an_evaluation_within(world: World) -> None:
    """The evaluation draws random numbers for its order, and changes no training."""

    def training_step(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch["x"]), batch["y"])

    def collate(pairs: Any) -> Any:
        x, y = zip(*pairs, strict=True)
        return {"names": [str(one) for one in y], "x": torch.stack(x), "y": torch.stack(y)}

    model, optimizer = made()
    torch.manual_seed(3)
    options: dict[str, Any] = {"training_step": training_step, "max_steps": EPOCHS * STEPS_PER_EPOCH, "interval": 2}
    options["evaluation"] = loader(shuffle=True, collate_fn=collate)
    given = loader(shuffle=True, collate_fn=collate)
    mpitrain.torch.Trainer(model, optimizer, given, directory=None, **options).fit()
    assert_close(model, plain(), 1e-12)
    model, _ = trained(world, evaluation=loader(shuffle=True), interval=2)
    assert_close(model, plain(), 1e-12)


@pytest.mark.parametrize(
    ("stop", "dropout"),
    [
        (STEPS_PER_EPOCH, 0.0),
        (STEPS_PER_EPOCH + 2, 0.25),
        pytest.param(STEPS_PER_EPOCH + 2, 0.0, marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_stopped_goes_on(world: World, shared: Path, stop: int, dropout: float) -> None:
    """After an epoch, and within one. Dropout, the order and the schedule are those of a run that did not stop."""
    options: dict[str, Any] = {"dropout": dropout, "scheduler_interval": "epoch", "evaluation": loader()}
    undisturbed, expected = trained(world, **options)
    trained(world, max_steps=stop, directory=shared / "run", **options)
    resumed, metrics = trained(world, directory=shared / "run", **options)
    assert_close(resumed, undisturbed, 1e-12)
    assert metrics == pytest.approx(expected, rel=1e-12)
    if not dropout:
        assert_close(resumed, plain("epoch"), 1e-12)


def test_an_evaluation_is_that_of_one_process(world: World) -> None:
    """Of a model in eval mode, which goes back to its mode. A layer that is frozen in eval mode stays so."""
    x, y = samples()
    model, optimizer = made(dropout=0.5)
    model.append(torch.nn.Dropout(0.5).eval())
    metrics = {"accuracy": right, "largest": lambda outputs, targets: outputs.detach().abs().amax(1).mean()}
    evaluation = loader(batch_size=7)  # the last batch has 5 samples
    options: Any = {"evaluation": evaluation, "metrics": metrics, "max_steps": 4, "interval": 3, "directory": None}
    trainer = mpitrain.torch.Trainer(model, optimizer, loader(), loss=cross_entropy, **options)
    values = trainer.fit()
    assert [layer.training for layer in model] == [True, True, True, True, False]
    model.eval()
    with torch.no_grad():
        outputs = model(x)
    assert values == pytest.approx(
        {
            "evaluation loss": float(cross_entropy(outputs, y)),
            "accuracy": int((outputs.argmax(1) == y).sum()) / NUM_SAMPLES,
            "largest": float(outputs.abs().amax(1).mean()),
        },
        rel=1e-12,
    )
    assert set(world.allgather(json.dumps(values))) == {json.dumps(values)}
    assert trainer.step_number == 4


def test_the_folder_of_a_run(world: World, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shared / "{script}-a"

    def fit(**options: Any) -> tuple[dict[str, float], list[str]]:
        capsys.readouterr()
        _, metrics = trained(world, directory=folder, evaluation=loader(), **options)
        return metrics, world.broadcast_object(capsys.readouterr().out.splitlines())

    _, printed = fit(max_steps=6)
    (run,) = [entry for entry in shared.iterdir() if entry.name.endswith("-a")]
    assert "{" not in run.name
    assert sorted(entry.name for entry in run.iterdir()) == ["checkpoints", "metrics.jsonl", "run.json"]
    assert printed[0] == f"the run is in {run}"
    world.barrier()
    metrics, printed = fit()
    assert f"resumed from {run / 'checkpoints' / 'step-00000006'} at step 6" in printed
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows][-1] == EPOCHS * STEPS_PER_EPOCH
    assert rows[-1]["evaluation loss"] == metrics["evaluation loss"]
    world.barrier()
    again, printed = fit()
    assert again == metrics
    assert printed[-1].startswith(f"all {EPOCHS * STEPS_PER_EPOCH} steps were made before; to train anew, ")


def refused(world: World, call: Callable[[], Any]) -> str:
    """`call` must raise ConfigError on every rank. Returns rank 0's text, which the others name as rank 0's."""
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.known_everywhere
    texts = world.allgather(str(caught.value))
    assert all(text.endswith(texts[0]) for text in texts), texts
    return texts[0]


@pytest.mark.parametrize("kind", ["another folder", "a file", "another record"])
def test_a_folder_of_something_else_is_refused(world: World, shared: Path, kind: str) -> None:
    path = shared / "mine"
    if world.is_root:
        if kind == "a file":
            path.write_text("text")
        else:
            path.mkdir()
            (path / "thesis.txt").write_text("text")
    if kind == "another record":
        mt.record_loop(path)(1, loss=1.0)
    world.barrier()
    text = refused(world, lambda: trained(world, directory=path))
    assert str(path) in text
    assert "give another directory" in text
    world.barrier()
    assert path.read_text() == "text" if kind == "a file" else not (path / "checkpoints").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "class of a model": ({"model": torch.nn.Linear}, "model is the class Linear"),
    "class of an optimizer": ({"optimizer": torch.optim.SGD}, "optimizer is the class SGD"),
    "foreign parameters": ({"optimizer": sgd(mlp().parameters())}, "parameter of shape"),
    "iterator": ({"loader": iter([])}, "something to loop over many times"),
    "empty loader": ({"loader": []}, "the loader has no batch"),
    "no loss": ({"loss": None}, "neither of loss= and training_step="),
    "two losses": ({"training_step": cross_entropy}, "both of loss= and training_step="),
    "class of a loss": ({"loss": torch.nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss"),
    "no end": ({"max_epochs": None}, "nothing ends the training"),
    "epochs": ({"max_epochs": 0}, "max_epochs is 0"),
    "steps": ({"max_steps": 1.5}, "max_steps is 1.5"),
    "interval": ({"interval": -1}, "interval is -1"),
    "scheduler": ({"scheduler": 0.1}, "scheduler is 0.1 (float)"),
    "foreign scheduler": ({"scheduler": halved(sgd(mlp().parameters()))}, "another optimizer"),
    "scheduler interval": ({"scheduler_interval": "batch"}, "allowed: 'epoch' and 'step'"),
    "metrics alone": ({"metrics": {"accuracy": right}}, "give evaluation= too"),
    "metric": ({"evaluation": loader(), "metrics": {"accuracy": 1}}, "'accuracy' is 1 (int)"),
    "metric's name": ({"evaluation": loader(), "metrics": {"evaluation loss": right}}, "a metric is named"),
    "list of metrics": ({"evaluation": loader(), "metrics": [right]}, "give functions by name"),
    "directory": ({"directory": 3}, "directory is 3 (int)"),
    "strategy": ({"strategy": "sync"}, "strategy is 'sync' (str)"),
    "virtual ranks": ({"strategy": mt.Sync(virtual_ranks=8)}, "has no method cut"),
    "seed": ({"seed": -1}, "seed is -1"),
    "hook": ({"hooks": [3]}, "it must be a Hook"),
    "precision": ({"precision": "fp8"}, "there is no precision"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(world: World, name: str) -> None:
    options, text = REFUSED[name]
    model, optimizer = made()
    arguments = {"model": model, "optimizer": optimizer, "loader": loader(), "loss": cross_entropy, "max_epochs": 1}
    arguments |= {"directory": None, **options}
    assert text in refused(world, lambda: mpitrain.torch.Trainer(**arguments))


def test_what_is_found_later(world: World) -> None:
    """Arguments that differ, and batches and metrics that do not fit: each rank finds these by itself."""
    model, optimizer = made()

    def fit(**options: Any) -> Callable[[], Any]:
        given = {"loss": cross_entropy, "max_steps": 1, "directory": None, **options}
        return lambda: mpitrain.torch.Trainer(model, optimizer, loader(), **given).fit()

    for call, text in (
        (fit(evaluation=[(*samples(), 1)]), "this batch is 3 parts; give training_step="),
        (fit(evaluation=loader(), metrics={"all": lambda y, t: torch.zeros(99)}), "has the shape (99,)"),
        (fit(evaluation=loader(), metrics={"text": lambda y, t: "good"}), "is a str"),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert text in str(caught.value)
        world.barrier()
    skip_alone(world)
    assert "last step" in error_on_all(world, MismatchError, lambda: trained(world, max_epochs=1 + world.rank))


def test_rounds(world: World) -> None:
    """A strategy of rounds: all ranks end with the same parameters."""
    _, metrics = trained(world, strategy=mt.LocalSGD(2), evaluation=loader())
    assert set(world.allgather(metrics["evaluation loss"])) == {metrics["evaluation loss"]}
