"""Virtual ranks: the same training on any number of ranks, bit for bit.

Each rank compares the training on all ranks with one that it makes alone, in a World of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
from threadpoolctl import threadpool_limits

from mpitrain import (
    Accumulate,
    ArrayData,
    ArrayFunction,
    Balance,
    Hook,
    LossScale,
    Parts,
    Prefetch,
    Sgd,
    Step,
    StopAtStep,
    StreamData,
    Sync,
    Trainer,
    World,
)
from mpitrain.errors import CheckpointError, ConfigError, GradientError, MissingGradientError, NonFiniteError
from mpitrain.exchange.exchange import make_exchange
from mpitrain.job.worlds import make_world
from mpitrain.training.data.order import permuted

from .common import error_on_all, skip_alone
from .trainings import bits

V, COUNT, WIDTH = 7, 80, 300  # 300 values are more than a block of an exact sum


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With several threads, the probe makes one pass more."""
    with threadpool_limits(1):
        yield


def alone(world: World) -> World:
    """A World of this rank."""
    return make_world(world.comm.Split(world.rank, 0))


def noisy(parameters: Any, batch: Any, on_gradient: Any, random: numpy.random.Generator, loss_scale: Any = 1) -> float:
    """A model of one layer with dropout. Its gradients have all bits in use."""
    x, y = batch
    if not len(x):
        for name, value in parameters.items():
            on_gradient(name, numpy.zeros_like(value))
        return 0.0
    x = x * (random.random(x.shape) < 0.7)
    error = x @ parameters["w"] + parameters["b"] - y
    scaled = (error * (loss_scale / len(x))).astype(error.dtype)
    on_gradient("b", scaled.sum(axis=0, keepdims=True))
    on_gradient("w", x.T @ scaled)
    return float((error.astype("f8") ** 2).mean() / 2)


def samples() -> tuple[numpy.ndarray, numpy.ndarray]:
    rng = numpy.random.default_rng(3)
    return rng.standard_normal((COUNT, WIDTH)).astype("f4"), rng.standard_normal(COUNT).astype("f4")


def shifted(sample: Any, random: numpy.random.Generator) -> Any:
    x, y = sample
    return x + numpy.float32(random.normal()), y


def model(function: Any = noisy, **options: Any) -> ArrayFunction:
    rng = numpy.random.default_rng(1)
    parameters = {"w": (rng.standard_normal(WIDTH) / 10).astype("f4"), "b": numpy.zeros(1, "f4")}
    return ArrayFunction(function, parameters, Sgd(0.01, momentum=0.9, clip_norm=1.0), **options)


def builder(
    global_batch: int = 21,
    number: Any = V,
    *,
    seed: Any = 5,
    adapter: Callable[[], Any] = model,
    data: Callable[[World, int], Any] | None = None,
) -> Callable[[World], Parts]:
    def arrays(world: World, global_batch: int) -> Any:
        return ArrayData(world, samples(), global_batch=global_batch, seed=2, augment=shifted)

    def build(world: World) -> Parts:
        return Parts(adapter(), Sync(virtual_ranks=number, seed=seed), (data or arrays)(world, global_batch))

    return build


def too_large() -> LossScale:
    """A scale with which the first steps are skipped, and another one later."""
    return LossScale(2.0**18, growth_interval=2)


