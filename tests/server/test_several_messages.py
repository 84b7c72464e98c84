"""Messages to several servers that are wrong, or of which there are more than one message holds."""

from __future__ import annotations

import re
from contextlib import ExitStack, closing
from typing import Any

import numpy
import pytest
from counting import WorkerThreads, parts, train_served
from hands import Served, hands, lines_of, mean, next_message, of, say, two_lines

import mpitrain as mt
from free_ports import free_address
from jobs import until
from mpitrain.errors import LaunchError
from mpitrain.server import gradients, shards, wire
from mpitrain.server.parameters import ParameterShard
from mpitrain.server.security import make_keys
from mpitrain.server.server_link import ServerLink


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
    with hands(served, 1) as (worker,), lines_of(worker, served) as (line,):
        job = worker.pull()
        say(line, "push", [mean(job)[:12]], **of(worker, job))
        worker.push(job, mean(job)[:12])
        worker.end()
    served.end()
    assert set(served.counts) == {1.0}


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
    with hands(served, 5) as (long, *workers), ExitStack() as stack:
        lines = [stack.enter_context(lines_of(worker, served))[0] for worker in workers]
        job = long.pull()
        long.push(job, mean(job)[:12], note="c" * (most // 2))
        assert f"takes {most // 2 + 8} bytes as JSON; allowed are {most // 2}" in long.hear("refused").fields["text"]
        jobs = [worker.pull() for worker in workers]
        for worker, job, note, line in zip(workers, jobs, [*notes, None], lines, strict=True):
            say(line, "push", [mean(job)[:12]], **of(worker, job))
            worker.push(job, mean(job)[:12], note=note)
        for worker in workers:
            worker.end()
    served.end()
    assert set(served.counts) == {1.0}
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
    with hands(served, 2) as (wrong, right), lines_of(wrong, served) as (line,):
        job = wrong.pull()
        say(line, "push", arrays, **of(wrong, job))
        text = wrong.hear("refused").fields["text"]
        assert "the server dismisses worker 1 on hand: " in text
        assert "allowed are" in text
        again = right.pull()
        assert again.fields["begin"] == job.fields["begin"]
        say(line, "push", [mean(again)[:12]], **of(right, again))
        right.push(again, mean(again)[:12])
        right.end()
    served.end()
    assert set(served.counts) == {1.0}
