"""The divided optimizer's state with ShardedSync: brought together, saved, and taken on."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpitrain import (
    ArrayFunction,
    Checkpoint,
    CompareReplicas,
    Hook,
    ShardedSync,
    Step,
    StopAtStep,
    Sync,
    Trainer,
    World,
)
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.optim import Adam, AdamW
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.scattered import ScatteredExchange
from mpitrain.strategies import Strategy

from .common import assert_same_bits, error_on_all, skip_alone
from .sharded import SHAPES, assert_equal_states, everything, flat, parameters, scattered, small_buckets, train
from .trainings import bits, builder, names_in


def test_the_whole_state_is_given_back(world: World) -> None:
    """`state` of the adapter needs the other ranks. What it then takes is free again from the next step on."""
    strategy, model = ShardedSync(), ArrayFunction(scattered, parameters("float64"), Adam(0.01))
    strategy.begin(world, model)
    with pytest.raises(ConfigError, match="divided between the ranks"):
        model.state()
    strategy.own_state()
    assert model.state()["optimizer"]["first"]["a"].shape == SHAPES["a"]
    train(world, strategy, model, range(1))
    strategy.own_state_for(reads=world.is_root)
    if world.is_root:
        assert model.state()["optimizer"]["step"] == 1
    else:
        with pytest.raises(ConfigError, match="divided between the ranks"):
            model.state()
    train(world, strategy, model, range(1, 2))
    with pytest.raises(ConfigError, match=r"Call own_state\(\) of the strategy"):
        model.state()
    strategy.close()


@pytest.mark.parametrize("kinds", [(Sync, ShardedSync), (ShardedSync, Sync), (ShardedSync, ShardedSync)])
def test_checkpoints_load_with_and_without(world: World, shared: Path, kinds: Any) -> None:
    """A run that changes the strategy at a checkpoint ends with the bits of one that does not."""

    def build(kind: Any, algorithm: str = "ring") -> Callable[[World], Any]:
        made: dict[Any, Callable[[], Strategy]] = {
            Sync: lambda: Sync(lambda one: make_exchange(one, algorithm)),
            ShardedSync: lambda: ShardedSync(lambda one: ScatteredExchange(one, algorithm)),
        }
        return builder(45, 14, optimizer=lambda: Adam(0.01), strategy=made[kind])

    whole = Trainer(build(Sync), [StopAtStep(9)])
    whole.run()
    first = Trainer(build(kinds[0]), [StopAtStep(5), Checkpoint(shared, steps=2)])
    first.run()
    second = Trainer(build(kinds[1]), [StopAtStep(9), Checkpoint(shared, steps=100)])
    second.run()
    second.own_state()
    assert bits(second) == bits(whole)
    for trainer in (whole, first, second):
        trainer.close()


def test_a_checkpoint_of_another_number_of_ranks(world: World) -> None:
    """The state of all ranks goes on in each rank by itself, and the other way round: in one process, and divided."""
    from mpi4py import MPI

    from mpitrain.job.worlds import make_world

    strategy, model = ShardedSync(), ArrayFunction(scattered, parameters("float64"), AdamW(0.01))
    there = small_buckets(world)
    strategy.begin(there, model)
    train(there, strategy, model, range(3))
    state = everything(strategy, model)
    alone = make_world(MPI.COMM_SELF)
    one, model_alone = ShardedSync(), ArrayFunction(scattered, parameters("float64"), AdamW(0.01))
    one.begin(alone, model_alone)
    model_alone.restore(state)
    assert_equal_states(everything(one, model_alone), state)
    train(alone, one, model_alone, range(3, 5))
    state = world.broadcast_object(everything(one, model_alone))
    model.restore(state)
    assert_equal_states(everything(strategy, model), state)
    train(there, strategy, model, range(5, 6))
    assert_same_bits(world, flat(model))
    one.close()
    alone.free()
    strategy.close()


@pytest.mark.parametrize("which", ["reads", "does not read"])
def test_a_rank_without_room(world: World, which: str) -> None:
    """One rank may take no more memory: the error on all ranks says so. When there is room again, the state comes."""
    odd = 0 if which == "reads" else world.size - 1
    strategy, model = ShardedSync(), ArrayFunction(scattered, {"w": numpy.zeros(6_000_000)}, Adam(0.01))
    strategy.begin(world, model)
    before, taken = resource.getrlimit(resource.RLIMIT_AS), []

    def gather() -> dict[str, Any]:
        return strategy.own_state_for(reads=world.is_root)

    if world.rank == odd:
        gc.collect()  # what it frees later would be room
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**24, before[1]))
        with suppress(MemoryError):  # what the process has freed, and could use again
            while True:
                taken.append(numpy.empty(6_000_000))
    try:
        said = error_on_all(world, MpitrainError, gather)
    finally:
        if world.rank == odd:
            resource.setrlimit(resource.RLIMIT_AS, before)
        taken.clear()
    assert f"{world.name(odd)}, bring the optimizer's state together: " in said
    assert "MemoryError: Unable to allocate 45.8 MiB" in said
    gather()
    if world.is_root:
        assert model.state()["optimizer"]["second"]["w"].size == 6_000_000
    strategy.close()


def test_a_checkpoint_at_the_end_of_a_try(world: World, shared: Path) -> None:
    """The ranks that write have saved the last step already, and all others still take part."""
    checkpoint, ends = Checkpoint(shared, steps=3), []

    class End(Hook):
        def after_step(self, trainer: Trainer, step: Step) -> None:
            ends.append(step)

    trainer = Trainer(
        builder(45, 14, optimizer=lambda: Adam(0.01), strategy=ShardedSync), [checkpoint, End(), StopAtStep(3)]
    )
    trainer.run()
    checkpoint.before_end(trainer, ends[-1])
    assert_same_bits(world, *trainer.adapter.parameters().values())
    trainer.close()
    if world.is_root:
        assert names_in(shared) == ["step-00000003"]


class Rebuild(Hook):
    """Goes on in another World after the second step."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if step.number == 2:
            trainer.rebuild(trainer.world.replaced(generation=trainer.world.generation + 1))