class Losses(Hook):
    """Keeps what a step reports."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float | None]] = []

    def before_run(self, trainer: Trainer) -> None:
        trainer.adapter.measure_gradient_norm()

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.steps.append((step.loss, step.samples, trainer.adapter.gradient_norm()))
        trainer.adapter.measure_gradient_norm()


def trained(
    world: World, build: Callable[[World], Parts], steps: int = 9, state: Any = None
) -> tuple[dict[str, bytes], list[Any], Trainer]:
    """All that a checkpoint keeps, and all that the steps have reported."""
    losses = Losses()
    trainer = Trainer(build, [StopAtStep(steps), losses], world=world)
    if state is not None:
        trainer.restore(state)
    trainer.run()
    return bits(trainer), losses.steps, trainer


def in_a_stream(world: World, global_batch: int) -> StreamData:
    return StreamData(world, lambda epoch: zip(*samples(), strict=True), global_batch=global_batch, augment=shifted)


def ahead(world: World, global_batch: int) -> Prefetch:
    return Prefetch(ArrayData(world, samples(), global_batch=global_batch, seed=2))


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(builder(), id="a last batch of 17, in which two have fewer samples or none"),
        pytest.param(builder(7), id="one sample each"),
        pytest.param(builder(63, 9), id="more virtual ranks than ranks"),
        pytest.param(builder(data=in_a_stream), id="a stream"),
        pytest.param(builder(data=ahead), id="prefetched"),
        pytest.param(builder(adapter=lambda: Accumulate(model(), per_rank_batch=2)), id="in pieces of two samples"),
        pytest.param(builder(adapter=lambda: model(precision="fp16", loss_scale=too_large())), id="a loss scale"),
    ],
)
def test_bits_are_those_of_one_rank(world: World, build: Callable[[World], Parts]) -> None:
    with_all, losses, _ = trained(world, build)
    by_itself, expected, _ = trained(alone(world), build)
    assert losses == expected
    assert with_all == by_itself
    assert len({math.isfinite(loss) and loss for loss, _, _ in losses}) == 9


def test_means_are_correctly_rounded_sums_of_products(world: World) -> None:
    """The first step by hand: order, cut, random numbers, shares and sum are computed without our code for them."""
    rate = 0.5
    x, y = samples()
    start = {"w": (numpy.arange(WIDTH) / 100).astype("f4"), "b": numpy.zeros(1, "f4")}

    def build(world: World) -> Parts:
        data = ArrayData(world, samples(), global_batch=14, seed=2)
        return Parts(ArrayFunction(noisy, start, Sgd(rate)), Sync(virtual_ranks=V, seed=5), data)

    _, losses, trainer = trained(world, build, 1)
    order = permuted(numpy.arange(14), COUNT, (2, 0))
    products: dict[str, list[numpy.ndarray]] = {"w": [], "b": []}
    weighted = []
    for virtual_rank in range(V):
        chosen = order[2 * virtual_rank : 2 * virtual_rank + 2]
        random = numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence((5, 1, virtual_rank, 1))))
        loss = noisy(
            start,
            (x[chosen], y[chosen]),
            lambda name, gradient: products[name].append(gradient * numpy.float32(2 / 14)),
            random,
        )
        weighted.append(2 * loss)
    assert losses[0][0] == math.fsum(weighted) / 14
    for name, of_virtual_ranks in products.items():
        mean = numpy.array([math.fsum(map(float, column)) for column in zip(*of_virtual_ranks, strict=True)], "f4")
        assert trainer.adapter.parameters()[name].tobytes() == (start[name] - numpy.float32(rate) * mean).tobytes()


def test_a_run_goes_on_with_other_ranks(world: World) -> None:
    """From all ranks to one, and from one to all; also into another epoch."""
    expected, losses, _ = trained(alone(world), builder())
    _, first, begun = trained(world, builder(), 4)
    got, rest, _ = trained(alone(world), builder(), state=begun.state())
    assert (got, first + rest) == (expected, losses)
    _, first, begun = trained(alone(world), builder(), 4)
    got, rest, _ = trained(world, builder(), state=begun.state())
    assert (got, first + rest) == (expected, losses)


def test_random_numbers_differ_by_seed_step_and_virtual_rank(world: World) -> None:
    drawn: list[float] = []

    def draw(parameters: Any, batch: Any, on_gradient: Any, random: numpy.random.Generator) -> float:
        drawn.append(random.random())
        return noisy(parameters, batch, on_gradient, random)

    for seed in (0, 1):
        trained(world, builder(70, seed=seed, adapter=lambda: model(draw)), 3)
    of_all = [number for of_rank in world.allgather(drawn) for number in of_rank]
    # The probe computes virtual rank 0 of the first step twice, on every rank.
    assert len(of_all) == 2 * (3 * V + 2 * world.size)
    assert len(set(of_all)) == 2 * 3 * V


# -- faults of a pass ------------------------------------------------------------------------------------------------


class Turns:
    """A model that does something else in one pass of the second step, on the last rank."""

    def __init__(self, world: World, fault: Callable[[Any], Any], *, is_first: bool) -> None:
        own = -(-V // world.size) if world.rank < V % world.size else V // world.size
        self._fault, self._is_last = fault, world.rank == world.size - 1
        self._turn = 2 + own + (1 if is_first or own == 1 else own)  # after two passes of the probe, and a step
        self._passes = 0

    def __call__(self, parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        self._passes += 1
        if self._is_last and self._passes == self._turn:
            return float(self._fault(noisy)(parameters, batch, on_gradient, random))
        return noisy(parameters, batch, on_gradient, random)


def without_b(function: Any) -> Any:
    def faulty(parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        def only_w(name: str, gradient: Any) -> None:
            if name == "w":
                on_gradient(name, gradient)

        return float(function(parameters, batch, only_w, random))

    return faulty


def with_nan(function: Any) -> Any:
    def faulty(parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        return float(function(parameters, batch, lambda name, value: on_gradient(name, value * numpy.nan), random))

    return faulty


def with_infinite_loss(function: Any) -> Any:
    return lambda *arguments: function(*arguments) * math.inf


@pytest.mark.parametrize("is_first", [True, False], ids=["first pass", "last pass"])
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (without_b, MissingGradientError, "without the gradient of b"),
        (with_nan, NonFiniteError, "NaN or infinity"),
        (with_infinite_loss, NonFiniteError, "the loss is NaN or infinity"),
    ],
)
def test_a_fault_in_a_pass_is_an_error_on_all(
    world: World, fault: Any, kind: type[GradientError], words: str, is_first: bool
) -> None:
    turns = Turns(world, fault, is_first=is_first)
    trainer = Trainer(builder(adapter=lambda: model(turns)), [StopAtStep(5)], world=world)
    trainer.step()
    before = {name: value.copy() for name, value in trainer.adapter.parameters().items()}
    text = error_on_all(world, kind, trainer.step)
    assert words in text and world.name(world.size - 1) in text
    assert ("the losses, the batches" in text) == (fault is with_nan)
    assert ("the loss is inf" in text) == (fault is with_infinite_loss)
    for name, value in trainer.adapter.parameters().items():
        assert value.tobytes() == before[name].tobytes()
    trainer.step()  # the next step is whole again


# -- the probe -------------------------------------------------------------------------------------------------------


def test_a_rank_that_computes_otherwise_is_named(world: World) -> None:
    skip_alone(world)
    odd = world.rank == world.size - 1

    def otherwise(parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        def hand_in(name: str, gradient: Any) -> None:
            on_gradient(name, numpy.nextafter(gradient, numpy.float32(9)) if odd and name == "w" else gradient)

        return noisy(parameters, batch, hand_in, random)

    trainer = Trainer(builder(adapter=lambda: model(otherwise)), [StopAtStep(5)], world=world)
    before = bits(trainer)["adapter/parameters/w"]
    text = error_on_all(world, GradientError, trainer.step)
    assert f"{world.name(world.size - 1)}: the gradient of w has other bits than on {world.name(0)}" in text
    assert "threads:" in text
    assert bits(trainer)["adapter/parameters/w"] == before


@pytest.mark.parametrize("where", ["a generator of its own", "a state"])
def test_a_model_that_is_not_reproducible_is_named(world: World, where: str) -> None:
    rng, seen = numpy.random.default_rng(), [0.0]

    def other(parameters: Any, batch: Any, on_gradient: Any, random: Any) -> float:
        seen[0] += 1.0
        generator = rng if where == "a generator of its own" else random
        shift = seen[0] if where == "a state" else 0.0
        return noisy(parameters, (batch[0] + numpy.float32(shift), batch[1]), on_gradient, generator)

    trainer = Trainer(builder(adapter=lambda: model(other)), [StopAtStep(5)], world=world)
    text = error_on_all(world, GradientError, trainer.step)
    assert f"{world.name(0)}: the gradient of b has other bits when the same virtual rank is computed again" in text


# -- what is refused -------------------------------------------------------------------------------------------------


def refused(world: World, build: Callable[[World], Parts], kind: Any = ConfigError) -> str:
    return error_on_all(world, kind, lambda: Trainer(build, [StopAtStep(1)], world=world))


def test_fewer_virtual_ranks_than_ranks(world: World) -> None:
    skip_alone(world)
    text = refused(world, builder(20 * (world.size - 1), world.size - 1))
    assert f"virtual_ranks={world.size - 1} for {world.size} ranks" in text
    assert f"Start at most {world.size - 1} ranks" in text


@pytest.mark.parametrize("number", [0, -1, True, 7.0, "7"], ids=repr)
def test_a_number_that_is_none(world: World, number: Any) -> None:
    assert f"virtual_ranks={number!r}; it must be an int of at least 1" in refused(world, builder(number=number))


@pytest.mark.parametrize("seed", [-1, 0.5, None], ids=repr)
def test_a_seed_that_is_none(world: World, seed: Any) -> None:
    assert f"seed={seed!r}; it must be an int of at least 0" in refused(world, builder(seed=seed))


def test_a_batch_that_is_not_a_multiple(world: World) -> None:
    text = refused(world, builder(22))
    assert "virtual_ranks=7 and a global batch of 22 samples" in text
    assert "Take global_batch=21 or 28" in text


def test_a_codec(world: World) -> None:
    coded = replace(world, config=replace(world.config, compression="int8"))
    text = error_on_all(world, ConfigError, lambda: Trainer(builder(), [StopAtStep(1)], world=coded))
    assert "virtual_ranks=7 and compression=int8" in text


def test_an_exchange_of_ones_own(world: World) -> None:
    def build(world: World) -> Parts:
        strategy = Sync(lambda world: make_exchange(world, "ring"), virtual_ranks=V)
        return Parts(model(), strategy, ArrayData(world, samples(), global_batch=V))

    assert "virtual_ranks=7 and an exchange= of its own" in refused(world, build)


@pytest.mark.parametrize(
    "wrapped",
    [lambda data: data, Prefetch, lambda data: Prefetch(Prefetch(data))],
    ids=["by itself", "prefetched", "prefetched twice"],
)
def test_data_that_cannot_be_cut(world: World, wrapped: Callable[[Any], Any]) -> None:
    class Batches:
        epoch = steps_per_epoch = 0

        def state(self) -> dict[str, Any]:
            return {}

    text = refused(world, builder(data=lambda world, global_batch: wrapped(Batches())))
    assert "Batches has no method cut(virtual_ranks)" in text


def test_an_adapter_in_pieces_without_random_numbers(world: World) -> None:
    class Unseeded(ArrayFunction):
        seeded: Any = None

    pieces = Accumulate(Unseeded(noisy, model().parameters(), Sgd(0.01)), per_rank_batch=2)
    with pytest.raises(ConfigError, match=r"Unseeded has no method seeded\(key\)"):
        Trainer(builder(adapter=lambda: pieces), [StopAtStep(1)], world=world)


def test_balance(world: World) -> None:
    trainer = Trainer(builder(), [StopAtStep(9), Balance(steps=1)], world=world)
    assert "each rank has whole virtual ranks" in error_on_all(world, ConfigError, trainer.run)


def test_a_function_with_random_needs_virtual_ranks(world: World) -> None:
    def build(world: World) -> Parts:
        return Parts(model(), Sync(), ArrayData(world, samples(), global_batch=V))

    with pytest.raises(GradientError, match="there are no virtual ranks"):
        Trainer(build, [StopAtStep(1)], world=alone(world)).step()


def test_a_function_with_random_and_a_default_needs_none(world: World) -> None:
    given: list[Any] = []

    def function(parameters: Any, batch: Any, on_gradient: Any, random: Any = None) -> float:
        given.append(random)
        return noisy(parameters, batch, on_gradient, numpy.random.default_rng(0))

    def build(world: World) -> Parts:
        return Parts(model(function), Sync(), ArrayData(world, samples(), global_batch=V))

    Trainer(build, [StopAtStep(1)], world=alone(world)).step()
    assert given == [None]


def test_a_function_without_a_signature(world: World) -> None:
    class Native:
        """As a function of a C extension is."""

        @property
        def __signature__(self) -> Any:
            raise ValueError("no signature found")

        def __call__(self, parameters: Any, batch: Any, on_gradient: Any) -> float:
            return noisy(parameters, batch, on_gradient, numpy.random.default_rng(0))

    def build(world: World) -> Parts:
        return Parts(model(Native()), Sync(), ArrayData(world, samples(), global_batch=V))

    assert Trainer(build, [StopAtStep(1)], world=alone(world)).step().number == 1


@pytest.mark.parametrize(("number", "seed", "words"), [(21, 5, "virtual_ranks=21"), (7, 6, "seed=6")])
def test_a_checkpoint_of_others(world: World, number: int, seed: int, words: str) -> None:
    _, _, written = trained(world, builder(), 1)
    trainer = Trainer(builder(number=number, seed=seed), [StopAtStep(2)], world=world)
    before = bits(trainer)
    with pytest.raises(CheckpointError, match=words):
        trainer.restore(written.state())
    assert bits(trainer) == before


def test_values_that_a_codec_has_left_out(world: World) -> None:
    trainer = Trainer(builder(), [StopAtStep(2)], world=world)
    left_out = {"place": "elsewhere", "residual": dict(trainer.adapter.parameters())}
    with pytest.raises(CheckpointError, match="virtual ranks send all of a gradient"):
        trainer.strategy.restore_own(left_out)
