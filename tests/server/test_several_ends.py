"""How a run with several servers ends after an error: with this error, and all servers go home."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from counting import NUM_SAMPLES, parts, train_served
from hands import Served, hands, lines_of, mean, of, say

import mpitrain as mt
from jobs import run_command
from mpitrain.errors import LaunchError
from mpitrain.job.start import the_job
from mpitrain.server import shard, shards


def full(gradients: Any) -> float:
    raise OSError("no space left")


def dividing(strategy: Any) -> Any:
    """The update of the first server alone fails. The others wait for the norm then."""

    def build(world: mt.World) -> mt.Parts:
        optimizer = mt.optim.SGD(1.0, clip_norm=1.0)
        if the_job().role.kind == "server":
            optimizer.update = full  # type: ignore[method-assign]
        data = mt.data.ArrayData(world, numpy.arange(NUM_SAMPLES), global_batch=8)
        model = mt.ArrayFunction(lambda *_: 0.0, {"count": numpy.zeros(NUM_SAMPLES)}, optimizer)
        return mt.Parts(model, strategy, data)

    return build


def update_once(served: Served) -> None:
    with hands(served, 1) as (worker,), lines_of(worker, served) as (line,):
        job = worker.pull()
        say(line, "push", [mean(job)[:12]], **of(worker, job))
        worker.push(job, mean(job)[:12])
        served._thread.join(60)


def test_an_error_within_an_update_is_the_error_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    served = Served(2, mt.ParameterServer("async"), dividing, num_servers=2)
    update_once(served)
    with pytest.raises(OSError, match="no space left"):
        served.end()
    assert served._others.errors == {}
    assert "after OSError, the model here is not whole: server 0 on" in capsys.readouterr().out


def test_an_error_within_a_fetch_is_the_error_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with the first piece; the second fetch, at the end, would meet the others."""
    add = shards.add_piece
    fails = iter([True])

    def broken(state: Any, fields: Any, arrays: Any) -> None:
        if next(fails, False):
            raise MemoryError("no room for a piece")
        add(state, fields, arrays)

    class Reads(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            raise AssertionError("the fetch has failed")

    monkeypatch.setattr(shards, "add_piece", broken)
    served = Served(2, mt.ParameterServer("async"), hooks=[Reads()], num_servers=2)
    update_once(served)
    with pytest.raises(MemoryError, match="no room for a piece"):
        served.end()
    assert served._others.errors == {}


def test_all_servers_go_home_after_an_error_of_a_hook() -> None:
    """The first server has the whole model then."""

    class Broken(mt.Hook):
        def reads_model(self, trainer: mt.Trainer, step: int) -> bool:
            return False

        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            raise OSError("no space left")

    served = Served(2, mt.ParameterServer("async"), hooks=[Broken()], num_servers=2)
    update_once(served)
    with pytest.raises(OSError, match="no space left"):
        served.end()
    assert served._others.errors == {}
    assert set(served.counts) == {1.0}


def test_a_run_that_is_over_does_not_fail_by_a_server_that_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    goes_on = threading.Event()
    hear = shard.ShardServer._hear

    def stays(self: Any, seconds: float) -> Any:
        send = self._first.send
        self._first.send = lambda kind, *rest: None if kind == "bye" else send(kind, *rest)
        try:
            return hear(self, seconds)
        except shard._RunOverError:
            assert goes_on.wait(60)
            raise

    monkeypatch.setattr(shard.ShardServer, "_hear", stays)
    served = Served(1, mt.ParameterServer("async"), hang_seconds=6.0, num_servers=2)
    with hands(served, 1) as (worker,), lines_of(worker, served) as (line,):
        job = worker.pull()
        say(line, "push", [mean(job)[:12]], **of(worker, job))
        worker.push(job, mean(job)[:12])
        worker.end()
    served._thread.join(60)
    goes_on.set()
    served.end()
    assert set(served.counts) == {1.0}
    text = r"the run has ended, .* to end: server 1 on .* not been heard of for \d+ s"
    assert re.search(text, capsys.readouterr().out)


def test_a_pull_that_fails_is_no_fault_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server 1 answers one of two workers alone. The other one ends, and its samples go to the first one."""
    world, job = mt.init(), the_job()
    monkeypatch.setattr(job, "world", world.replaced(config=replace(world.config, hang_seconds=6.0)))
    answer = shard.ShardServer._answer
    shunned: list[str] = []

    def partial(self: Any, peer: Any) -> None:
        ticket = self._pulls[peer]["ticket"]
        shunned[:] = shunned or [ticket]
        if ticket in shunned:
            del self._pulls[peer]
        else:
            answer(self, peer)

    monkeypatch.setattr(shard.ShardServer, "_answer", partial)
    builds = [parts(mt.ParameterServer("sync")) for _ in range(4)]
    trainer, others = train_served(builds[0], builds[1:3], [mt.StopAtStep(3)], shard_builds=builds[3:])
    assert set(trainer.adapter.parameters()["count"]) == {1 / 8}
    (error,) = others.errors.values()
    assert isinstance(error, LaunchError)
    silent = r"worker \d on .*: server 1 at \S+ has not been heard of for \d+ s \(MPITRAIN_HANG_SECONDS\)"
    assert re.search(silent, str(error))
    assert [one.refused for one in trainer.strategy.stats.workers] == [0, 0]  # type: ignore[attr-defined]


SCRIPT = """
import numpy
import mpitrain as mt
from mpitrain.job.start import the_job

def zero(parameters, batch, on_gradient):
    on_gradient("count", numpy.zeros(24))
    return 1.0

def build(world):
    data = mt.data.ArrayData(world, numpy.arange(24), global_batch=8, seed=5)
    model = mt.ArrayFunction(zero, {"count": numpy.zeros(24)}, mt.optim.SGD(1.0))
    return mt.Parts(model, mt.ParameterServer("sync"), data)

class Meddle(mt.Hook):
    def before_run(self, trainer):
        self.begun = trainer.state()

    def after_step(self, trainer, step):
        if step.number == 2:
            HOOK

trainer = mt.Trainer(build, [mt.StopAtStep(5), Meddle()])
try:
    trainer.run()
    THEN
except mt.errors.MpitrainError as error:
    print(f"[{type(error).__name__}: {error}]", flush=True)
    AFTER
    raise
"""


RESTORED = "rank 0 on .* was restored to another state within a run with --servers"
REBUILT = "rank 0 on .*: a Trainer in a job with servers cannot go on in another World"
BEGUN = "rank 0 on .* begins a second run with --servers"


@pytest.mark.parametrize(
    ("hook", "then", "text"),
    [
        ("trainer.restore(self.begun)", "pass", RESTORED),
        ("trainer.rebuild(trainer.world)", "pass", REBUILT),
        ("pass", "trainer.run()", BEGUN),
    ],
)
@pytest.mark.parametrize("num_servers", [1, 2])
def test_what_would_wait_for_ranks_that_have_ended(
    tmp_path: Path, num_servers: int, hook: str, then: str, text: str
) -> None:
    """Every rank that has not ended raises the error: without that, no rank would leave the barrier."""
    after = "pass" if hook == "pass" else "the_job().everyone.barrier()"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("HOOK", hook).replace("THEN", then).replace("AFTER", after))
    numbers = ["-n", str(num_servers + 2), "--servers", str(num_servers)]
    job = run_command([sys.executable, "-m", "mpitrain", "run", *numbers, str(script)])
    assert job.code not in (0, None), job.output
    assert job.left == []
    assert re.search(rf"\[0.*\] \[ConfigError: {text}", job.stdout), job.output
    assert re.search(r"ConfigError: .*\n(.*\n)*.*mpitrain: end of the failure of rank", job.stderr), job.output
