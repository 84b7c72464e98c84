"""How a served run ends for its workers."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

import pytest
from counting import parts, playing, train_served
from hands import Hand, Served, hands, mean

import mpitrain as mt
from free_ports import free_address
from jobs import HANG_SECONDS
from mpitrain.server.wire import MOST_HEADER_BYTES


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
    with hands(served, 2) as (slow, fast):
        late = slow.pull()
        job = fast.pull()
        fast.push(job, mean(job))
        fast.end()
        time.sleep(2.0)  # far more than the farewell of those that wait
        slow.push(late, mean(late))
        slow.end()
    served.end()
    assert set(served.counts) == {1.0}


def test_peers_that_say_more_than_can_be_said_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """As much as a header may hold, which is longer when it is shown. The server goes on with others."""
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
