"""How a run with several servers ends after an error or by a silent server, and what is no silence."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from counting import NUM_SAMPLES, parts, train_served
from hands import MovedClock, Served, hands, in_thread, lines_of, next_message, push_both, trained, two_lines

import mpitrain as mt
from free_ports import free_address
from jobs import HANG_SECONDS, run_command, until
from mpitrain.errors import LaunchError, LostServerError
from mpitrain.job.start import the_job
from mpitrain.server import shard, shards
from mpitrain.server.parameters import ParameterShard, pieces_of
from mpitrain.server.registry import ServerRules
from mpitrain.server.security import make_keys
from mpitrain.server.server_link import ServerLink
from mpitrain.server.wire import CHUNK_BYTES, Message, frames
from mpitrain.server.worker_link import Patience, WorkerLink


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
        push_both(worker, line, job)
        served._thread.join(60)


def ends_by(served: Served, kind: type[Exception], text: str) -> None:
    """After an update, the run ends with this error, and the other server well."""
    update_once(served)
    with pytest.raises(kind, match=text):
        served.end()
    assert served._others.errors == {}


def test_an_error_within_an_update_is_the_error_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    ends_by(Served(2, mt.ParameterServer("async"), dividing, num_servers=2), OSError, "no space left")
    assert "after OSError, the model here is incomplete: server 0 on" in capsys.readouterr().out


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
    ends_by(served, MemoryError, "no room for a piece")


def test_all_servers_go_home_after_an_error_of_a_hook() -> None:
    """The first server has the whole model then."""

    class Broken(mt.Hook):
        def reads_model(self, trainer: mt.Trainer, step: int) -> bool:
            return False

        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            raise OSError("no space left")

    served = Served(2, mt.ParameterServer("async"), hooks=[Broken()], num_servers=2)
    ends_by(served, OSError, "no space left")
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
        push_both(worker, line, job)
        worker.end()
    served._thread.join(60)
    goes_on.set()
    served.end()
    assert set(served.counts) == {1.0}
    text = r"the run has ended, .* to end: server 1 on .* not been heard from for \d+ s"
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
    silent = r"worker \d on .*: server 1 at \S+ has not been heard from for \d+ s \(MPITRAIN_HANG_SECONDS\)"
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
REBUILT = "rank 0 on .*: a Trainer in a job with servers cannot continue in another World"
BEGUN = "rank 0 on .* begins a second run with --servers"


@pytest.mark.parametrize(
    ("hook", "then", "text"),
    [
        ("trainer.restore(self.begun)", "pass", RESTORED),
        pytest.param("trainer.rebuild(trainer.world)", "pass", REBUILT, marks=pytest.mark.nightly),
        pytest.param("pass", "trainer.run()", BEGUN, marks=pytest.mark.nightly),
    ],
)
def test_what_would_wait_for_ranks_that_have_ended(tmp_path: Path, hook: str, then: str, text: str) -> None:
    """Every rank that has not ended raises the error: without that, no rank would leave the barrier."""
    after = "pass" if hook == "pass" else "the_job().everyone.barrier()"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("HOOK", hook).replace("THEN", then).replace("AFTER", after))
    job = run_command([sys.executable, "-m", "mpitrain", "run", "-n", "4", "--servers", "2", str(script)])
    assert job.code not in (0, None), job.output
    assert job.left == []
    assert re.search(rf"\[0.*\] \[ConfigError: {text}", job.stdout), job.output
    assert re.search(r"ConfigError: .*\n(.*\n)*.*mpitrain: end of the failure of rank", job.stderr), job.output


def test_a_server_that_hangs_is_named_and_no_worker_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its connections are alive. The worker has sent it all, and the other server has its part."""
    goes_on = threading.Event()

    def hangs(self: Any, message: Message) -> None:
        assert goes_on.wait(HANG_SECONDS)

    monkeypatch.setattr(shard.ShardServer, "_push", hangs)
    served = Served(1, mt.ParameterServer("async"), hang_seconds=6.0, num_servers=2)
    with hands(served, 1) as (worker,), lines_of(worker, served) as (line,):
        job = worker.pull()
        push_both(worker, line, job)
        served._thread.join(60)
    goes_on.set()
    text = r"server 1 on \S+ has not been heard from for \d+ s \(MPITRAIN_HANG_SECONDS\)"
    with pytest.raises(LostServerError, match=text):
        served.end()
    assert "has not answered work unit" not in capsys.readouterr().out


def test_a_server_that_answers_does_not_hold_up_a_slow_worker(capsys: pytest.CaptureFixture[str]) -> None:
    """Its job goes to the next worker that is free."""
    served = Served(1, mt.ParameterServer("async"), hang_seconds=6.0, num_servers=2)
    with trained(served, 2, 1.0) as (slow, fast), lines_of(fast, served) as (line,):
        late = slow.pull()
        until(lambda: "worker 1 on hand has not answered work unit 1 for " in capsys.readouterr().out)
        job = fast.pull()
        assert job.fields["begin"] == late.fields["begin"]
        push_both(fast, line, job)


