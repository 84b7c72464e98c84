"""A PyTorch module whose optimizer is divided between the ranks, beside the same one that is not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from mpitrain import (
    Checkpoint,
    CompareReplicas,
    Hook,
    LossScale,
    Parts,
    ShardedSync,
    Step,
    StopAtStep,
    Sync,
    Trainer,
    World,
)
from mpitrain.adapters.torch_shard import ELEMENTWISE
from mpitrain.errors import CheckpointError, ConfigError, MismatchError
from mpitrain.exchange.exchange import make_exchange
from mpitrain.exchange.scattered import ScatteredExchange
from mpitrain.strategies import Strategy
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone

from .torch_modules import INPUTS, Net, Normed, adam, bits, builder, made, sgd

pytestmark = pytest.mark.filterwarnings("ignore:no rank's loss depends on these parameters")

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "sync": lambda: Sync(lambda world: make_exchange(world, "ring")),
    "sharded": lambda: ShardedSync(lambda world: ScatteredExchange(world, "ring")),
}


class Mixed(torch.nn.Module):
    """Parameters of two dtypes, one without dimensions, one that is not contiguous, one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(INPUTS, 5)
        self.narrow = torch.nn.Linear(5, 3).to(torch.bfloat16)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.turned = torch.nn.Parameter(torch.eye(3, 4).t())
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))

    def to(self, *_: Any) -> Mixed:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x.float())) * self.scale
        return self.narrow(hidden.bfloat16()).float() @ self.turned[:3] + self.nothing.sum()


def run(strategy: str, kind: Any, optimizer: Any, steps: int, *hooks: Hook, **options: Any) -> Trainer:
    def build(world: World) -> Parts:
        parts = builder(kind, optimizer, **options)(world)
        return Parts(parts.adapter, STRATEGIES[strategy](), parts.data)

    trainer = Trainer(build, [*hooks, StopAtStep(steps)])
    trainer.run()
    trainer.own_state()
    return trainer


def assert_alike(found: Trainer, expected: Trainer) -> None:
    assert bits(found) == bits(expected)
    found.close()
    expected.close()


def of(name: str, **options: Any) -> Callable[[Any], Any]:
    """An optimizer of torch.optim with its defaults, at one rate."""

    def make(module: Any) -> Any:
        trained = [its for its in module.parameters() if its.requires_grad]
        return getattr(torch.optim, name)(trained, lr=0.01, **options), {"schedule": None}

    return make


@pytest.mark.parametrize("kind", [Net, Normed, Mixed])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_each_elementwise_optimizer_has_the_bits_of_sync(world: World, name: str, kind: Any) -> None:
    """Parameters, buffers, losses and the state of the optimizer, in two sets of options."""
    more: dict[str, Any] = {"SGD": {"momentum": 0.9, "dampening": 0.1}, "Adam": {"amsgrad": True}}.get(name, {})
    for options in ({}, more) if more else ({},):
        found, expected = (run(strategy, kind, of(name, **options), 4) for strategy in ("sharded", "sync"))
        assert_same_bits(world, *found.adapter.parameters().values())
        assert_alike(found, expected)


@pytest.mark.parametrize(("kind", "optimizer"), [(Net, sgd), (Normed, sgd)])
def test_groups_and_schedules(world: World, kind: Any, optimizer: Any) -> None:
    assert_alike(run("sharded", kind, optimizer, 9), run("sync", kind, optimizer, 9))


@pytest.mark.parametrize("most", [None, 2])
def test_clipping(world: World, most: int | None) -> None:
    """By the norm of all ranks' parts. It is added up in another order than with Sync, so the last bits may differ."""
    found, expected = (run(strategy, Net, adam, 9, most=most) for strategy in ("sharded", "sync"))
    assert found.adapter.gradient_norm() == pytest.approx(expected.adapter.gradient_norm(), rel=1e-9)
    for name, value in expected.adapter.parameters().items():
        numpy.testing.assert_allclose(found.adapter.parameters()[name], value, rtol=1e-9, atol=1e-11, err_msg=name)
    assert_same_bits(world, *found.adapter.parameters().values())
    found.close()
    expected.close()


def test_a_loss_scale(world: World) -> None:
    """In fp16, with steps that are skipped."""
    trainers = []
    for strategy in ("sharded", "sync"):
        scale = LossScale(2.0**20, growth_interval=3)
        options: Any = {"precision": "fp16", "loss_scale": scale, "dtype": torch.float32}
        trainers.append(run(strategy, Normed, of("AdamW"), 12, **options))
        assert 2 < scale.skipped_steps < 10
    assert_alike(*trainers)


@pytest.mark.parametrize("kind", [Net, Normed, Mixed])
@pytest.mark.parametrize("strategies", [("sync", "sharded"), ("sharded", "sync"), ("sharded", "sharded")])
def test_checkpoints_load_with_and_without(world: World, shared: Path, strategies: Any, kind: Any) -> None:
    """A run that changes the strategy at a checkpoint ends with the bits of one that does not."""
    whole = run("sync", kind, of("NAdam"), 8)
    run(strategies[0], kind, of("NAdam"), 5, Checkpoint(shared, steps=2)).close()
    assert_alike(run(strategies[1], kind, of("NAdam"), 8, Checkpoint(shared, steps=100)), whole)


