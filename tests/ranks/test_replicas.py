"""Values that are wrong: replicas that are no longer equal, NaN and infinity; found, named, and repaired if asked."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy
import pytest

from mpitrain import ArrayFunction, CompareReplicas, Hook, Parts, Step, StopAtStep, Sync, Trainer, World
from mpitrain.data import ArrayData
from mpitrain.errors import ConfigError, MismatchError, NonFiniteError, ReplicaError
from mpitrain.optim import SGD, Adam, LossScale
from mpitrain.training.hooks.replicas import checksum, right_rank
from mpitrain.training.non_finite import _first, located

from .common import assert_same_bits, error_on_all, skip_alone
from .trainings import ran


def regression(parameters: dict, batch: tuple, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
    x, y = batch
    error = x @ parameters["w"] + parameters["b"] - y
    on_gradient("b", 2 * error.sum(keepdims=True) / max(len(x), 1))
    on_gradient("w", 2 * x.T @ error / max(len(x), 1))
    return float((error**2).mean()) if len(x) else 0.0


def build(world: World) -> Parts:
    random = numpy.random.default_rng(0)
    x, y = random.standard_normal((40, 6)), random.standard_normal(40)
    adapter = ArrayFunction(regression, {"w": numpy.zeros(6), "b": numpy.zeros(1)}, Adam(0.01))
    return Parts(adapter, Sync(), ArrayData(world, (x, y), global_batch=10))


class Flip(Hook):
    """Flips one bit of an array on some ranks after a step, as a fault of memory does."""

    def __init__(self, step: int, ranks: list[int], *place: str, byte: int = 21, bit: int = 3) -> None:
        self.step, self.ranks, self.place, self.byte, self.bit = step, ranks, place, byte, bit

    def after_step(self, trainer: Trainer, step: Step) -> None:
        if step.number == self.step and trainer.world.rank in self.ranks:
            array = trainer.adapter.state()
            for name in self.place:
                array = array[name]
            assert isinstance(array, numpy.ndarray)
            array.view(numpy.uint8)[self.byte] ^= 1 << self.bit


def trained(*hooks: Hook, steps: int = 8) -> Trainer:
    return ran(build, [StopAtStep(steps), *hooks])


def parameters_of(trainer: Trainer) -> list[bytes]:
    return [value.tobytes() for value in trainer.adapter.parameters().values()]


def test_equal_replicas_train_on(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert parameters_of(trained(CompareReplicas(3))) == parameters_of(trained())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "byte", "bit", "element", "steps"),
    [("w", 21, 3, "1 of 6 elements, [2]", 3), ("b", 7, 7, "1 of 1 elements, [0]", 100)],
)
def test_a_flipped_bit_is_named_on_all_ranks(
    world: World, name: str, byte: int, bit: int, element: str, steps: int
) -> None:
    """Also after the last step. In a world of two no one knows who is right: it is the root, then."""
    skip_alone(world)
    expected = trained(steps=3).adapter.parameters()[name]
    flipped = expected.copy()
    flipped.view(numpy.uint8)[byte] ^= 1 << bit
    number = byte // 8
    for odd in range(world.size):
        hooks = [Flip(3, [odd], "parameters", name, byte=byte, bit=bit), CompareReplicas(steps)]
        text = error_on_all(world, ReplicaError, lambda hooks=hooks: trained(*hooks, steps=3))
        named = 1 if world.size == 2 else odd
        others = [str(rank) for rank in range(world.size) if rank != named]
        assert text.startswith(
            f"after step 3 the parameters are not those of rank{'s' * (len(others) > 1)} {', '.join(others)} on: "
        )
        values = (expected, flipped) if named != odd else (flipped, expected)
        assert (
            f"on: {world.name(named)}: {name} in {element} is {values[0][number]} instead of {values[1][number]}"
            in text
        )


@pytest.mark.parametrize("place", [("parameters", "w"), ("parameters", "b"), ("optimizer", "first", "w")], ids="/".join)
def test_repair_from_the_majority_goes_on_as_if_nothing_had_been(
    world: World, place: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same holds if a bit of the optimizer's memory has flipped, which shows only after the next step."""
    skip_alone(world)
    if world.size == 2:
        pytest.skip("two ranks have no majority")
    expected = parameters_of(trained())
    for odd in (0, world.size - 1):
        capsys.readouterr()
        trainer = trained(Flip(4, [odd], *place, byte=6), CompareReplicas(1, repair="majority"))
        assert_same_bits(world, *trainer.adapter.parameters().values())
        shown = capsys.readouterr().out
        if world.is_root:
            assert f"on: {world.name(odd)}: " in shown
            assert "Repaired: all ranks have parameters and optimizer state of rank " in shown
        if place[0] == "parameters":  # found before it has spoiled a mean
            assert parameters_of(trainer) == expected


