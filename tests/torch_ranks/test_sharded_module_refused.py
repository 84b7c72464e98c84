"""What a sharded optimizer refuses: states, optimizers and options that do not fit; and what is undone then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from mpitrain import Hook, Parts, ShardedSync, StopAtStep, Sync, Trainer, World
from mpitrain.errors import CheckpointError, ConfigError, MismatchError
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone

from .torch_modules import STRATEGIES, Net, adam, assert_alike, bits, builder, made, of, run

pytestmark = pytest.mark.filterwarnings("ignore:no rank's loss depends on these parameters")


@pytest.mark.parametrize("fault", ["shape", "keys"])
def test_a_state_that_does_not_fit_changes_no_rank(world: World, fault: str) -> None:
    """The fault is in one small parameter, which few ranks own. Every rank finds it, and keeps its pieces."""
    trainer = run("sharded", Net, of("Adam"), 2)
    other = run("sharded", Net, of("Adam"), 3)
    state = copy.deepcopy(other.adapter.state())
    if fault == "shape":
        state["optimizer"]["state"]["last.bias"]["exp_avg"] = numpy.zeros(1)
    else:
        del state["optimizer"]["state"]["last.bias"]["exp_avg"]
    before = bits(trainer)
    with pytest.raises(CheckpointError, match=r"the checkpoint's optimizer state for last\.bias"):
        trainer.adapter.restore(state)
    trainer.own_state()
    assert bits(trainer) == before
    assert_alike(trainer, run("sharded", Net, of("Adam"), 2))
    other.close()


@pytest.mark.parametrize("strategy", ["sync", "sharded"])
def test_after_an_error_in_begin_the_module_is_as_before(
    world: World, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """It makes the steps that another module makes."""

    def fail(self: World, what: str, *rest: Any, **named: Any) -> Any:
        if what == "divide the optimizer":
            raise MismatchError("made by the test")
        return agree(self, what, *rest, **named)

    agree = World.agree
    made_parts = builder(Net, adam)(world)
    expected = run(strategy, Net, adam, 3)
    with monkeypatch.context() as patched:
        patched.setattr(World, "agree", fail)
        with pytest.raises(MismatchError, match="made by the test"):
            ShardedSync().begin(world, made_parts.adapter)
    parts = Parts(made_parts.adapter, STRATEGIES[strategy](), made_parts.data)
    trainer = Trainer(lambda _: parts, [StopAtStep(3)])
    trainer.run()
    trainer.own_state()
    assert_alike(trainer, expected)


def test_a_module_whose_strategy_is_closed_makes_no_step(world: World) -> None:
    """Its optimizer has lost its state."""
    trainer = run("sharded", Net, of("Adam"), 2)
    trainer.close()
    strategy = Sync()
    strategy.begin(world, trainer.adapter)
    strategy.begin_step(1.0)
    batch, _ = next(trainer.data)
    loss = trainer.adapter.loss_and_gradients(batch, strategy.on_gradient)
    with pytest.raises(ConfigError, match="its state has gone with the strategy that was closed"):
        strategy.finish_step(trainer.adapter, loss)
    strategy.close()


class Own(torch.optim.Adam):
    """It may do anything."""


@pytest.mark.parametrize("make", [Own, torch.optim.Adafactor], ids=["own", "Adafactor"])
def test_optimizers_that_may_need_whole_tensors(world: World, make: Any) -> None:
    parts = builder(Net, lambda module: (make([p for p in module.parameters() if p.requires_grad]), {}))(world)
    with pytest.raises(ConfigError, match=rf"{make.__name__} may need whole tensors.*AdamW.*or mt.Sync"):
        ShardedSync().begin(world, parts.adapter)


def in_groups(rate: float, **more: Any) -> Callable[[Any], Any]:
    """SGD whose first group has the rate 0.5, and whose second one has this rate."""

    def make(module: Any) -> Any:
        first, *others = (its for its in module.parameters() if its.requires_grad)
        return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": rate}], lr=0.5), {"schedule": None} | more

    return make


DIFFERENT = [
    ((of("AdamW", weight_decay=0.2), of("AdamW", weight_decay=0.1)), "AdamW", "'weight_decay': 0.1"),
    ((in_groups(0.25), in_groups(0.125)), "SGD", "'lr': 0.125"),
    ((in_groups(0.25, clip_norm=1.0), in_groups(0.25, clip_norm=2.0)), "SGD", "clip_norm=2.0"),
    ((in_groups(0.25, clip_norm=0.1), in_groups(0.25, clip_norm=numpy.float32(0.1))), "SGD", "0.1000000014"),
    ((of("AdamW", weight_decay=0.25), of("AdamW", weight_decay=numpy.float32(0.5))), "AdamW", "decay': 0.5,"),
    ((of("Rprop"), of("Rprop", etas=(0.25, numpy.float32(1.5)))), "Rprop", "'etas': [0.25, 1.5]"),
]


@pytest.mark.parametrize(("optimizers", "kind", "text"), DIFFERENT)
def test_options_that_differ(world: World, optimizers: Any, kind: str, text: str) -> None:
    skip_alone(world)
    parts = builder(Net, optimizers[world.rank == 1])(world)
    said = error_on_all(world, MismatchError, lambda: ShardedSync().begin(world, parts.adapter))
    assert f"{world.name(1)}: {kind}" in said
    assert text in said


def test_numpys_numbers_are_equal_to_pythons(world: World) -> None:
    """As options of two optimizers, which make the same step."""
    odd = world.rank == world.size - 1
    kind = numpy.float32 if odd else float
    trainer = run("sharded", Net, of("AdamW", weight_decay=kind(0.5), eps=kind(0.125)), 2)
    assert trainer.adapter.state()["optimizer"]["groups"]["0"]["weight_decay"] == 0.5
    assert_same_bits(world, *trainer.adapter.parameters().values())
    trainer.close()


@pytest.mark.parametrize("fault", ["settings", "class"])
def test_a_division_that_fails_is_undone(world: World, fault: str) -> None:
    """The optimizer, which has made a step before, has its parameters and its state again, and makes another step."""
    skip_alone(world)
    is_odd = world.rank == world.size - 1
    module = made(Net)
    trained = [its for its in module.parameters() if its.requires_grad]
    kind = Own if fault == "class" and is_odd else torch.optim.Adam
    optimizer = kind(trained, lr=0.125 if fault == "settings" and is_odd else 0.25)
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, 1.0 + world.rank)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    parts = builder(lambda: module, lambda _: (optimizer, {"schedule": None}))(world)
    error = MismatchError if fault == "settings" else ConfigError
    with pytest.raises(error, match=r"'lr': 0\.125" if fault == "settings" else "may need whole tensors"):
        ShardedSync().begin(world, parts.adapter)
    assert [id(its) for its in optimizer.param_groups[0]["params"]] == [id(its) for its in trained]
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys() == set(range(len(trained)))
    for number, entry in before["state"].items():
        assert entry.keys() == after["state"][number].keys()
        assert all(torch.equal(value, after["state"][number][key]) for key, value in entry.items())
    optimizer.step()
    assert all(entry["step"] == 2 for entry in optimizer.state.values())


@pytest.mark.parametrize(("option", "value"), [("lr", 0.125), ("momentum", 0.75)])
def test_options_that_a_hook_sets_on_one_rank(world: World, option: str, value: float) -> None:
    """The error comes with the first step that uses the option, though the first group's rate is the same."""
    skip_alone(world)
    trainers: list[Trainer] = []

    class Set(Hook):
        def before_run(self, trainer: Trainer) -> None:
            trainers.append(trainer)

        def before_step(self, trainer: Trainer) -> None:
            if trainer.step_number == 1 and world.rank == world.size - 1:
                trainer.adapter._torch_optimizer.param_groups[1][option] = value

    said = error_on_all(world, MismatchError, lambda: run("sharded", Net, in_groups(0.25), 4, Set()))
    assert f"{world.name(world.size - 1)} has updated its part of the parameters with the learning rate 0.5 and" in said
    assert f"'{option}': {value}" in said
    assert trainers[0].step_number == 1
    trainers[0].close()


@pytest.mark.parametrize(("step", "most"), [(1, 2), (3, None)])
def test_a_step_that_one_rank_does_not_make(world: World, step: int, most: int | None) -> None:
    """A hook of its optimizer removes the gradients, also in the last step of a run."""
    skip_alone(world)

    def odd(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        optimizer, more = of("Adam")(module)
        count = 0

        def remove(*_: object) -> None:
            nonlocal count
            count += 1
            if count == step and world.rank == world.size - 1:
                optimizer.zero_grad()

        optimizer.register_step_pre_hook(remove)
        return optimizer, more

    text = error_on_all(world, MismatchError, lambda: run("sharded", Net, odd, 3, most=most))
    assert "with no step, because a hook has removed all gradients" in text
