"""How a served run ends for its workers."""

from __future__ import annotations

import socket
import time

import pytest
from counting import free_address, parts, playing, train_served
from hands import Served, hands, mean

import mpitrain as mt
from jobs import HANG_SECONDS


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
    monkeypatch.setattr("mpitrain.serve.farewell._FAREWELL_SECONDS", 0.1)
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