def test_a_majority_of_more_than_one_kind(world: World) -> None:
    """Rank 0 and one more are at fault, each in its own way: the rest, where it is two or more, is right."""
    if world.size < 4:
        pytest.skip("needs four ranks")
    hooks = [Flip(2, [0], "parameters", "w"), Flip(2, [1], "parameters", "b", byte=2)]
    trainer = trained(*hooks, CompareReplicas(1, repair="majority"))
    assert parameters_of(trainer) == parameters_of(trained())
    text = error_on_all(world, ReplicaError, lambda: trained(*hooks, CompareReplicas(1)))
    assert f"{world.name(0)}: w in 1 of 6 elements, " in text
    assert f"{world.name(1)}: b in 1 of 1 elements, " in text


def test_repair_from_the_root_takes_its_values_right_or_wrong(world: World) -> None:
    """The optimizer's moments too: they must stay equal, or the fault returns."""
    skip_alone(world)
    for odd in (0, world.size - 1):
        trainer = trained(Flip(8, [odd], "parameters", "w"), CompareReplicas(4, repair="root"))
        assert_same_bits(world, *trainer.adapter.parameters().values())
        assert (parameters_of(trainer) == parameters_of(trained())) == (odd != 0)
    trainer = trained(Flip(2, [1], "optimizer", "first", "w", byte=6), CompareReplicas(3, repair="root"), steps=3)
    optimizer = trainer.adapter.state()["optimizer"]
    assert_same_bits(world, *optimizer["first"].values(), *optimizer["second"].values())


def test_ranks_that_would_do_different_things(world: World) -> None:
    skip_alone(world)
    hook = CompareReplicas(4, repair="root" if world.rank == 1 else None)
    text = error_on_all(world, MismatchError, lambda: trained(hook))
    assert "every 4 steps, repair root" in text


def test_wrong_options() -> None:
    with pytest.raises(ConfigError, match="every 0 steps: the number must be at least 1"):
        CompareReplicas(0)
    with pytest.raises(ConfigError, match="repair='mean'; allowed: None, 'majority', 'root'"):
        CompareReplicas(1, repair="mean")


