"""The rules for every mode: samples count once, checkpoints go on with any strategy, sync is what one process does."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from counting import BATCH, JOB, MODES, NUM_SAMPLES, counting, expected_counts, parts, train_served

import mpitrain as mt
from jobs import REPOSITORY, run_command
from mpitrain.errors import LaunchError, NonFiniteError


def strategy(name: str) -> mt.ParameterServer:
    return mt.ParameterServer(**MODES[name][0])


def counts_of(trainer: mt.Trainer) -> numpy.ndarray:
    return numpy.array(trainer.adapter.parameters()["count"])


def check_counts(trainer: mt.Trainer, name: str) -> None:
    numpy.testing.assert_array_equal(counts_of(trainer), expected_counts(trainer.data.state(), MODES[name][1]))


@pytest.mark.parametrize(("num_servers", "num_workers"), [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (3, 5), (2, 9)])
@pytest.mark.parametrize("name", MODES)
def test_each_sample_counts_once(name: str, num_servers: int, num_workers: int) -> None:
    """Also where an epoch, or a step, has fewer jobs than there are workers: 9 are more than each has in any mode."""
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


# The clock jumps by a day forth or back, each time that somebody looks; no module has taken time.time before.
JUMPS = """
import sys, time
sys.path[:0] = sys.argv[1].split(":")
now, looks = time.time, []

def jumping():
    looks.append(None)
    return now() + 86400.0 * (-1) ** len(looks)

time.time = jumping
from test_modes import train_in_all_modes

train_in_all_modes()
"""


def train_in_all_modes() -> None:
    """Two servers and three workers. No job goes to another worker because of a clock."""
    for name in MODES:
        *builds, shard, server = (parts(strategy(name)) for _ in range(5))
        trainer, workers = train_served(server, builds, [mt.StopAtStep(8)], shard_builds=[shard])
        assert workers.errors == {}
        check_counts(trainer, name)
        stats = trainer.strategy.stats  # type: ignore[attr-defined]
        assert len(stats.workers) == 3
        assert name == "sync, backup" or sum(one.dropped for one in stats.workers) == 0


def test_a_clock_that_jumps() -> None:
    folders = f"{Path(__file__).parent}:{REPOSITORY / 'tests'}"
    job = run_command([sys.executable, "-c", JUMPS, folders])
    assert job.code == 0, job.output
    for words in ("no answer for", "overdue", "has not been heard of", "has waited"):
        assert words not in job.output, job.output


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


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("name", MODES)
def test_a_checkpoint_goes_on_in_one_process_and_back(name: str, before: int, after: int, tmp_path: Path) -> None:
    """With other numbers of servers."""
    size = MODES[name][1]

    def counting_by_size(parameters: Any, batch: Any, on_gradient: Any) -> float:
        """One process makes smaller batches of what servers have left over."""
        share = len(batch) / size
        return counting(parameters, batch, lambda name, gradient: on_gradient(name, gradient * share))

    def saving(last: int) -> list[mt.Hook]:
        return [mt.StopAtStep(last), mt.Checkpoint(tmp_path, steps=2)]

    builds = [parts(strategy(name), batch=size) for _ in range(3)]
    shards = [parts(strategy(name), batch=size) for _ in range(3)]
    served, _ = train_served(parts(strategy(name), batch=size), builds, saving(7), shard_builds=shards[1:before])
    check_counts(served, name)
    alone = mt.Trainer(parts(mt.Sync(), counting_by_size, batch=size), saving(14))
    alone.run()
    assert alone.memory_step == 0
    numpy.testing.assert_array_equal(counts_of(alone), expected_counts(alone.data.state(), size))
    done = counts_of(alone).sum()
    assert 10 < done <= 14
    back, _ = train_served(parts(strategy(name), batch=size), builds, saving(20), shard_builds=shards[1:after])
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


def test_backup_workers_are_not_waited_for() -> None:
    """One of three workers never answers. The run ends, and its samples count."""
    over = threading.Event()

    def stuck(parameters: Any, batch: Any, on_gradient: Any) -> float:
        over.wait()
        return counting(parameters, batch, on_gradient)

    class Free(mt.Hook):
        def close(self) -> None:
            over.set()

    name = "sync, backup"
    builds = [parts(strategy(name), function) for function in (counting, stuck, counting)]
    trainer, workers = train_served(parts(strategy(name)), builds, [mt.StopAtStep(10), Free()])
    assert workers.errors == {}
    check_counts(trainer, name)
    assert counts_of(trainer).sum() == 10


def test_no_worker_of_bounded_is_further_ahead_than_allowed() -> None:
    """The slow worker answers once the fast one has got as far ahead as it may. The fast one then gets no other job."""
    reached, seen = threading.Condition(), {"fast": 0, "slow": 0}
    leads: list[int] = []
    over: list[bool] = []

    class Free(mt.Hook):
        def close(self) -> None:
            with reached:
                over.append(True)
                reached.notify_all()

    def fast(parameters: Any, batch: Any, on_gradient: Any) -> float:
        with reached:
            seen["fast"] += 1
            leads.append(seen["fast"] - seen["slow"])
            reached.notify_all()
        return counting(parameters, batch, on_gradient)

    def slow(parameters: Any, batch: Any, on_gradient: Any) -> float:
        with reached:
            assert reached.wait_for(lambda: seen["fast"] - seen["slow"] >= 2 or over, 60)
            seen["slow"] += 1
        return counting(parameters, batch, on_gradient)

    builds = [parts(strategy("bounded"), function) for function in (fast, slow)]
    trainer, workers = train_served(parts(strategy("bounded")), builds, [mt.StopAtStep(20), Free()])
    assert workers.errors == {}
    check_counts(trainer, "bounded")
    # With staleness=1 two jobs may be finished ahead. The slow worker's job counts here before it is finished.
    assert max(leads) == 2


def test_samples_that_nobody_can_compute_end_the_run() -> None:
    def bad(parameters: Any, batch: Any, on_gradient: Any) -> float:
        def hand_in(name: str, gradient: Any) -> None:
            on_gradient(name, gradient * (numpy.nan if 3 in batch else 1))

        return counting(parameters, batch, hand_in)

    builds = [parts(strategy("async"), bad) for _ in range(3)]
    with pytest.raises(
        NonFiniteError,
        match=r"worker \d on .*, work unit \d+ \(epoch \d, places .*\): count holds NaN or infinity; 3 workers",
    ):
        train_served(parts(strategy("async")), builds, [mt.StopAtStep(100)])


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


def test_the_sizes_of_these_tests() -> None:
    assert NUM_SAMPLES % BATCH == NUM_SAMPLES % JOB == BATCH % JOB == 0
