"""ShardedSync beside Sync: the same training, with 1/p of the optimizer's state on each rank."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from mpi4py import MPI

from mpitrain import (
    Accumulate,
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
from mpitrain.errors import ConfigError, MismatchError, MpitrainError
from mpitrain.job.worlds import make_world
from mpitrain.optim import SGD, Adam, AdamW, LossScale, warmup_cosine
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.scattered import ScatteredExchange

from .common import assert_same_bits, error_on_all, skip_alone
from .placements import PLACEMENTS, placed
from .sharded import (
    SHAPES,
    assert_equal_states,
    everything,
    flat,
    mean_gradients,
    parameters,
    scattered,
    small_buckets,
    train,
)
from .trainings import bits, builder, names_in, ran

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: Adam(warmup_cosine(0.01, warmup_steps=3, total_steps=12)),
    "adamw": lambda: AdamW(0.01, weight_decay=0.1),
}


def both(name: str) -> tuple[Sync, ShardedSync]:
    """With them, both strategies add in the same order."""
    return Sync(lambda one: make_exchange(one, name)), ShardedSync(lambda one: ScatteredExchange(one, name))


@pytest.mark.parametrize(
    ("optimizer", "dtype", "placement", "names"),
    [
        *((name, "float32", "", ("ring", "shared_memory")) for name in OPTIMIZERS),
        ("adamw", "float64", "", ("direct", "halving_doubling", "hierarchical")),
        *(("adamw", "float32", placement, ("ring", "hierarchical")) for placement in PLACEMENTS),
    ],
)
def test_the_bits_of_sync(world: World, optimizer: str, dtype: str, placement: str, names: tuple[str, ...]) -> None:
    """Parameters, losses and the state of the optimizer, where both add in the same order; also in pieces."""
    there = small_buckets(placed(world, placement) if placement else world)
    for name in names:
        states, made = [], []
        for strategy in both(name):
            inner = ArrayFunction(scattered, parameters(dtype), OPTIMIZERS[optimizer]())
            model = Accumulate(inner, per_rank_batch=2) if name == "direct" else inner
            strategy.begin(there, model)
            made.append(train(there, strategy, model, range(5)))
            states.append(everything(strategy, model))
            strategy.close()
            assert_same_bits(world, flat(model))
        assert made[0] == made[1]
        assert_equal_states(states[1], states[0])


@pytest.mark.parametrize("sizes", [{"w": (1,)}, {"w": (2,)}, {"w": (3, 1)}, {"w": (10_007,), "v": (3,)}], ids=str)
def test_each_rank_has_its_share(world: World, sizes: dict[str, tuple[int, ...]]) -> None:
    """Of one bucket, no rank has more than one element more than another one. Together they have each element once."""
    optimizer = Adam(0.01)
    strategy, model = ShardedSync(), ArrayFunction(scattered, parameters("float64", sizes), optimizer)
    strategy.begin(world, model)
    train(world, strategy, model, range(2))
    total = sum(int(numpy.prod(shape)) for shape in sizes.values())
    for name in ("first", "second"):
        held = world.allgather(optimizer.state()[name].size)
        assert sum(held) == total
        assert max(held) - min(held) <= 1
    strategy.close()


def test_clipping_by_the_norm_of_all(world: World) -> None:
    """Against plain SGD in float64, and the measured norm is that of all elements, on every rank."""
    strategy, model = ShardedSync(), ArrayFunction(scattered, parameters("float64"), SGD(0.5, clip_norm=0.75))
    there = small_buckets(world)
    strategy.begin(there, model)
    at = flat(model).copy()
    for step in range(4):
        train(there, strategy, model, range(step, step + 1))
        gradient = mean_gradients(world, at, step)
        norm = float(numpy.sqrt((gradient.astype(numpy.longdouble) ** 2).sum()))
        assert norm > 0.75
        assert model.gradient_norm() == pytest.approx(norm, rel=1e-13)
        assert len(set(world.allgather(model.gradient_norm()))) == 1
        at -= 0.5 * gradient * (0.75 / norm)
        numpy.testing.assert_allclose(flat(model), at, rtol=1e-12, atol=1e-14)
        at = flat(model).copy()
    assert_same_bits(world, flat(model))
    strategy.close()


def test_an_optimizer_starts_anew_without_its_division(world: World) -> None:
    """An optimizer that was divided, and then starts for Sync, makes the steps of a new one: all elements, clipped."""
    used, new = (SGD(0.5, momentum=0.9, clip_norm=0.75) for _ in range(2))
    found = []
    for strategy, optimizer in ((ShardedSync(), used), (Sync(), used), (Sync(), new)):
        model = ArrayFunction(scattered, parameters("float64"), optimizer)
        strategy.begin(world, model)
        losses = train(world, strategy, model, range(3))
        found.append((losses, flat(model).tobytes(), model.gradient_norm()))
        strategy.close()
    assert found[1] == found[2]


@pytest.mark.parametrize("bad", [numpy.inf, numpy.nan], ids=str)
def test_a_skipped_step_changes_nothing(world: World, bad: float) -> None:
    """On one rank a gradient is infinite: no rank makes the step, all halve the scale, and continue as Sync does."""

    def function(values: Any, batch: Any, on_gradient: Any, loss_scale: float) -> float:
        return scattered(values, batch, on_gradient if now != 1 or world.rank else spoiled(on_gradient), loss_scale)

    def spoiled(on_gradient: Any) -> Any:
        return lambda name, value: on_gradient(name, value * value.dtype.type(bad) if name == "e" else value)

    found = []
    for strategy in both("ring"):
        model = ArrayFunction(function, parameters("float32"), AdamW(0.01), loss_scale=LossScale(8.0))
        strategy.begin(world, model)
        rates = []
        for now in range(4):
            before = flat(model).tobytes()
            rates += [rate for _, rate in train(world, strategy, model, range(now, now + 1))]
            # Rank 0 has no samples in step 0 of several ranks, and some in step 1.
            assert (flat(model).tobytes() == before) == (now == 1)
        assert rates == [0.01, 0.0, 0.01, 0.01]
        assert model.loss_scale is not None
        found.append((flat(model).tobytes(), model.loss_scale.state()))
        strategy.close()
    assert found[0] == found[1]
    assert found[1][1]["skipped_steps"] == 1


def test_verify_sees_whole_means(world: World) -> None:
    """With `mpitrain verify`, every rank has the whole mean, as its recorder looks at it."""
    seen: list[dict[str, numpy.ndarray]] = []

    class Observer:
        def saw_means(self, means: Any, weight: float) -> None:
            seen.append({name: mean.copy() for name, mean in means.items()})

        def gave(self, tree: Any) -> None:
            """What `world.broadcast` has given."""

    there = small_buckets(world).replaced(observer=Observer())  # type: ignore[arg-type]
    strategy, model = ShardedSync(), ArrayFunction(scattered, parameters("float64"), Adam(0.01))
    strategy.begin(there, model)
    at = flat(model).copy()
    train(there, strategy, model, range(1))
    found = numpy.concatenate([mean.reshape(-1) for mean in seen[0].values()])
    numpy.testing.assert_allclose(found, mean_gradients(world, at, 0), rtol=1e-12, atol=1e-14)
    strategy.close()


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

    def build(kind: Any) -> Callable[[World], Any]:
        return builder(45, 14, optimizer=lambda: Adam(0.01), strategy=lambda: both("ring")[kind is ShardedSync])

    whole = ran(build(Sync), [StopAtStep(9)])
    first = ran(build(kinds[0]), [StopAtStep(5), Checkpoint(shared, steps=2)])
    second = ran(build(kinds[1]), [StopAtStep(9), Checkpoint(shared, steps=100)])
    second.own_state()
    assert bits(second) == bits(whole)
    for trainer in (whole, first, second):
        trainer.close()


def test_a_checkpoint_of_another_number_of_ranks(world: World) -> None:
    """The state of all ranks continues in each rank by itself, and the other way round: in one process, and divided."""
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
    """Continues in another World after the second step."""

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
        trainer = ran(build, [Rebuild(), StopAtStep(steps), Checkpoint(shared, steps=1), Look()])
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
    """Each rank's part of the optimizer continues."""
    if what == "a repair":
        skip_alone(world)
    trainers = []
    for hooks in ([], HAPPENS[what]()):
        trainer = ran(builder(45, 14, optimizer=lambda: Adam(0.01), strategy=ShardedSync), [*hooks, StopAtStep(5)])
        trainer.own_state()
        trainers.append(trainer)
    assert bits(trainers[0]) == bits(trainers[1])
    for trainer in trainers:
        trainer.close()