@pytest.mark.parametrize(
    ("hashes", "majority", "root"),
    [([5, 5], 0, 0), ([5, 6], 0, 0), ([6, 5, 5], 1, 0), ([5, 6, 5], 0, 0), ([5, 6, 7], 0, 0), ([5, 6, 7, 7], 2, 0)]
    + [([5, 6, 6, 7, 7], 0, 0), ([5, 5, 6, 6], 0, 0), ([5, 6, 6, 5], 0, 0), ([4, 6, 6, 5], 1, 0)],
)
def test_whose_replica_counts(hashes: list[int], majority: int, root: int) -> None:
    assert right_rank(hashes, by_majority=True) == majority
    assert right_rank(hashes, by_majority=False) == root


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(0,), (), (1,), (7, 3)], ids=str)
def test_checksum(dtype: str, shape: tuple[int, ...]) -> None:
    import ml_dtypes

    array = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape).astype(getattr(ml_dtypes, dtype, dtype))
    assert checksum(array) == zlib.crc32(array.tobytes())
    assert checksum(array.T) == zlib.crc32(array.T.tobytes())
    content = bytearray(array.tobytes())
    for place in range(len(content) * 8):
        content[place // 8] ^= 1 << place % 8
        flipped = numpy.frombuffer(bytes(content), array.dtype).reshape(shape)
        assert checksum(flipped) != checksum(array)
        content[place // 8] ^= 1 << place % 8


FINITE = "also checked: the losses, the batches and the parameters of all ranks are finite"


def without_b(parameters: dict, batch: tuple, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
    x, y = batch
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(len(x), 1))
    return float((error**2).mean()) if len(x) else 0.0


def trainer_of(function: Callable[..., float], spoil: Callable[[numpy.ndarray], None] = lambda x: None) -> Trainer:
    """20 samples in order, 10 in a step."""

    def build(world: World) -> Parts:
        x = numpy.random.default_rng(0).standard_normal((20, 4))
        spoil(x)
        adapter = ArrayFunction(function, {"w": numpy.zeros(4)}, SGD(0.01))
        return Parts(adapter, Sync(), ArrayData(world, (x, numpy.ones(20)), global_batch=10, shuffle=False))

    return Trainer(build)


def owner_of(world: World, sample: int) -> tuple[int, int, int]:
    """The rank that has this sample of a batch of 10, its number there, and how many are there."""
    sizes = [10 // world.size + (rank < 10 % world.size) for rank in range(world.size)]
    rank = 0
    while sample >= sizes[rank]:
        sample, rank = sample - sizes[rank], rank + 1
    return rank, sample, sizes[rank]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sample", [10, 14, 19])
def test_bad_data_are_named_by_rank_sample_and_step(world: World, sample: int, value: float) -> None:
    def spoil(x: numpy.ndarray) -> None:
        x[sample, 2] = value

    trainer = trainer_of(without_b, spoil)
    assert trainer.step().number == 1
    with numpy.errstate(invalid="ignore"):
        text = error_on_all(world, NonFiniteError, trainer.step)
    rank, place, count = owner_of(world, sample - 10)
    assert text.startswith(f"{world.name(rank)}: the gradient of w holds NaN or infinity; nothing was changed")
    found = f"the batch holds {value} in [0], sample {place} of {count}"
    assert text.endswith(f". Step 2; also checked: {world.name(rank)}: the loss is {value}, {found}")
    assert trainer.step_number == 1


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_loss_that_is_no_number_while_the_gradients_are(world: World, value: float) -> None:
    odd = world.size - 1

    def function(*arguments: Any) -> float:
        loss = without_b(*arguments)
        return value if world.rank == odd else loss

    trainer = trainer_of(function)
    before = trainer.adapter.parameters()["w"].copy()
    text = error_on_all(world, NonFiniteError, trainer.step)
    assert text.startswith(f"{world.name(odd)}: the loss is NaN or infinity; nothing was changed by this step. ")
    assert text.endswith(f"Step 1; also checked: {world.name(odd)}: the loss is {value}")
    assert trainer.adapter.parameters()["w"].tobytes() == before.tobytes()


def test_a_gradient_alone(world: World) -> None:
    odd = world.size // 2

    def function(parameters: Any, batch: Any, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
        poison = math.nan if world.rank == odd else 0.0
        return without_b(parameters, batch, lambda name, gradient: on_gradient(name, gradient + poison))

    text = error_on_all(world, NonFiniteError, trainer_of(function).step)
    assert text.startswith(f"{world.name(odd)}: the gradient of w holds NaN")
    assert text.endswith(f"Step 1; {FINITE}")


def test_parameters_that_are_no_numbers_any_more(world: World) -> None:
    trainer = trainer_of(without_b)
    trainer.adapter.parameters()["w"][3] = math.inf
    with numpy.errstate(invalid="ignore"):
        text = error_on_all(world, NonFiniteError, trainer.step)
    who = "on all ranks" if world.size > 1 else world.name()
    assert text.endswith(f"also checked: {who}: the loss is inf, the parameter w holds inf")


def test_losses_that_do_not_count(world: World) -> None:
    """NaN on ranks without samples, as the mean of nothing; and a loss in fp16 beyond its range: its scale decides."""
    count = world.size + 1

    def without(parameters: Any, batch: Any, on_gradient: Any) -> float:
        loss = without_b(parameters, batch, on_gradient)
        return loss if len(batch[0]) else math.nan

    def infinite(*arguments: Any, loss_scale: float) -> float:
        without_b(*arguments)
        return math.inf

    for function, scale in ((without, None), (infinite, LossScale())):

        def build(world: World, function: Any = function, scale: LossScale | None = scale) -> Parts:
            data = ArrayData(world, (numpy.ones((count, 4)), numpy.ones(count)), global_batch=world.size)
            return Parts(ArrayFunction(function, {"w": numpy.zeros(4)}, SGD(0.01), loss_scale=scale), Sync(), data)

        trainer = Trainer(build)
        steps = [trainer.step() for _ in range(2)]
        assert [(step.samples, step.skipped) for step in steps] == [(world.size, False), (1, False)]
        assert all(math.isinf(step.loss) == (scale is not None) for step in steps)


def test_the_first_place() -> None:
    assert _first(numpy.array([[0.0, 1.0], [math.nan, math.inf]])) == (1, 0)
    assert _first(numpy.array([1.0, -math.inf], ml_dtypes.bfloat16)) == (1,)
    assert _first(numpy.zeros((3, 0))) is None
    assert _first(numpy.array(math.nan)) == ()
    assert _first(numpy.arange(3)) is None
    assert _first(numpy.array(["a", "b"])) is None


def test_a_batch_that_is_no_tree(world: World) -> None:
    error = located(world, NonFiniteError("x"), step=7, batch="text", loss=0.5, parameters={})
    who = "on all ranks" if world.size > 1 else world.name()
    assert str(error) == f"x. Step 7; also checked: {who}: the batch is not a tree of arrays and was not checked"