def test_a_fetch_that_takes_longer_than_a_hang_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves by 200 s with each of three pieces, and the first server waits 300 s for a sign of the other."""
    passed, taken = [0.0], threading.Semaphore(0)
    rules = partial(ServerRules, now=lambda: passed[0])
    monkeypatch.setattr("mpitrain.server.participant.ServerRules", rules)
    add = shards.add_piece

    def slow(state: Any, fields: Any, arrays: Any) -> None:
        add(state, fields, arrays)
        passed[0] += 200.0
        taken.release()

    def one_by_one(state: Any) -> Iterator[Any]:
        for piece in pieces_of(state):
            yield piece
            assert taken.acquire(timeout=HANG_SECONDS)

    monkeypatch.setattr(shards, "add_piece", slow)
    monkeypatch.setattr(shard, "pieces_of", one_by_one)

    def build(strategy: Any) -> Any:
        def make(world: mt.World) -> mt.Parts:
            data = mt.data.ArrayData(world, numpy.arange(NUM_SAMPLES), global_batch=8)
            model = mt.ArrayFunction(lambda *_: 0.0, {"count": numpy.zeros(NUM_SAMPLES)}, mt.optim.AdamW(1.0))
            return mt.Parts(model, strategy, data)

        return make

    served = Served(1, mt.ParameterServer("async"), build, hang_seconds=300.0, num_servers=2)
    with trained(served, 1) as (worker,), lines_of(worker, served) as (line,):
        job = worker.pull()
        push_both(worker, line, job)
    assert passed[0] == 600.0
    assert set(numpy.round(served.counts, 4)) == {1.0}


def test_a_part_of_a_message_is_no_silence() -> None:
    """The worker waits 300 s for a sign of the server."""
    now, keys, address, count = MovedClock(), make_keys(), free_address(), 3 * CHUNK_BYTES // 8
    job, known = {"number": 3, "version": 5}, {"life": "a life", "ticket": "a ticket"}
    with (
        two_lines(address, keys.worker, 2 * count, now) as (lines, replica, _),
        closing(ServerLink(address, keys, 10**7)) as link,
    ):
        thread, errors = in_thread(lines.pull, job, known, "a worker")
        question = next_message(link)
        answer = {"number": 3, "version": 6, "runs": {"float64": [[0, count]]}}
        message = frames(1, "parameters", answer, [numpy.arange(float(count))])
        now.send(link, question.peer, message, lines._links[0], errors)
        thread.join(HANG_SECONDS)
    assert errors == []
    assert replica.versions == [-1, 6]


def further_server(own: ServerLink, first: WorkerLink, num_values: int, patience: Patience) -> Any:
    """And what it has of the parameters."""
    adapter = mt.ArrayFunction(lambda *_: 0.0, {"count": numpy.zeros(num_values)}, mt.optim.SGD(1.0))
    store = ParameterShard(adapter, 1, 2)
    return shard.ShardServer(own, first, store, adapter, {"server": 1}, patience, num_servers=2, name="a"), store


def test_a_part_of_the_first_message_is_no_silence() -> None:
    """The same for a further server, which hears first what ranks had left out: a buffer as large as the gradients."""
    now, keys, count = MovedClock(), make_keys(), 3 * CHUNK_BYTES // 8
    with (
        closing(ServerLink("127.0.0.1:*", keys, 10**7)) as link,
        closing(WorkerLink([link.address], keys.worker, 10**7)) as first,
        closing(ServerLink("127.0.0.1:*", keys, 10**7)) as own,
    ):
        patience = Patience(stall_seconds=600.0, hang_seconds=300.0, say=print, now=now)
        server, store = further_server(own, first, 2 * count, patience)
        thread, errors = in_thread(server.serve)
        peer = next_message(link).peer
        now.send(link, peer, frames(1, "carry", {"secret": "a secret"}, [numpy.arange(float(count))]), first, errors)
        link.send(peer, "settle", {"version": 7, "life": "a life", "gone": []})
        link.send(peer, "over", {"problem": ""})
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    assert errors == []
    assert store.version == 7


def test_a_further_server_says_that_it_waits_for_the_first_one() -> None:
    """And for how long, before it ends."""
    said, keys = list[str](), make_keys()
    patience = Patience(stall_seconds=0.5, hang_seconds=2.0, say=said.append)
    with (
        closing(WorkerLink([free_address()], keys.worker, 10**6, name="the first server")) as first,
        closing(ServerLink("127.0.0.1:*", keys, 10**6)) as own,
        pytest.raises(LaunchError, match=r"^a: the first server has not been heard from .*Start the job again$"),
    ):
        further_server(own, first, 8, patience)[0].serve()
    assert "no program listens at" in said[0]
    assert said[0].endswith("; this server waits until 2 s are over")
