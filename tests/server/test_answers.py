"""A server and workers that speak its protocol by hand: late, old, wrong and stale answers; its end; its record."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy
import pytest
from counting import JOB, NUM_SAMPLES, parts, playing, train_served
from hands import Hand, Served, hands, mean, trained

import mpitrain as mt
from free_ports import free_address
from jobs import HANG_SECONDS, until
from mpitrain.compression import CODECS
from mpitrain.config import read_config
from mpitrain.reducer.bucket import plan_layout
from mpitrain.reducer.division import divide
from mpitrain.server.gradients import GradientBuffer, codec_of
from mpitrain.server.registry import ServerRules
from mpitrain.server.wire import MOST_HEADER_BYTES


def is_overdue(served: Served) -> bool:
    return any(one.is_overdue for one in served.strategy._server._registry.here.values())  # type: ignore[union-attr]


def test_a_late_answer_counts_while_nobody_else_has_the_job() -> None:
    served = Served(1, mt.ParameterServer("async"), hang_seconds=0.5)
    with trained(served, 1, 1.0) as (worker,):
        job = worker.pull()
        until(lambda: is_overdue(served))
        worker.push(job, mean(job))
    assert [(one.units, one.dropped) for one in served.strategy.stats.workers] == [(1, 0)]


def test_the_time_of_a_hook_is_no_silence_of_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers that came meanwhile count, and nobody is said to be silent. The clock moves only in the hook."""
    passed = [0.0]
    rules = partial(ServerRules, now=lambda: passed[0])
    monkeypatch.setattr("mpitrain.server.participant.ServerRules", rules)
    begun, goes_on = threading.Event(), threading.Event()

    class Long(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            if step.number == 1:
                begun.set()
                assert goes_on.wait(60)
                passed[0] += 1000.0

    served = Served(3, mt.ParameterServer("async"), hang_seconds=600.0, hooks=[Long()])
    with trained(served, 3, 3.0) as workers:
        jobs = [worker.pull() for worker in workers]
        workers[0].push(jobs[0], mean(jobs[0]))
        assert begun.wait(60)
        for worker, job in list(zip(workers, jobs, strict=True))[1:]:
            worker.push(job, mean(job))
        goes_on.set()
    assert [one.dropped for one in served.strategy.stats.workers] == [0, 0, 0]
    said = capsys.readouterr().out
    assert "no answer for" not in said
    assert "has not answered" not in said


def test_answers_to_another_life_are_dropped() -> None:
    """And a gradient is divided by its loss scale."""
    served = Served(1, mt.ParameterServer("async"))
    with trained(served, 1, 1.0) as (worker,):
        job = worker.pull()
        worker.push(job, mean(job, 1000.0), life="another")
        worker.hear("again")
        worker.join()
        job = worker.pull()
        worker.push(job, mean(job, 4.0), scale=4.0)


@pytest.mark.parametrize(
    ("gradients", "fields", "text"),
    [
        ([numpy.zeros(3)], {}, r"gradients float64\(3,\) came; allowed are float64\(24,\)"),
        ([numpy.zeros(24, "float32")], {}, r"gradients float32\(24,\) came"),
        ([], {}, "0 arrays of gradients came; allowed are 1"),
        ([numpy.zeros(24)], {"version": 7}, "gradients of version 7 came; the newest is 0"),
        ([numpy.zeros(24)], {"unused": [3]}, "indices of parameters"),
        (
            [numpy.zeros(24)],
            {"version": math.inf},
            "the answer to a work unit is incomplete or malformed: .*inf is no int",
        ),
        ([numpy.zeros(24)], {"version": False}, "False is no int"),
        ([numpy.zeros(24)], {"unused": [math.inf]}, "inf is no int"),
        ([numpy.zeros(24)], {"unused": 0}, "the answer to a work unit is incomplete or malformed"),
        ([numpy.zeros(24)], {"loss": None}, "None is not a number"),
        ([numpy.zeros(24)], {"loss": 10**400}, "the answer to a work unit is incomplete or malformed: OverflowError"),
        ([numpy.zeros(24)], {"note": {"pickle": "x"}}, "a note of kind 'pickle'"),
        ([numpy.zeros(24)], {"scale": 0.0}, "1 or above"),
    ],
)
def test_a_wrong_answer_sends_its_worker_away_and_others_get_the_job(gradients: Any, fields: Any, text: str) -> None:
    served = Served(1, mt.ParameterServer("async"))
    with trained(served, 2, 1.0) as (wrong, right):
        job = wrong.pull()
        known = {"number": job.fields["number"], "version": 0, "loss": 1.0, "scale": 1.0, "unused": [], "note": None}
        wrong.say("done", *gradients, **{**known, **fields})
        said = wrong.hear("refused").fields["text"]
        assert "the server dismisses worker 1 on hand: " in said
        assert served.error is None
        again = right.pull()
        assert again.fields["begin"] == job.fields["begin"]
        right.push(again, mean(again))
    assert re.search(text, said), said


def test_a_worker_with_another_model_is_refused() -> None:
    served = Served(1, mt.ParameterServer("async"))
    with trained(served, 1) as (worker,):
        stranger = Hand(served.address, [line.replace("(24,)", "(23,)") for line in served.facts], "elsewhere")
        text = stranger.greet().fields["text"]
        assert "refuses worker 2 on elsewhere: it has 'gradient count float64 (23,)', the server 'gradient" in text
        assert text.endswith("data and settings (MPITRAIN_COMPRESSION) with which the server was started")
        stranger.close()
        job = worker.pull()
        worker.push(job, mean(job))


def test_the_rate_is_divided_by_the_staleness() -> None:
    """Three pull before the first update: their staleness is 0, 1 and 2, and the rate is 1, 1 and 1 / 2."""
    served = Served(3, mt.ParameterServer("async", staleness_correction=True))
    with trained(served, 3) as workers:
        jobs = [worker.pull() for worker in workers]
        for number, (worker, job) in enumerate(zip(workers, jobs, strict=True), 1):
            worker.push(job, mean(job, 8.0))
            until(lambda number=number: served.trainer.step_number == number)
    assert set(served.counts) == {8.0 + 8.0 + 4.0}
    assert served.strategy.stats.staleness == {0: 1, 1: 1, 2: 1}


def test_a_pull_has_what_has_changed() -> None:
    """The gradient of the first 20,000 numbers is 0. Their blocks are pulled once."""

    def build(strategy: Any) -> Any:
        def make(world: mt.World) -> mt.Parts:
            data = mt.data.ArrayData(world, numpy.arange(NUM_SAMPLES), global_batch=8)
            values = {"a": numpy.arange(40_000.0), "b": numpy.zeros(3, "float64")}
            return mt.Parts(mt.ArrayFunction(lambda *_: 0.0, values, mt.optim.SGD(1.0)), strategy, data)

        return make

    served = Served(3, mt.ParameterServer("async"), build)
    with trained(served, 1) as (worker,):
        first = worker.pull()
        assert first.fields["runs"] == {"float64": [[0, 40_003]]}
        gradient = numpy.zeros(40_003)
        gradient[20_000] = 1.0
        worker.push(first, gradient)
        second = worker.hear("unit")
        assert second.fields["runs"] == {"float64": [[16384, 32768]]}
        assert second.arrays[0][20_000 - 16384] == 19_999.0
        worker.push(second, numpy.zeros(40_003))
        third = worker.hear("unit")
        assert third.fields["runs"] == {}
        assert third.arrays == []
        worker.push(third, numpy.zeros(40_003))


@pytest.mark.parametrize("scales", [[1.0], [2.0**16], [2.0**16, 1.0, 2.0**8]])
def test_what_a_codec_leaves_out_comes_with_the_next_push(scales: list[float]) -> None:
    """Error feedback: the sum of what is decoded is the sum of the gradients, up to what is left out at the end.

    The loss scale may change between two pushes.
    """
    rng = numpy.random.default_rng(8)
    codec = CODECS["int8"](False)  # not compiled: the same bits
    values = {"w": numpy.zeros(1000, "float32")}
    layout = plan_layout(mt.ArrayFunction(lambda *_: 0.0, values, mt.optim.SGD(1.0)).layout)
    buffer = GradientBuffer(divide(layout, 1), codec, "a worker")
    total, given = numpy.zeros(1000), numpy.zeros(1000)
    for number in range(50):
        scale = scales[number % len(scales)]
        gradient = rng.standard_normal(1000).astype("float32")
        given += gradient
        buffer.begin()
        buffer.take(0, gradient * numpy.float32(scale))
        _, ((wire,),) = buffer.finish(scale)
        decoded = numpy.empty(1000, "float32")
        codec.decode(wire, decoded)
        total += decoded / scale
    assert wire.nbytes < 1100
    left_out = 2 * 5 * codec.relative_error  # values below 5, and a residual below that of one push
    assert abs(total - given).max() < left_out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (read_config({}, {"compression": "auto"}).compression, "name a codec, as in MPITRAIN_COMPRESSION=int8"),
        ("power_sgd:2", "compression=power_sgd:2 needs two sums over the ranks"),
    ],
)
def test_codecs_that_a_server_does_not_take(name: str, text: str) -> None:
    with pytest.raises(mt.errors.MpitrainError, match=text):
        codec_of(name)


