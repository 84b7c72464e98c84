"""Several servers: the same bits as one server, whatever the model's shape; hooks; what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest
from counting import parts, train_served
from several_servers import OPTIMIZERS, SHAPES, Everything, bits, several, towards

import mpitrain as mt
from mpitrain.errors import NonFiniteError
from mpitrain.job.start import the_job


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_sync_has_the_bits_of_one_server(shapes: str, optimizer: str, dtype: str) -> None:
    expected = bits(several(1, SHAPES[shapes], OPTIMIZERS[optimizer], dtype=dtype)[0])
    assert expected["step"] == 7
    for number in (2, 3):
        assert bits(several(number, SHAPES[shapes], OPTIMIZERS[optimizer], dtype=dtype)[0]) == expected


def test_clipping_and_the_norm_are_of_all_parts() -> None:
    """Both to rounding: the squares are added up in another order."""

    class Norms(mt.Hook):
        def __init__(self) -> None:
            self.found: list[float] = []

        def before_step(self, trainer: mt.Trainer) -> None:
            trainer.adapter.measure_gradient_norm()

        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            norm = trainer.adapter.gradient_norm()
            assert norm is not None
            self.found.append(norm)

    for optimizer in ("sgd", "clipped"):
        runs = []
        for number in (1, 3):
            norms = Norms()
            trainer, _ = several(number, SHAPES["tensors"], OPTIMIZERS[optimizer], [norms], dtype="float64")
            runs.append((norms.found, trainer.adapter.parameters()))
        numpy.testing.assert_allclose(runs[1][0], runs[0][0], rtol=1e-14)
        assert min(runs[0][0]) > 0.5  # clipped in each step
        for name, value in runs[0][1].items():
            numpy.testing.assert_allclose(runs[1][1][name], value, rtol=1e-12)


def test_no_server_has_all_bytes() -> None:
    """Pushes and pulls: each server has its third, up to one element of each message."""
    trainer, _ = several(3, {"a": (1000,), "b": (2001,)}, OPTIMIZERS["sgd"], steps=20)
    servers = trainer.strategy.stats.servers  # type: ignore[attr-defined]
    expected = [60 * 4 * count for count in (1001, 1000, 1000)]  # of 3 workers in 20 steps
    assert [one.bytes_in for one in servers] == expected
    assert [one.bytes_out for one in servers] == expected
    for worker in trainer.strategy.stats.workers:  # type: ignore[attr-defined]
        assert worker.pushed_bytes == worker.pulled_bytes == 20 * 4 * 3001


def test_a_gradient_that_the_scale_made_infinite_is_skipped_by_all() -> None:
    """It is in the last server's part alone. The step before and after it count on all of them."""

    def scaled(parameters: Any, batch: Any, on_gradient: Any, *, loss_scale: float) -> float:
        def hand_in(name: str, gradient: Any) -> None:
            on_gradient(name, gradient * loss_scale if name != "d" or loss_scale < 4 else gradient * numpy.inf)

        return towards(parameters, batch, hand_in)

    found = []
    for number in (1, 3):
        trainer, _ = several(
            number,
            SHAPES["tensors"],
            OPTIMIZERS["sgd"],
            [Everything()],
            function=scaled,
            make_scale=lambda: mt.optim.LossScale(8.0, growth_interval=2),
        )
        assert trainer.adapter.loss_scale is not None
        assert trainer.adapter.loss_scale.skipped_steps == 3  # at 8, 4 and, after two good steps at 2, again 4
        found.append(bits(trainer))
    assert found[0] == found[1]
    assert found[0]["step"] == 4


def test_nan_that_one_server_sees_is_named_and_refused_by_all() -> None:
    def bad(parameters: Any, batch: Any, on_gradient: Any) -> float:
        def hand_in(name: str, gradient: Any) -> None:
            on_gradient(name, gradient * numpy.nan if name == "d" and 3 in batch else gradient)

        return towards(parameters, batch, hand_in)

    kept: list[Any] = []

    class Keep(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            kept[:] = [trainer, bits(trainer)]

    with pytest.raises(
        NonFiniteError,
        match=r"worker \d on .*, work unit \d+ \(epoch \d+, places .*\): d holds NaN or infinity; 3 workers",
    ):
        several(3, SHAPES["tensors"], OPTIMIZERS["adamw"], [Keep()], function=bad, mode="async", steps=1000)
    trainer, last = kept
    assert bits(trainer) == last  # those of the last good update, also after the error


def test_what_ranks_had_left_out_is_in_the_first_update_of_all_servers() -> None:
    class Carry(mt.Hook):
        def before_run(self, trainer: mt.Trainer) -> None:
            trainer.strategy.restore_own({"carried": {"count": -numpy.arange(24, dtype="float64")}})

    builds = [parts(mt.ParameterServer("sync")) for _ in range(4)]
    hooks = [mt.StopAtStep(2), Carry()]
    trainer, others = train_served(builds[0], builds[1:2], hooks, shard_builds=builds[2:])
    assert others.errors == {}
    carried = trainer.adapter.parameters()["count"] - numpy.arange(24)
    assert carried.sum() == 2
    assert set(carried) == {0.0, 0.125}


def test_a_codec_codes_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Error feedback by part: what the parameters have become is right up to what is left out at the end."""
    world, job = mt.init(), the_job()
    monkeypatch.setattr(job, "world", world.replaced(config=replace(world.config, compression="int8")))

    def steady(parameters: Any, batch: Any, on_gradient: Any) -> float:
        on_gradient("a", -numpy.linspace(-1, 1, 999, dtype="float32"))
        return 1.0

    trainer, _ = several(3, {"a": (999,)}, lambda: mt.optim.SGD(1.0), function=steady, steps=20)
    servers = trainer.strategy.stats.servers  # type: ignore[attr-defined]
    assert max(one.bytes_in for one in servers) < 3 * 20 * 500  # of 1332 bytes for each push
    start_values = numpy.random.default_rng(7).standard_normal(999).astype("float32")
    change = trainer.adapter.parameters()["a"] - start_values
    numpy.testing.assert_allclose(change, 20 * numpy.linspace(-1, 1, 999), atol=0.02)


def test_a_run_that_has_ended_before_its_first_step_ends_all_servers() -> None:
    class Ended(mt.Hook):
        ends_run = True

        def before_run(self, trainer: mt.Trainer) -> None:
            trainer.last_step = 0

    builds = [parts(mt.ParameterServer("sync")) for _ in range(5)]
    trainer, others = train_served(builds[0], builds[1:3], [Ended()], shard_builds=builds[3:])
    assert trainer.step_number == 0
    assert others.errors == {}
