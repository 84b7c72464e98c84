"""Training with arrays on the GPU is training with NumPy's: losses, parameters, checkpoints, mixed precision."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

from models import mlp
from mpitrain import (
    Accumulate,
    ArrayFunction,
    Balance,
    Checkpoint,
    CompareReplicas,
    Hook,
    Parts,
    Step,
    StopAtStep,
    Sync,
    Trainer,
    World,
    evaluate,
)
from mpitrain import Record as KeepRows
from mpitrain import state as checkpoint
from mpitrain.data import ArrayData
from mpitrain.errors import NonFiniteError, ReplicaError
from mpitrain.optim import SGD, Adam, AdamW, LossScale
from mpitrain.reducer.exchange import Exchange, PlainExchange, make_exchange
from mpitrain.state.names import split
from mpitrain.training.hooks.replicas import checksum
from mpitrain.training.writers.json_lines import read_rows
from mpitrain.writers import JsonLines
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone
from tests.ranks.test_data_balance import Pretend
from tests.ranks.trainings import Record

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "sgd plain": lambda: SGD(0.1),
    "adam": lambda: Adam(0.01),
    "adamw, clipped": lambda: AdamW(0.01, weight_decay=0.1, clip_norm=0.5),
}
SAMPLES, BATCH = 90, 32  # a last batch of 26: uneven on most numbers of ranks


def builder(
    xp: ModuleType,
    optimizer: Callable[[], Any] = OPTIMIZERS["sgd"],
    precision: str | None = None,
    scale: LossScale | None = None,
    dtype: str = "float32",
    exchange: Callable[[World], Exchange] = lambda own: PlainExchange(own, transport="staged"),
) -> Callable[[World], Parts]:
    """`exchange`: the default is one whose bits do not depend on measured speeds."""

    def build(world: World) -> Parts:
        rng = numpy.random.default_rng(5)
        x = rng.standard_normal((SAMPLES, 12)).astype(dtype)
        y = (x @ rng.standard_normal((12, 4))).argmax(axis=1)
        parameters = mlp.initial(rng, xp, inputs=12, hidden=(16,), classes=4, dtype=dtype)
        adapter = ArrayFunction(mlp.loss_and_gradients, parameters, optimizer(), precision=precision, loss_scale=scale)
        return Parts(adapter, Sync(exchange), ArrayData(world, (x, y), global_batch=BATCH))

    return build


def trained(build: Callable[[World], Parts], steps: int, *hooks: Any) -> tuple[Trainer, list[float]]:
    record = Record()
    trainer = Trainer(build, [StopAtStep(steps), record, *hooks])
    trainer.run()
    return trainer, [step.loss for step in record.steps]


def host(trainer: Trainer) -> dict[str, Any]:
    """Everything that a checkpoint keeps, on the host."""
    return {
        name: value.get() if isinstance(value, cupy.ndarray) else value
        for part in split(trainer.state())
        for name, value in part.items()
    }


def bits(trainer: Trainer) -> dict[str, bytes]:
    return {
        name: value.tobytes() if isinstance(value, numpy.ndarray) else repr(value).encode()
        for name, value in host(trainer).items()
    }


def assert_close(found: Trainer, expected: Trainer, rtol: float, atol: float) -> None:
    here, there = host(found), host(expected)
    assert here.keys() == there.keys()
    for name, value in there.items():
        numpy.testing.assert_allclose(here[name], value, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.nightly] * (one not in ("sgd", "adam"))) for one in OPTIMIZERS]
)
def test_a_run_equals_the_one_on_numpy(world: World, name: str) -> None:
    """Both runs are in float64. They differ only in the order of additions: by 1e-10 after 20 steps."""
    exchange = make_exchange if name == "adam" else lambda own: PlainExchange(own, transport="staged")
    trainer, losses = trained(builder(cupy, OPTIMIZERS[name], dtype="float64", exchange=exchange), 20)
    expected, expected_losses = trained(builder(numpy, OPTIMIZERS[name], dtype="float64"), 20)
    assert all(isinstance(value, cupy.ndarray) for value in trainer.adapter.parameters().values())
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    assert losses[-1] < losses[0] / 1.5
    assert_close(trainer, expected, rtol=1e-9, atol=1e-12)
    assert_same_bits(world, *(value.get() for value in trainer.adapter.parameters().values()))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param("sgd", "float32", marks=pytest.mark.nightly), ("adamw, clipped", "float64")],
)
def test_what_is_recorded(world: World, shared: Path, capfd: pytest.CaptureFixture[str], name: str, dtype: str) -> None:
    """The record has the gradient norms of NumPy, the GPU's memory, and the GPU's use or why this is missing."""
    rows = []
    for xp in (numpy, cupy):
        directory = shared / xp.__name__
        trained(builder(xp, OPTIMIZERS[name], dtype=dtype), 3, KeepRows([JsonLines(directory)], steps=1))
        rows.append(read_rows(directory / "metrics.jsonl") if world.is_root else [])
    err = capfd.readouterr().err
    if not world.is_root:
        return
    norms = [[row["gradient_norm"] for row in its] for its in rows]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4 if dtype == "float32" else 1e-10)
    assert all("gpu_memory_bytes" not in row for row in rows[0])
    assert all(0 < row["gpu_memory_bytes"] < 2**40 for row in rows[1])
    used = [row["gpu_utilisation"] for row in rows[1] if "gpu_utilisation" in row]
    assert all(0 <= share <= 1 for share in used)
    assert bool(used) != ("mpitrain: GpuUtilisation is not recorded on " in err), err


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-5), ("bf16", 10 * 2.0**-9), ("fp16", 10 * 2.0**-12)])
def test_a_run_in_a_precision(world: World, precision: str, bound: float) -> None:
    """The run equals that on NumPy, but a sum in another order may be rounded to another 16-bit number."""
    scale = LossScale(2.0**10) if precision == "fp16" else None
    _, losses = trained(builder(cupy, precision=precision, scale=scale), 20)
    _, expected = trained(builder(numpy, precision=precision, scale=scale and LossScale(2.0**10)), 20)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < bound
    assert losses[-1] < losses[0] / 1.5


def test_steps_are_skipped_on_all_ranks(world: World) -> None:
    """2^30 is far too much for fp16. Steps are skipped until the scale fits; a skipped step changes no parameter."""
    trainer, _ = trained(builder(cupy, OPTIMIZERS["adam"], "fp16", LossScale(2.0**30)), 25)
    scale = trainer.adapter.loss_scale
    assert scale.skipped_steps >= 10
    assert scale.value == 2.0 ** (30 - scale.skipped_steps)
    assert trainer.adapter.state()["optimizer"]["step"] == 25 - scale.skipped_steps
    assert len(set(world.allgather(scale.skipped_steps))) == 1
    fresh = Trainer(builder(cupy, OPTIMIZERS["adam"], "fp16", LossScale(2.0**30)))
    before = bits(fresh)
    assert fresh.step().skipped
    after = bits(fresh)
    kept = [name for name in before if name.startswith(("adapter/parameters", "adapter/optimizer"))]
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    assert_same_bits(world, *(value.get() for value in trainer.adapter.parameters().values()))


def test_not_finite_without_a_loss_scale(world: World) -> None:
    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        for name, value in parameters.items():
            bad = world.rank == world.size - 1 and name == "dense2.bias"
            on_gradient(name, cupy.full(value.shape, numpy.nan if bad else 1, value.dtype))
        return 0.0

    def build(world: World) -> Parts:
        parts = builder(cupy)(world)
        return replace(parts, adapter=ArrayFunction(function, parts.adapter.parameters(), SGD(0.1)))

    trainer = Trainer(build)
    before = bits(trainer)
    text = error_on_all(world, NonFiniteError, trainer.step)
    assert text.startswith(f"{world.name(world.size - 1)}: the gradient of dense2.bias holds NaN or infinity")
    del before["data/cursor"]
    after = bits(trainer)
    del after["data/cursor"]
    assert after == before


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.nightly), "fp16"])
def test_checkpoints_from_gpu_to_host_and_back(world: World, shared: Path, precision: str) -> None:
    """A checkpoint is restored bit for bit. A run that is resumed on a GPU has the bits of an uninterrupted one."""

    def build(xp: ModuleType) -> Callable[[World], Parts]:
        scale = LossScale(2.0**24, growth_interval=4) if precision == "fp16" else None
        return builder(xp, OPTIMIZERS["adam"], precision, scale)

    whole, _ = trained(build(cupy), 14)
    trained(build(cupy), 9, Checkpoint(shared / "gpu", steps=100))
    resumed, _ = trained(build(cupy), 14, Checkpoint(shared / "gpu", steps=100))
    assert bits(resumed) == bits(whole)

    at_9 = Trainer(build(numpy))
    at_9.restore(checkpoint.load(shared / "gpu" / "step-00000009"))
    world.barrier()
    if world.is_root:
        checkpoint.save(shared / "host", 9, at_9.state())
        shutil.rmtree(shared / "gpu")
    world.barrier()
    again, _ = trained(build(cupy), 14, Checkpoint(shared / "host", steps=100))
    assert bits(again) == bits(whole)


def test_ranks_that_start_from_different_parameters_get_those_of_rank_0(world: World) -> None:
    def build(world: World) -> Parts:
        parts = builder(cupy)(world)
        parts.adapter.load_parameters({name: value + world.rank for name, value in parts.adapter.parameters().items()})
        return parts

    found = Trainer(build).adapter.parameters()
    for name, value in builder(numpy)(world).adapter.parameters().items():
        assert found[name].get().tobytes() == value.tobytes(), name


def test_evaluate(world: World) -> None:
    trainer = Trainer(builder(cupy))
    x, y = (numpy.arange(SAMPLES * 12) % 7).reshape(SAMPLES, 12).astype("float32"), numpy.arange(SAMPLES) % 4
    results = {}
    for xp in (cupy, numpy):
        parameters = {name: xp.asarray(value.get()) for name, value in trainer.adapter.parameters().items()}

        def metrics(batch: Any, xp: ModuleType = xp, parameters: Any = parameters) -> dict[str, float]:
            found = mlp.scores(parameters, xp.asarray(batch[0])).argmax(axis=1)
            return {"right": float((found == xp.asarray(batch[1])).mean())}

        results[xp.__name__] = evaluate(world, metrics, (x, y), samples_at_once=13)["right"]
    assert results["cupy"] == results["numpy"]


def test_gradients_in_pieces_and_unequal_parts(world: World) -> None:
    """The GPU gives the host's results. Rank r counts as r + 1 times as slow, and takes up to 7 - r samples at once."""

    def on(xp: ModuleType) -> tuple[Trainer, list[float], list[int]]:
        def build(world: World) -> Parts:
            parts = builder(xp, dtype="float64")(world)
            return replace(parts, adapter=Accumulate(parts.adapter, per_rank_batch=7 - world.rank))

        hook = Pretend(Balance(2), 0.1 * (1 + world.rank))
        trainer, losses = trained(build, 6, hook)
        assert hook.shared_out_at == [2]
        return trainer, losses, hook.parts

    (trainer, losses, parts), (other, expected, expected_parts) = on(cupy), on(numpy)
    assert parts == expected_parts
    numpy.testing.assert_allclose(losses, expected, rtol=1e-12)
    for name, value in other.adapter.parameters().items():
        numpy.testing.assert_allclose(trainer.adapter.parameters()[name].get(), value, rtol=1e-11, atol=1e-13)


class Negate(Hook):
    """Flips the bit of the sign of one element on the last rank, after step 2."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        value = trainer.adapter.parameters()["dense1.bias"]
        if step.number == 2 and trainer.world.rank == trainer.world.size - 1:
            value[1] = -value[1]


def test_a_sign_that_flips_on_a_gpu(world: World) -> None:
    """The hash and the repair of replicas are those of the host."""
    array = numpy.arange(12, dtype="float32").reshape(3, 4)
    assert checksum(cupy.asarray(array)) == checksum(array)
    skip_alone(world)
    text = error_on_all(world, ReplicaError, lambda: trained(builder(cupy), 4, Negate(), CompareReplicas(1)))
    assert text.startswith("after step 2 the parameters are not those of rank")
    assert f"on: {world.name(world.size - 1)}: dense1.bias in 1 of " in text
    expected, _ = trained(builder(cupy), 4)
    found, _ = trained(builder(cupy), 4, Negate(), CompareReplicas(2, repair="majority"))
    for name, value in expected.adapter.parameters().items():
        assert found.adapter.parameters()[name].get().tobytes() == value.get().tobytes(), name