def test_a_run_inside_an_except_block_ends_well() -> None:
    """The error that the caller handles is none of the run: the workers hear that it is over."""
    build = [parts(mt.ParameterServer("sync")) for _ in range(2)]
    try:
        raise ValueError("handled")
    except ValueError:
        trainer, workers = train_served(build[0], build[1:], [mt.StopAtStep(2)])
    assert trainer.step_number == 2
    assert workers.errors == {}


def test_a_worker_that_still_computes_hears_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is there until then, however long that takes. The answer itself is not needed any more."""
    monkeypatch.setattr("mpitrain.server.coordinator._SHUTDOWN_SECONDS", 0.1)
    served = Served(1, mt.ParameterServer("async"), hang_seconds=HANG_SECONDS)
    with trained(served, 2, 1.0) as (slow, fast):
        late = slow.pull()
        job = fast.pull()
        fast.push(job, mean(job))
        fast.end()
        time.sleep(2.0)  # far more than the farewell of those that wait
        slow.push(late, mean(late))


def test_peers_that_say_more_than_can_be_said_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """As much as a header may hold, which is longer when it is shown. The server continues with others."""
    served = Served(1, mt.ParameterServer("async"))
    long = "\\" * (MOST_HEADER_BYTES // 2 - 1000)
    with hands(served, 4) as (worker, odd, named, failed), ExitStack() as stack:
        stranger, far = Hand(served.address, [long]), Hand(served.address, served.facts, long)
        for hand in (stranger, far):
            stack.callback(hand.close)
        assert len(stranger.greet().fields["text"]) < 10_000
        far.join()
        odd.say(long)
        assert len(odd.hear("refused").fields["text"]) < 10_000
        named.say("hello", name=long, facts=served.facts)
        job = failed.pull()
        failed.say("failed", number=job.fields["number"], text=long)
        job = worker.pull()
        worker.push(job, mean(job))
        worker.end()
    served.end()
    assert len(capsys.readouterr().out) < 20_000


def test_a_hook_that_cannot_close_leaves_no_server() -> None:
    class Broken(mt.Hook):
        ends_run = True

        def before_run(self, trainer: mt.Trainer) -> None:
            trainer.last_step = 0

        def close(self) -> None:
            raise OSError("no space left")

    address = free_address()
    with playing("server", address):
        trainer = mt.Trainer(parts(mt.ParameterServer()), [Broken()])
    with pytest.raises(OSError, match="no space left"):
        trainer.run()
    host, port = address.split(":")
    socket.create_server((host, int(port))).close()


BYTES = 8 * NUM_SAMPLES  # of the parameters, and of the gradients


class Kept:
    """A writer that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def open(self, after_step: int) -> None:
        pass

    def write(self, row: dict[str, float], events: Any = ()) -> None:
        self.rows.append(row)

    def close(self) -> None:
        pass


