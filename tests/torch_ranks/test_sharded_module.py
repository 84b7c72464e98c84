"""A PyTorch module whose optimizer is divided between the ranks, beside the same one that is not."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from mpitrain import Checkpoint, CompareReplicas, Hook, Step, Trainer, World
from mpitrain.adapters.torch_shard import ELEMENTWISE
from mpitrain.optim import LossScale
from tests.ranks.common import assert_same_bits, skip_alone

from .common import nightly
from .torch_modules import INPUTS, STRATEGIES, Net, Normed, adam, assert_alike, bits, builder, made, of, run, sgd

pytestmark = pytest.mark.filterwarnings("ignore:no rank's loss depends on these parameters")


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


CASES = [(name, Mixed) for name in ELEMENTWISE] + [("SGD", Net), ("Adam", Net), ("Adam", Normed)]
OTHERS = [(name, kind) for name in ELEMENTWISE for kind in (Net, Normed) if (name, kind) not in CASES]


@pytest.mark.parametrize(
    ("name", "kind"), [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in OTHERS)]
)
def test_each_elementwise_optimizer_has_the_bits_of_sync(world: World, name: str, kind: Any) -> None:
    """Parameters, buffers, losses and the state of the optimizer, in two sets of options."""
    more: dict[str, Any] = {"SGD": {"momentum": 0.9, "dampening": 0.1}, "Adam": {"amsgrad": True}}.get(name, {})
    for options in ({}, more) if more else ({},):
        found, expected = (run(strategy, kind, of(name, **options), 4) for strategy in ("sharded", "sync"))
        assert_same_bits(world, *found.adapter.parameters().values())
        assert_alike(found, expected)


def test_groups_schedules_and_a_state_of_before(world: World) -> None:
    """What the optimizer has kept before it is divided continues: Adagrad begins with a sum that is not 0."""
    for kind, optimizer in ((Net, sgd), (Normed, sgd), (Net, of("Adagrad", initial_accumulator_value=0.5))):
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


@pytest.mark.parametrize("kind", [Mixed, *nightly(Net, Normed)])
@pytest.mark.parametrize("strategies", [("sync", "sharded"), ("sharded", "sync"), ("sharded", "sharded")])
def test_checkpoints_load_with_and_without(world: World, shared: Path, strategies: Any, kind: Any) -> None:
    """A run that changes the strategy at a checkpoint ends with the bits of one that does not."""
    whole = run("sync", kind, of("NAdam"), 8)
    run(strategies[0], kind, of("NAdam"), 5, Checkpoint(shared, steps=2)).close()
    assert_alike(run(strategies[1], kind, of("NAdam"), 8, Checkpoint(shared, steps=100)), whole)


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
                trainer.rebuild(world.replaced(generation=world.generation + step.number))

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