@pytest.mark.parametrize(
    ("optimizers", "text"),
    [
        ((lambda: Adam(0.01), lambda: Adam(0.02)), "0.02"),
        ((lambda: Adam(0.01), lambda: SGD(0.01)), "SGD"),
        ((lambda: SGD(0.01, clip_norm=1.0), lambda: SGD(0.01, clip_norm=numpy.float32(0.1))), "0.1000000014"),
        (tuple(lambda of=of: SGD(0.01, momentum=numpy.float32(of)) for of in (0.5, 0.25)), "0.25"),
    ],
)
def test_optimizers_that_differ(world: World, optimizers: Any, text: str) -> None:
    skip_alone(world)
    model = ArrayFunction(scattered, parameters("float64"), optimizers[world.rank == 1]())
    said = error_on_all(world, MismatchError, lambda: ShardedSync().begin(world, model))
    assert f"{world.name(1)}: " in said
    assert text in said


def test_schedules_that_differ(world: World) -> None:
    """A function cannot be compared, but the rates of each step are."""
    skip_alone(world)
    rate = 0.5 if world.rank == 1 else 0.25
    strategy = ShardedSync()
    model = ArrayFunction(scattered, parameters("float64"), SGD(lambda step: 0.25 if step == 0 else rate))
    strategy.begin(world, model)
    train(world, strategy, model, range(1))
    said = error_on_all(world, MismatchError, lambda: train(world, strategy, model, range(1, 2)))
    assert f"{world.name(1)} has updated its part of the parameters with the learning rate 0.5" in said
    assert f"{world.name(0)}: the learning rate 0.25 and " in said
    strategy.close()