def test_the_record_of_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    """The second of two workers answers a job after two updates of the first one."""
    kept, other = Kept(), Kept()
    hooks = [mt.Record([kept], steps=2), mt.Record([other], meters=[mt.meters.Communication()], steps=4)]
    served = Served(4, mt.ParameterServer("async", unit_samples=JOB), hooks=hooks)
    with trained(served, 2) as (first, second):
        slow = second.pull()
        for _ in range(2):
            job = first.pull()
            first.push(job, mean(job))
        job = first.hear("unit")
        second.push(slow, mean(slow))
        second.hear("unit")
        first.push(job, mean(job))
    assert [row["step"] for row in kept.rows] == [2, 4]
    named = ("workers", "staleness", "largest_staleness", "pulled_bytes", "pushed_bytes")
    # The jobs of both workers and the second of the first one went out before update 2, then three others.
    assert [tuple(row[name] for name in named) for row in kept.rows] == [
        (2, 0, 0, 3 / 2 * BYTES, BYTES),
        (2, 1.5, 2, 2 / 2 * BYTES, BYTES),
    ]
    assert all(0 <= row["waiting_share"] <= 1 for row in kept.rows)
    assert all("communication_share" not in row for row in [*kept.rows, *other.rows])
    assert "Communication is not recorded on this rank" in capfd.readouterr().err


