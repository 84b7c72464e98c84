"""Rules for every mode: samples count once, checkpoints continue with any strategy, sync is what one process does."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from counting import MODES, NUM_SAMPLES, counting, expected_counts, parts, train_served

import mpitrain as mt
from mpitrain.errors import LaunchError


def strategy(name: str) -> mt.ParameterServer:
    return mt.ParameterServer(**MODES[name][0])


def counts_of(trainer: mt.Trainer) -> numpy.ndarray:
    return numpy.array(trainer.adapter.parameters()["count"])


def check_counts(trainer: mt.Trainer, name: str) -> None:
    numpy.testing.assert_array_equal(counts_of(trainer), expected_counts(trainer.data.state(), MODES[name][1]))


@pytest.mark.parametrize(
    ("num_servers", "num_workers"),
    [(1, 3), (2, 9), *(pytest.param(*numbers, marks=pytest.mark.nightly) for numbers in ((1, 1), (2, 1), (3, 5)))],
)
@pytest.mark.parametrize("name", MODES)
def test_each_sample_counts_once(
    name: str, num_servers: int, num_workers: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where an epoch, or a step, has fewer jobs than there are workers: 9 are more than each has in any mode.

    The clock jumps by a day forth or back, each time that somebody looks: no job goes to another worker because of it.
    """
    now, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + 86400.0 * (-1) ** next(looks))
    steps = 3 * NUM_SAMPLES // MODES[name][1] + 2
    builds = [parts(strategy(name)) for _ in range(num_workers)]
    shards = [parts(strategy(name)) for _ in range(num_servers - 1)]
    hooks = [mt.StopAtStep(steps)]
    trainer, workers = train_served(parts(strategy(name)), builds, hooks, shard_builds=shards)
    assert workers.errors == {}
    check_counts(trainer, name)
    total = counts_of(trainer).sum() * MODES[name][1]
    assert total == steps * MODES[name][1]
    stats = trainer.strategy.stats  # type: ignore[attr-defined]
    assert sum(one.samples for one in stats.workers) >= total
    assert stats.updates == steps
    assert len(stats.workers) == num_workers
    assert name == "sync, backup" or sum(one.dropped for one in stats.workers) == 0
    output = "".join(capfd.readouterr())
    assert not re.search("no answer for|overdue|has not been heard from|has waited", output), output