def test_the_choice_of_auto_is_said(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    there = world.replaced(config=replace(world.config, compression="auto"))
    strategy = ShardedSync()
    strategy.begin(there, ArrayFunction(scattered, parameters("float64"), SGD(0.1)))
    strategy.close()
    said = "mpitrain: compression auto: none; a sharded optimizer sends gradients and parameters as they are\n"
    assert capsys.readouterr().out == (said if world.is_root else "")


def test_another_strategy_on_one_rank(world: World) -> None:
    skip_alone(world)
    strategy = Sync() if world.rank == 1 else ShardedSync()
    model = ArrayFunction(scattered, parameters("float64"), SGD(0.1))
    error_on_all(world, MismatchError, lambda: strategy.begin(world, model))


def test_what_cannot_be_divided(world: World) -> None:
    class Own:
        """An optimizer of somebody else."""

        def start(self, parameters: Any, decayed: Any) -> None: ...

    model = ArrayFunction(scattered, parameters("float64"), Own())  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:  # the lowest rank raises its own error, the others quote it
        ShardedSync().begin(world, model)
    said = world.broadcast_object(str(caught.value))
    assert world.rank == 0 or f"{world.name(0)}, divide the optimizer: {said}" == str(caught.value)
    assert "Own has no method keep_only(ranges, norm_of_all)" in said
    coded = world.replaced(config=replace(world.config, compression="bf16"))
    model = ArrayFunction(scattered, parameters("float32"), SGD(0.1))
    said = error_on_all(world, ConfigError, lambda: ShardedSync().begin(coded, model))
    assert "compression=bf16" in said
    native = world.replaced(config=replace(world.config, algorithm="native"))
    said = error_on_all(world, ConfigError, lambda: ShardedSync().begin(native, model))
    assert "native has no halves" in said
    strategy = ShardedSync()
    strategy.begin(world, model)
    with pytest.raises(ConfigError, match="divided between ranks already"):
        ShardedSync().begin(world, model)
    strategy.close()
