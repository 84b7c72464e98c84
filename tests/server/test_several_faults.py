"""Workers that die, repeat themselves or send what is wrong to several servers: no answer counts twice or by halves."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from typing import Any

import numpy
import pytest
from counting import NUM_SAMPLES, WorkerThreads, parts, train_served, worker_key
from hands import (
    Hand,
    Served,
    hands,
    hear,
    in_thread,
    lines_of,
    mean,
    next_message,
    of,
    push_both,
    say,
    train_once,
    trained,
    two_lines,
)

import mpitrain as mt
from free_ports import free_address
from jobs import HANG_SECONDS, clean_environment, until
from mpitrain.errors import LaunchError
from mpitrain.server import gradients, shard, shards, wire
from mpitrain.server.parameters import ParameterShard
from mpitrain.server.security import make_keys
from mpitrain.server.server_link import ServerLink
from mpitrain.server.shard import ShardServer
from mpitrain.server.wire import Message

# Gets a job, gives wrong gradients to server 1 alone, and waits for its end.
HALF = """
import sys
sys.path[:0] = sys.argv[3].split(":")
import numpy
from hands import Hand, of, push_both, train_once
from mpitrain.server.security import parse_key
import hands
hands.worker_key = lambda: parse_key(sys.argv[2], "the key")
first, second, _ = sys.argv[1].split(",")
facts = eval(sys.stdin.readline())
worker = Hand(first, facts)
worker.join()
job = worker.pull()
shard = Hand(second, facts)
shard.life = worker.life
while True:
    shard.say("pull", **of(worker, job), at_least=0, version=-1)
    if shard._link.receive(0.5) is not None:
        break
shard.say("push", numpy.full(8, 1000.0), **of(worker, job))
shard.say("pull", number=-5)  # it has no pass
shard._link.receive(60)  # the server has read the push by now
print("pushed", flush=True)
sys.stdin.read()
"""

PART = slice(8, 16)  # of server 1 of 3


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_is_killed_between_its_pushes(mode: str) -> None:
    """Its job goes to another worker, and what it has pushed to one server is in no update."""
    strategy = mt.ParameterServer(mode, unit_samples=4)  # type: ignore[arg-type]
    steps = 3 if mode == "sync" else 6
    served = Served(steps, strategy, num_servers=3)
    folders = ":".join(path for path in sys.path if path)
    half = subprocess.Popen(
        [sys.executable, "-c", HALF, ",".join(served.addresses), worker_key().text, folders],
        env=clean_environment({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert half.stdin is not None
        assert half.stdout is not None
        half.stdin.write(f"{served.facts!r}\n")
        half.stdin.flush()
        assert half.stdout.readline() == "pushed\n"
        half.send_signal(signal.SIGKILL)
    finally:
        half.kill()
        half.communicate()
    served._others.start(served.address, [parts(mt.ParameterServer(mode, unit_samples=4))])  # type: ignore[arg-type]
    served.end()
    assert served._others.errors == {}
    assert set(served.counts) == {1.0 / (8 if mode == "sync" else 4)}


def test_what_is_pushed_twice_counts_once() -> None:
    """Also where the second gradient is another one."""
    served = Served(2, mt.ParameterServer("async"), num_servers=2)
    with trained(served, 1, 2.0) as (worker,), lines_of(worker, served) as (line,):
        job = worker.pull()
        for number in range(2):
            assert job.fields["runs"] == {"float64": [[0, 12]]}
            say(line, "pull", **of(worker, job), at_least=job.fields["version"], version=-1)
            pulled = hear(line, "parameters")
            assert pulled.fields["version"] == number
            assert set(pulled.arrays[0]) == {float(number)}
            say(line, "push", [numpy.full(12, -1.0)], **of(worker, job))
            say(line, "push", [numpy.full(12, 1000.0)], **of(worker, job))
            worker.push(job, numpy.full(12, -1.0))
            if number == 0:
                job = worker.hear("unit")


def test_a_server_keeps_nothing_of_jobs_that_a_worker_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other tickets and numbers, with tokens of other jobs, of jobs that are over, and of workers that are gone."""
    made: list[ShardServer] = []
    begin = ShardServer._begin
    monkeypatch.setattr(ShardServer, "_begin", lambda self: (made.append(self), begin(self))[1])
    served = Served(2, mt.ParameterServer("async"), num_servers=2)
    gradient = numpy.full(12, 1000.0)
    with trained(served, 2, 2.0) as (worker, other), lines_of(worker, served) as (line,):
        job, lost = worker.pull(), other.pull()
        own = of(worker, job)
        wrong = [{"ticket": f"of nobody {number}"} for number in range(5)] + [{"number": 10**6}, {"number": "1"}]
        wrong += [{"ticket": other.ticket}, {"token": lost.fields["token"]}, {"token": None}, {"token": "\u00e9"}]
        for fields in wrong:
            for kind in ("push", "pull"):
                say(line, kind, [gradient] if kind == "push" else [], **{**own, **fields}, at_least=0, version=-1)
                assert "without the token of a work unit" in hear(line, "refused").fields["text"]
        say(line, "push", [gradient], **of(other, lost))
        until(lambda: served.strategy.stats.workers[1].pushed_bytes == 12 * 8)
        (shard,) = made
        assert list(shard._shard.pushes) == [(other.ticket, lost.fields["number"])]
        other.say("bye")
        until(lambda: not shard._shard.pushes)
        for number in range(2):
            say(line, "push", [-gradient / 1000.0], **of(worker, job))
            worker.push(job, numpy.full(12, -1.0))
            if number == 0:
                done, job = job, worker.hear("unit")
                for old in (of(worker, done), of(other, lost)):
                    say(line, "pull", **old, at_least=0, version=-1)
                    hear(line, "parameters")
                    say(line, "push", [gradient], **old)
                say(line, "pull", **of(worker, job), at_least=0, version=-1)
                hear(line, "parameters")
                assert not shard._shard.pushes
    # Also what was pulled and pushed for nothing: by its worker until then, and by the first server from both.
    stats = served.strategy.stats
    assert [one.bytes_in for one in stats.servers] == [2 * 12 * 8, 5 * 12 * 8]
    assert stats.workers[1].pushed_bytes == 2 * 12 * 8
    assert stats.bytes_in == sum(one.bytes_in for one in stats.servers)
    assert stats.bytes_out == sum(one.bytes_out for one in stats.servers)