def test_a_state_of_before(world: World) -> None:
    """What the optimizer has kept before it is divided goes on: Adagrad begins with a sum that is not 0."""
    found, expected = (run(one, Net, of("Adagrad", initial_accumulator_value=0.5), 3) for one in ("sharded", "sync"))
    assert_alike(found, expected)


def test_the_state_of_before_is_freed_when_a_step_begins(world: World) -> None:
    """An error in `begin` still needs it. The first gradients need its memory."""
    module = made(Net)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adagrad(trained, initial_accumulator_value=0.5)
    sums = [weakref.ref(entry["sum"]) for entry in optimizer.state.values()]
    parts = builder(lambda: module, lambda _: (optimizer, {}))(world)
    strategy = STRATEGIES["sharded"]()
    strategy.begin(world, parts.adapter)
    assert None not in [one() for one in sums]
    batch, weight = next(parts.data)
    strategy.begin_step(weight)
    gc.collect()
    assert [one() for one in sums] == [None] * len(sums)
    for entry in optimizer.state.values():  # of a piece, in memory of its own
        assert entry["sum"].untyped_storage().nbytes() == entry["sum"].nbytes
    strategy.finish_step(parts.adapter, parts.adapter.loss_and_gradients(batch, strategy.on_gradient))
    strategy.close()


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_an_optimizer_of_before_goes_on_in_another_world(world: World, name: str) -> None:
    """One module and one optimizer for all Worlds; afterwards the optimizer has its parameters, in their groups."""

    class Rebuild(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            if step.number in (2, 3):
                trainer.rebuild(replace(world, generation=world.generation + step.number))

    trainers = []
    for strategy in ("sharded", "sync"):
        module = made(Net)
        optimizer, options = adam(module) if name == "Adam" else sgd(module)
        given = [list(group["params"]) for group in optimizer.param_groups]
        parts = partial(run, strategy, lambda module=module: module, lambda _, optimizer=optimizer: (optimizer, {}))
        trainer = parts(5, Rebuild(), **{**options, "clip_norm": None})
        trainers.append((bits(trainer), trainer))
        trainer.close()
        trainer.close()
        for group, parameters in zip(optimizer.param_groups, given, strict=True):
            assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in parameters]
    assert trainers[0][0] == trainers[1][0]
    run("sync", lambda: module, lambda _: (optimizer, {}), 1).close()


def test_a_replica_is_repaired(world: World) -> None:
    skip_alone(world)

    class Flip(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            if step.number == 4 and world.rank == world.size - 1:
                trainer.adapter.parameters()["norm.running_var"].view("u1")[9] ^= 8

    found = run("sharded", Normed, of("Adam"), 6, Flip(), CompareReplicas(1, repair="root"))
    assert_alike(found, run("sharded", Normed, of("Adam"), 6))


def test_each_rank_has_its_share(world: World) -> None:
    """All elements of all ranks together are those of the model, and each has its part."""
    trainer = run("sharded", Net, of("Adam"), 2)
    state = trainer.adapter._torch_optimizer.state.values()
    held = world.allgather(sum(entry["exp_avg"].numel() for entry in state))
    trained = [its for its in Net().named_parameters() if its[1].requires_grad and its[0] != "spare"]
    assert sum(held) == sum(its.numel() for _, its in trained)
    # The elements are divided evenly, with 5 that have no state: those of `spare`, and of two buffers.
    assert max(held) - min(held) <= 1 + 5
    trainer.close()


# -- what is refused --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("optimizers", "kind", "text"),
    [
        ((of("AdamW", weight_decay=0.2), of("AdamW", weight_decay=0.1)), "AdamW", "'weight_decay': 0.1"),
        ((in_groups(0.25), in_groups(0.125)), "SGD", "'lr': 0.125"),
        ((in_groups(0.25, clip_norm=1.0), in_groups(0.25, clip_norm=2.0)), "SGD", "clip_norm=2.0"),
        ((in_groups(0.25, clip_norm=0.1), in_groups(0.25, clip_norm=numpy.float32(0.1))), "SGD", "0.1000000014"),
        ((of("AdamW", weight_decay=0.25), of("AdamW", weight_decay=numpy.float32(0.5))), "AdamW", "decay': 0.5,"),
        ((of("Rprop"), of("Rprop", etas=(0.25, numpy.float32(1.5)))), "Rprop", "'etas': [0.25, 1.5]"),
    ],
)
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
        def before_step(self, trainer: Trainer) -> None:
            if trainer.step_number == 1 and world.rank == world.size - 1:
                trainer.adapter._torch_optimizer.param_groups[1][option] = value

    def train() -> None:
        run("sharded", Net, in_groups(0.25), 4, Set(), Keep())

    class Keep(Hook):
        def before_run(self, trainer: Trainer) -> None:
            trainers.append(trainer)

    said = error_on_all(world, MismatchError, train)
    assert f"{world.name(world.size - 1)} has updated its part of the parameters with the learning rate 0.5 and" in said
    assert f"'{option}': {value}" in said
    assert trainers[0].step_number == 1
    trainers[0].close()