@pytest.mark.parametrize("name", MODES)
def test_workers_that_are_faster_than_the_server(name: str) -> None:
    """Each has one job at most, whether it computes it, or has answered and is not heard yet."""
    num_workers, steps = 5, 12  # with one backup worker, 4 answers make a step of 8 samples
    cut: list[int] = []

    class Slow(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            time.sleep(0.03)
            queue = trainer.strategy._server.queue  # type: ignore[attr-defined]
            cut.append(queue.summary()["out"] + queue.summary()["answered"])

    builds = [parts(strategy(name)) for _ in range(num_workers)]
    trainer, workers = train_served(parts(strategy(name)), builds, [mt.StopAtStep(steps), Slow()])
    assert workers.errors == {}
    assert len(cut) == steps
    assert max(cut) <= num_workers
    check_counts(trainer, name)


@pytest.mark.parametrize("name", MODES)
def test_a_checkpoint_goes_on_in_one_process_and_back(name: str, tmp_path: Path) -> None:
    """First of two servers, in the end of one."""
    size = MODES[name][1]

    def counting_by_size(parameters: Any, batch: Any, on_gradient: Any) -> float:
        """One process makes smaller batches of what servers have left over."""
        share = len(batch) / size
        return counting(parameters, batch, lambda name, gradient: on_gradient(name, gradient * share))

    def saving(last: int) -> list[mt.Hook]:
        return [mt.StopAtStep(last), mt.Checkpoint(tmp_path, steps=2)]

    server, shard, *builds = (parts(strategy(name), batch=size) for _ in range(5))
    served, _ = train_served(server, builds, saving(7), shard_builds=[shard])
    check_counts(served, name)
    alone = mt.Trainer(parts(mt.Sync(), counting_by_size, batch=size), saving(14))
    alone.run()
    assert alone.memory_step == 0
    numpy.testing.assert_array_equal(counts_of(alone), expected_counts(alone.data.state(), size))
    done = counts_of(alone).sum()
    assert 10 < done <= 14
    back, _ = train_served(parts(strategy(name), batch=size), builds, saving(20))
    check_counts(back, name)
    assert counts_of(back).sum() == done + 6


def regression(parameters: Any, batch: Any, on_gradient: Any) -> float:
    w = parameters["w"]
    x, y = batch
    error = x @ w - y
    on_gradient("w", x.T @ error / len(x))
    return float((error**2).mean() / 2)


def test_sync_is_what_one_process_does() -> None:
    """Against NumPy in float64: uneven jobs, a short last batch, momentum, and workers of unequal speed."""
    rng = numpy.random.default_rng(3)
    x, y, start = rng.standard_normal((50, 5)), rng.standard_normal(50), rng.standard_normal(5)
    steps, batch = 12, 16

    def build(world: mt.World) -> mt.Parts:
        data = mt.data.ArrayData(world, (x, y), global_batch=batch, shuffle=False)
        return mt.Parts(
            mt.ArrayFunction(regression, {"w": start}, mt.optim.SGD(0.1, momentum=0.9)),
            mt.ParameterServer("sync"),
            data,
        )

    served, _ = train_served(build, [build] * 3, [mt.StopAtStep(steps)])
    w, speed = start.copy(), numpy.zeros(5)
    for step in range(steps):
        begin = step % 4 * batch
        xs, ys = x[begin : begin + batch], y[begin : begin + batch]
        speed = 0.9 * speed + xs.T @ (xs @ w - ys) / len(xs)
        w = w - 0.1 * speed
    numpy.testing.assert_allclose(served.adapter.parameters()["w"], w, rtol=1e-12)
    assert served.data.state()["cursor"] == 50
    assert "left" not in served.data.state()


@pytest.mark.parametrize("num_servers", [1, 2])
def test_sync_is_what_one_process_does_where_a_hook_changes_parameters(num_servers: int) -> None:
    """All gradients of a step are of the parameters that the hooks have left."""

    class Halve(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            trainer.adapter.parameters()["count"][...] *= 0.5

    def falling(parameters: Any, batch: Any, on_gradient: Any) -> float:
        on_gradient("count", 1.0 - 0.5 * parameters["count"])
        return 1.0

    alone = mt.Trainer(parts(mt.Sync(), falling), [mt.StopAtStep(5), Halve()])
    alone.run()
    server, *others = [parts(mt.ParameterServer("sync"), falling) for _ in range(4)]
    hooks = [mt.StopAtStep(5), Halve()]
    served, _ = train_served(server, others[:2], hooks, shard_builds=others[2 : 1 + num_servers])
    numpy.testing.assert_allclose(counts_of(served), counts_of(alone), rtol=1e-12)


def test_one_process_without_servers_is_sync_bit_for_bit() -> None:
    found = []
    for one in (mt.Sync(), mt.ParameterServer()):
        trainer = mt.Trainer(parts(one), [mt.StopAtStep(7)])
        trainer.run()
        found.append((counts_of(trainer).tobytes(), trainer.data.state(), trainer.state()["strategy"]))
    assert found[0] == found[1]


def test_a_worker_that_is_broken_is_sent_away() -> None:
    def broken(parameters: Any, batch: Any, on_gradient: Any) -> float:
        return counting(
            parameters, batch, lambda name, gradient: on_gradient(name, numpy.full_like(gradient, numpy.inf))
        )

    class WhenThreeAreLeft(mt.Hook):
        """Ends the run when the broken worker has gone. The others wait for it, however fast they are."""

        ends_run = True

        def after_step(self, trainer: mt.Trainer, step: Any) -> None:
            stats_of = served.stats.workers
            if sum(stats.is_here for stats in stats_of) == 3 and any(stats.refused for stats in stats_of):
                trainer.last_step = trainer.step_number

    functions = (counting, broken, counting, counting)
    builds = [parts(strategy("async"), function) for function in functions]
    served = strategy("async")
    trainer, workers = train_served(parts(served), builds, [WhenThreeAreLeft()])
    check_counts(trainer, "async")
    assert list(workers.errors) == [1]
    assert isinstance(workers.errors[1], LaunchError)
    assert "dismisses worker" in str(workers.errors[1])
    assert "count holds NaN or infinity, for the third time in a row" in str(workers.errors[1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "fast"}, "mode='fast'; allowed: sync, async, bounded"),
        ({"staleness": -1}, "ints of at least 0"),
        ({"unit_samples": 0}, "an int of at least 1"),
        ({"servers": 0}, "servers=0; it must be an int of at least 1"),
        ({"mode": "async", "backup": 1}, "goes with mode='sync'"),
        ({"mode": "sync", "staleness_correction": True}, "no gradient is stale"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], text: str) -> None:
    with pytest.raises(mt.errors.MpitrainError, match=text):
        mt.ParameterServer(**options)