def test_a_late_answer_is_dropped_by_all_servers() -> None:
    """The job of a worker that is silent goes to another one; then the silent one pushes, too."""
    served = Served(1, mt.ParameterServer("async"), hang_seconds=1.0, num_servers=2)
    with hands(served, 2) as (slow, fast), lines_of(slow, served) as (line,):
        late = slow.pull()
        fast.say("next", version=-1)
        fast.hear("unit")  # of other samples; this worker is silent, too
        until(lambda: all(one.is_overdue for one in served.strategy._server._registry.here.values()))  # type: ignore[union-attr]
        third = Hand(served.address, served.facts)
        third.join()
        job = third.pull()
        assert job.fields["begin"] == late.fields["begin"]
        push_both(slow, line, late, -1000.0)
        push_both(third, line, job, 1.0)
        for worker in (slow, fast, third):
            worker.end()
        third.close()
    served.end()
    assert set(served.counts) == {1.0}
    assert [one.dropped for one in served.strategy.stats.workers] == [1, 0, 0]


def test_an_answer_that_comes_too_late_in_parts_counts_once_and_its_worker_goes_on() -> None:
    """The first server has its part of the late answer before the update, and the other server's comes after it."""
    served = Served(2, mt.ParameterServer("sync", backup=1), num_servers=2)
    with (
        trained(served, 2, 2.0) as (slow, fast),
        lines_of(slow, served) as (late_line,),
        lines_of(fast, served) as (line,),
    ):
        late, job = slow.pull(), fast.pull()
        slow.push(late, numpy.full(12, 1000.0))
        until(lambda: served.strategy.stats.servers[0].bytes_in == 12 * 8)
        push_both(fast, line, job)
        again = slow.hear("unit")  # it has not asked again
        say(late_line, "push", [numpy.full(12, 1000.0)], **of(slow, late))
        push_both(slow, late_line, again)
    assert [one.dropped for one in served.strategy.stats.workers] == [1, 0]


