"""A server that does not answer is named, and a large message that still comes is no silence."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import numpy
import pytest
from counting import NUM_SAMPLES
from hands import Served, hands, lines_of, mean, next_message, of, say, two_lines

import mpitrain as mt
from free_ports import free_address
from jobs import HANG_SECONDS, until
from mpitrain.errors import LaunchError, LostServerError
from mpitrain.server import shard, shards
from mpitrain.server.parameters import ParameterShard, pieces_of
from mpitrain.server.registry import ServerRules
from mpitrain.server.security import make_keys
from mpitrain.server.server_link import ServerLink
from mpitrain.server.wire import CHUNK_BYTES, Message, frames
from mpitrain.server.worker_link import Patience, WorkerLink


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
        say(line, "push", [mean(job)[:12]], **of(worker, job))
        worker.push(job, mean(job)[:12])
        served._thread.join(60)
    goes_on.set()
    text = r"server 1 on \S+ has not been heard of for \d+ s \(MPITRAIN_HANG_SECONDS\)"
    with pytest.raises(LostServerError, match=text):
        served.end()
    assert "has not answered work unit" not in capsys.readouterr().out


def test_a_server_that_answers_does_not_hold_up_a_slow_worker(capsys: pytest.CaptureFixture[str]) -> None:
    """Its job goes to the next worker that is free."""
    served = Served(1, mt.ParameterServer("async"), hang_seconds=6.0, num_servers=2)
    with hands(served, 2) as (slow, fast), lines_of(fast, served) as (line,):
        late = slow.pull()
        until(lambda: "worker 1 on hand has not answered work unit 1 for " in capsys.readouterr().out)
        job = fast.pull()
        assert job.fields["begin"] == late.fields["begin"]
        say(line, "push", [mean(job)[:12]], **of(fast, job))
        fast.push(job, mean(job)[:12])
        for worker in (slow, fast):
            worker.end()
    served.end()
    assert set(served.counts) == {1.0}


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
    with hands(served, 1) as (worker,), lines_of(worker, served) as (line,):
        job = worker.pull()
        say(line, "push", [mean(job)[:12]], **of(worker, job))
        worker.push(job, mean(job)[:12])
        worker.end()
    served.end()
    assert passed[0] == 600.0
    assert set(numpy.round(served.counts, 4)) == {1.0}


def test_a_part_of_a_message_is_no_silence() -> None:
    """The clock moves by 200 s with each of its frames, and the worker waits 300 s for a sign of the server."""
    passed, looks = [0.0], itertools.count()
    looked = [0]  # how often the worker has looked at the clock

    def now() -> float:
        looked[0] = next(looks)
        return time.monotonic() + passed[0]

    keys, address, count = make_keys(), free_address(), 3 * CHUNK_BYTES // 8
    stack = ExitStack()
    lines, replica, _ = stack.enter_context(two_lines(address, keys.worker, 2 * count, now))
    errors: list[BaseException] = []

    def pull() -> None:
        try:
            lines.pull({"number": 3, "version": 5}, {"life": "a life", "ticket": "a ticket"}, "a worker")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=pull, daemon=True)
    with closing(ServerLink(address, keys, 10**7)) as link:
        thread.start()
        question = next_message(link)
        answer = {"number": 3, "version": 6, "runs": {"float64": [[0, count]]}}
        *parts, last = frames(1, "parameters", answer, [numpy.arange(float(count))])
        assert len(parts) == 3
        for number, frame in enumerate(parts, 1):
            link._socket.send_multipart([question.peer, frame])
            until(lambda number=number: errors or lines._links[0].frames == number)
            passed[0] += 200.0
            before = looked[0]
            until(lambda before=before: errors or looked[0] > before)
        link._socket.send_multipart([question.peer, last])
        thread.join(HANG_SECONDS)
    stack.close()
    assert errors == []
    assert replica.versions == [-1, 6]


def test_a_part_of_the_first_message_is_no_silence() -> None:
    """The same for a further server, which hears first what ranks had left out: a buffer as large as the gradients."""
    passed, looks = [0.0], itertools.count()
    looked = [0]  # how often it has looked at the clock

    def now() -> float:
        looked[0] = next(looks)
        return time.monotonic() + passed[0]

    keys, count = make_keys(), 3 * CHUNK_BYTES // 8
    adapter = mt.ArrayFunction(lambda *_: 0.0, {"count": numpy.zeros(2 * count)}, mt.optim.SGD(1.0))
    errors: list[BaseException] = []
    with (
        closing(ServerLink("127.0.0.1:*", keys, 10**7)) as link,
        closing(WorkerLink([link.address], keys.worker, 10**7)) as first,
        closing(ServerLink("127.0.0.1:*", keys, 10**7)) as own,
    ):
        store, said = ParameterShard(adapter, 1, 2), {"server": 1}
        patience = Patience(stall_seconds=600.0, hang_seconds=300.0, say=print, now=now)
        server = shard.ShardServer(own, first, store, adapter, said, patience, num_servers=2, name="a")

        def serve() -> None:
            try:
                server.serve()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        peer = next_message(link).peer
        *parts, last = frames(1, "carry", {"secret": "a secret"}, [numpy.arange(float(count))])
        assert len(parts) == 3
        for number, frame in enumerate(parts, 1):
            link._socket.send_multipart([peer, frame])
            until(lambda number=number: errors or first.frames == number)
            passed[0] += 200.0
            before = looked[0]
            until(lambda before=before: errors or looked[0] > before + 1)
        link._socket.send_multipart([peer, last])
        link.send(peer, "settle", {"version": 7, "life": "a life", "gone": []})
        link.send(peer, "over", {"problem": ""})
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    assert errors == []
    assert store.version == 7


def test_a_further_server_says_that_it_waits_for_the_first_one() -> None:
    """And for how long, before it ends."""
    said, keys = list[str](), make_keys()
    adapter = mt.ArrayFunction(lambda *_: 0.0, {"count": numpy.zeros(8)}, mt.optim.SGD(1.0))
    patience = Patience(stall_seconds=0.5, hang_seconds=2.0, say=said.append)
    with (
        closing(WorkerLink([free_address()], keys.worker, 10**6, name="the first server")) as first,
        closing(ServerLink("127.0.0.1:*", keys, 10**6)) as own,
    ):
        store = ParameterShard(adapter, 1, 2)
        server = shard.ShardServer(own, first, store, adapter, {"server": 1}, patience, num_servers=2, name="a")
        with pytest.raises(LaunchError, match=r"^a: the first server has not been heard of .*Start the job again$"):
            server.serve()
    assert "no program listens at" in said[0]
    assert said[0].endswith("; this server waits until 2 s are over")