def test_a_rank_that_goes_on_keeps_its_part_only(world: World, shared: Path) -> None:
    """After a resume, and in another World, no rank has the memory of the whole optimizer."""
    looked = []

    class Look(Hook):
        def before_run(self, trainer: Trainer) -> None:
            self.look("resumed" if trainer.step_number else "begun", trainer)

        def world_changed(self, trainer: Trainer) -> None:
            self.look("rebuilt", trainer)

        def look(self, when: str, trainer: Trainer) -> None:
            with pytest.raises(ConfigError, match="divided between the ranks"):
                trainer.adapter.state()
            looked.append(when)

    for steps in (1, 3):
        build = builder(45, 14, optimizer=lambda: Adam(0.01), strategy=ShardedSync)
        trainer = Trainer(build, [Rebuild(), StopAtStep(steps), Checkpoint(shared, steps=1), Look()])
        trainer.run()
        trainer.close()
    assert looked == ["begun", "resumed", "rebuilt"]


class Flip(Hook):
    """A bit of the last rank's parameters changes after the second step."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if step.number == 2 and trainer.world.rank == trainer.world.size - 1:
            trainer.adapter.parameters()["dense1.weight"][0, 0] += 1.0


HAPPENS: dict[str, Callable[[], list[Hook]]] = {
    "another World": lambda: [Rebuild()],
    "a repair": lambda: [Flip(), CompareReplicas(steps=1, repair="root")],
}


@pytest.mark.parametrize("what", HAPPENS)
def test_what_happens_to_a_run_changes_no_bit(world: World, what: str) -> None:
    """Each rank's part of the optimizer goes on."""
    if what == "a repair":
        skip_alone(world)
    trainers = []
    for hooks in ([], HAPPENS[what]()):
        trainer = Trainer(builder(45, 14, optimizer=lambda: Adam(0.01), strategy=ShardedSync), [*hooks, StopAtStep(5)])
        trainer.run()
        trainer.own_state()
        trainers.append(trainer)
    assert bits(trainers[0]) == bits(trainers[1])
    for trainer in trainers:
        trainer.close()