def test_no_pull_overtakes_what_hooks_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way from the first server is slower than that from the worker."""
    hear_first = ShardServer._hear
    held: list[tuple[float, Message]] = []

    def slow(self: Any, seconds: float) -> Message | None:
        if held:
            return held.pop()[1] if time.monotonic() > held[0][0] else None
        message = hear_first(self, seconds)
        if message is not None and message.kind == "piece":
            held.append((time.monotonic() + 0.3, message))
            return None
        return message

    monkeypatch.setattr(ShardServer, "_hear", slow)

    class Add(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            trainer.adapter.parameters()["count"][...] += 10.0

    pulled: list[set[float]] = []

    def seeing(parameters: Any, batch: Any, on_gradient: Any) -> float:
        pulled.append({float(value) for value in parameters["count"]})
        on_gradient("count", numpy.full(NUM_SAMPLES, -1.0))
        return 1.0

    builds = [parts(mt.ParameterServer("async"), seeing) for _ in range(3)]
    trainer, others = train_served(builds[0], builds[1:2], [mt.StopAtStep(3), Add()], shard_builds=builds[2:])
    assert others.errors == {}
    assert pulled == [{0.0}, {11.0}, {22.0}]
    assert set(trainer.adapter.parameters()["count"]) == {33.0}


def test_what_is_lost_with_a_connection_is_asked_and_pushed_again() -> None:
    """Each server that ends has not answered. The last one has all."""
    keys, address = make_keys(), free_address()
    stack = ExitStack()
    lines, replica, _ = stack.enter_context(two_lines(address, keys.worker))
    pushed = threading.Event()

    def work() -> None:
        lines.pull({"number": 3, "version": 5}, {"life": "a life", "ticket": "a ticket"}, "a worker")
        lines.push({"number": 3}, [[numpy.arange(12.0)]])
        while not pushed.is_set():
            lines.resend("a worker")
            time.sleep(0.01)

    with closing(ServerLink(address, keys, 10**6)) as link:
        thread, errors = in_thread(work)
        assert next_message(link).kind == "pull"
    with closing(ServerLink(address, keys, 10**6)) as link:
        question = next_message(link)
        assert (question.kind, question.fields["number"], question.fields["at_least"]) == ("pull", 3, 5)
        answer = {"number": 3, "version": 6, "runs": {"float64": [[0, 12]]}}
        link.send(question.peer, "parameters", answer, [numpy.ones(12)])
        assert next_message(link).kind == "push"
    with closing(ServerLink(address, keys, 10**6)) as link:
        again = next_message(link)
        assert (again.kind, again.fields["number"]) == ("push", 3)
        numpy.testing.assert_array_equal(again.arrays[0], numpy.arange(12.0))
        pushed.set()
        thread.join(HANG_SECONDS)
    stack.close()
    assert errors == []
    assert replica.versions == [-1, 6]


def test_a_pull_ends_with_the_first_server() -> None:
    """Those that are started again do not know the job. The other server is there, and does not answer."""
    keys, address = make_keys(), free_address()
    pulled: list[bool] = []
    with two_lines(address, keys.worker) as (lines, _, first), closing(ServerLink(address, keys, 10**6)) as link:
        job, known = {"number": 3, "version": 5}, {"life": "a life", "ticket": "a ticket"}
        thread = threading.Thread(target=lambda: pulled.append(lines.pull(job, known, "a worker")), daemon=True)
        thread.start()
        assert next_message(link).kind == "pull"
        assert thread.is_alive()
        first.close()
        thread.join(60)
        assert pulled == [False]


def test_a_server_that_is_lost_when_all_is_fetched_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = ShardServer._fetch

    def last_words(self: Any, fields: Any, arrays: Any) -> None:
        fetch(self, fields, arrays)
        raise shard._RunOverError  # its connections end without a farewell

    monkeypatch.setattr(ShardServer, "_fetch", last_words)
    builds = [parts(mt.ParameterServer("sync")) for _ in range(3)]
    trainer, others = train_served(builds[0], builds[1:2], [mt.StopAtStep(3)], shard_builds=builds[2:])
    assert others.errors == {}
    assert set(trainer.adapter.parameters()["count"]) == {0.125}


def test_a_refused_push_ends_its_worker() -> None:
    keys, address = make_keys(), free_address()
    with two_lines(address, keys.worker) as (lines, _, _), closing(ServerLink(address, keys, 10**6)) as link:
        until(lambda: lines._links[0].receive(0.05) or lines._links[0].is_connected or link.receive(0.05))
        lines.push({"number": 3}, [[numpy.arange(12.0)]])
        link.send(next_message(link).peer, "refused", {"text": "no pass"})
        with pytest.raises(LaunchError, match="a worker: the server: no pass"):
            while True:
                lines.resend("a worker")


def test_a_worker_that_was_given_the_port_of_a_further_server() -> None:
    """It ends with a word, and nobody else notices."""
    served, lost = Served(1, mt.ParameterServer("async"), num_servers=2), WorkerThreads()
    lost.start(served.addresses[1], [parts(mt.ParameterServer("async"))])
    lost.end()
    (error,) = lost.errors.values()
    assert isinstance(error, LaunchError)
    port = served.address.rpartition(":")[2]
    remedy = f"Start the worker with the address of the first server, which listens at port {port}"
    assert re.fullmatch(rf"server 1 on \S+ gives out no work units\. {remedy}", str(error))
    train_once(served)


def test_notes_of_many_workers_are_longer_than_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, or of one worker alone, which is sent away."""
    most = 60_000
    told: list[Any] = []
    apply = ParameterShard.apply

    def seen(self: Any, gradients: Any, remarks: Any, *rest: Any) -> float:
        told.append(remarks.notes)
        return apply(self, gradients, remarks, *rest)

    monkeypatch.setattr(ParameterShard, "apply", seen)
    monkeypatch.setattr(wire, "MOST_HEADER_BYTES", most)
    monkeypatch.setattr(gradients, "MOST_HEADER_BYTES", most)
    served = Served(1, mt.ParameterServer("sync", unit_samples=2), num_servers=2)
    notes = [letter * (most // 2 - 10) for letter in "aba"]
    with trained(served, 5, 1.0) as (long, *workers), ExitStack() as stack:
        lines = [stack.enter_context(lines_of(worker, served))[0] for worker in workers]
        job = long.pull()
        long.push(job, mean(job)[:12], note="c" * (most // 2))
        assert f"takes {most // 2 + 8} bytes as JSON; allowed are {most // 2}" in long.hear("refused").fields["text"]
        jobs = [worker.pull() for worker in workers]
        for worker, job, note, line in zip(workers, jobs, [*notes, None], lines, strict=True):
            say(line, "push", [mean(job)[:12]], **of(worker, job))
            worker.push(job, mean(job)[:12], note=note)
    assert len(told) == 2
    assert sorted(map(str, told[0])) == sorted(map(str, told[1])) == sorted([*notes, "None"])
    assert told[0] == told[1]


def test_an_update_of_more_answers_than_one_message_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 8 answers, at most 3 of them in a message. All that are allowed fit, however long they are."""
    longest = ["f" * 16, 10**15, 10**6, 1.2345678901234567e-300]
    list(wire.frames(0, "answers", {"answers": [longest] * shards._MOST_ANSWERS}))
    monkeypatch.setattr(shards, "_MOST_ANSWERS", 3)
    sizes: list[int] = []
    tell = shards.Shards._tell

    def seen(self: Any, kind: str, fields: Any) -> None:
        if kind == "answers":
            sizes.append(len(fields["answers"]))
        tell(self, kind, fields)

    monkeypatch.setattr(shards.Shards, "_tell", seen)
    builds = [parts(mt.ParameterServer("sync", unit_samples=1)) for _ in range(5)]
    trainer, others = train_served(builds[0], builds[1:3], [mt.StopAtStep(6)], shard_builds=builds[3:])
    assert others.errors == {}
    assert sizes == [3, 3, 2] * 6
    assert set(trainer.adapter.parameters()["count"]) == {2 / 8}


@pytest.mark.parametrize("arrays", [[], [numpy.zeros(12, "float32")], [numpy.zeros(24)]])
def test_a_wrong_part_sends_its_worker_away(arrays: Any) -> None:
    served = Served(1, mt.ParameterServer("async"), num_servers=2)
    with trained(served, 2, 1.0) as (wrong, right), lines_of(wrong, served) as (line,):
        job = wrong.pull()
        say(line, "push", arrays, **of(wrong, job))
        text = wrong.hear("refused").fields["text"]
        assert "the server dismisses worker 1 on hand: " in text
        assert "allowed are" in text
        again = right.pull()
        assert again.fields["begin"] == job.fields["begin"]
        push_both(right, line, again)