def test_workers_of_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    kept = Kept()
    trainer = mt.Trainer(
        parts(mt.Sync()), [mt.StopAtStep(2), mt.Record([kept], meters=[mt.meters.Workers(), mt.meters.Loss()])]
    )
    trainer.run()
    trainer.close()
    assert list(kept.rows[0]) == ["step", "epoch", "samples", "seconds", "loss"]
    assert "Workers is not recorded on this rank. " in capfd.readouterr().err


def test_the_time_of_a_hook_counts() -> None:
    """An answer comes while a hook works, so the next update is made at once. Its time is also that of the hook."""
    has_come, seconds = threading.Event(), 1.0

    class Works(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: Any) -> None:
            steps.append(step.seconds)
            if step.number == 1:
                assert has_come.wait(60)
                time.sleep(seconds)

    steps: list[float] = []
    served = Served(2, mt.ParameterServer("async", unit_samples=JOB), hooks=[Works()])
    with trained(served, 2) as (first, second):
        jobs = [worker.pull() for worker in (first, second)]
        first.push(jobs[0], mean(jobs[0]))
        until(lambda: steps)
        second.push(jobs[1], mean(jobs[1]))
        has_come.set()
    assert steps[1] >= seconds


def test_the_share_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker computes for 3 s, waits 2 s for a hook, and computes for 1 s, by a clock that this test moves."""
    clock = [1000.0]
    monkeypatch.setattr("mpitrain.server.participant.ServerRules", partial(ServerRules, now=lambda: clock[0]))

    class Works(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: Any) -> None:
            clock[0] += 2.0

    kept = Kept()
    served = Served(2, mt.ParameterServer("async"), hooks=[mt.Record([kept], steps=1), Works()])
    with trained(served, 1) as (worker,):
        job = worker.pull()
        clock[0] += 3.0
        worker.push(job, mean(job))
        job = worker.hear("unit")
        clock[0] += 1.0
        worker.push(job, mean(job))
    assert [row["waiting_share"] for row in kept.rows] == [0.0, 2 / 3]
    (stats,) = served.strategy.stats.workers
    assert (stats.seconds, stats.waited_seconds) == (4.0, 2.0)
