"""Orders to a training, as its launcher handles them: one at a time, and those that last for the next attempt."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from jobs import until
from mpitrain.launch.orders import Orders
from mpitrain.watching.order import TrainingOrder
from mpitrain.watching.rank_record import RankRecord

TELLER = "ada on lab1"


class Ranks:
    """A stand-in for the agents of an attempt with two ranks: the test says what rank 0 publishes."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.steering = self.steering_of_1 = ""

    def publish(self, run: int, *outcomes: tuple[int, int, int, bool, str]) -> None:
        self.steering = json.dumps({"run": run, "outcomes": outcomes})

    def records(self) -> dict[int, RankRecord]:
        second = RankRecord(1, facts={"step": 7}, steering=self.steering_of_1)
        return {0: RankRecord(0, facts={"step": 8}, steering=self.steering), 1: second}

    def lost(self) -> set[int]:
        return set()

    def give(self, order: Mapping[str, Any]) -> None:
        if order not in self.given:
            self.given.append(dict(order))

    def stacks(self) -> list[str]:
        return ["rank 0 on a runs", "rank 1 on a sleeps"]


class Told:
    """The orders of a job whose ranks are in run 1, and the answers to those who told it something."""

    def __init__(self) -> None:
        self.orders, self.ranks, self.answers = Orders(), Ranks(), list[Any]()
        self._tellers: list[threading.Thread] = []
        self.orders.lead(self.ranks)
        self.ranks.publish(1)
        self.look()

    def look(self, ranks: Ranks | None = None) -> None:
        self.orders.look(ranks or self.ranks)

    def tell(self, kind: str, value: str = "", name: str = "") -> None:
        """Somebody tells it this, and the launcher has heard it."""
        order, num_given = {"kind": kind, "value": value, "name": name}, len(self.orders._given)
        thread = threading.Thread(target=lambda: self.answers.append(self.orders.answer(order, TELLER)), daemon=True)
        thread.start()
        self._tellers.append(thread)
        until(lambda: len(self.orders._given) > num_given)
        self.look()

    def answer(self, **order: str) -> dict[str, Any]:
        return self.orders.answer(order, TELLER)

    def apply(self, run: int, *outcomes: tuple[int, int, int, bool, str]) -> None:
        self.ranks.publish(run, *outcomes)
        self.look()

    def answered(self) -> list[Any]:
        """All answers, as soon as they are there."""
        for thread in self._tellers:
            thread.join()
        return self.answers

    def numbers(self) -> list[int]:
        return [order["number"] for order in self.ranks.given]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr("mpitrain.launch.orders._BEGIN_SECONDS", 0.1)
    return Told()


def test_one_order_at_a_time_and_those_that_last(job: Told) -> None:
    job.tell("rate", "0.5")
    job.tell("set", "0.2", "dropout")
    job.tell("save")
    assert job.numbers() == [1]
    job.apply(1, (1, 1, 8, True, "the learning rate"))
    until(lambda: job.answers)
    assert job.answers == [{"accepted": "the learning rate, applied after step 8", "step": 8}]
    assert job.numbers() == [1, 2]
    first, _ = job.ranks.given
    assert TrainingOrder.of_plain(first).value == "0.5"
    job.apply(1, (1, 1, 8, True, "the learning rate"), (2, 1, 9, True, "second"))
    job.apply(1, (3, 1, 10, True, "third"))
    assert len(job.answered()) == 3
    rate, dropout = [TrainingOrder.of_plain(fields) for fields in json.loads(job.orders.replay())]
    assert (dropout.kind, dropout.run) == ("set", 1)
    assert rate == TrainingOrder(first["of"], 1, "rate", TELLER, rate.at, "", "0.5", 8, 1)


def test_an_order_that_no_step_has_applied_waits_for_the_next_try(job: Told) -> None:
    before, job.ranks = job.ranks, Ranks()
    job.orders.look(before)
    job.tell("pause")
    job.look(before)
    assert before.given
    assert job.orders.replay() == ""
    job.orders.lead(job.ranks)
    job.look()
    assert job.ranks.given == before.given
    job.ranks.publish(1, (1, 1, 3, True, "paused"))
    job.look(before)  # its thread may look once more
    assert job.answers == []
    job.look()
    assert job.answered() == [{"accepted": "paused, applied after step 3", "step": 3}]


@pytest.mark.parametrize("ends", ["the run of its Trainer has ended", "the job has ended"])
def test_an_order_at_the_end(job: Told, ends: str) -> None:
    job.tell("save")
    assert job.ranks.given
    if "Trainer" in ends:
        job.apply(0)
    else:
        job.orders.close()
    assert job.answered() == [{"refused": ends}]


def test_what_is_refused_at_once(job: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, ranks = Orders(), Ranks()
    assert fresh.answer({"kind": "stacks"}, TELLER) == {"refused": "it has no ranks now"}
    fresh.lead(ranks)
    assert fresh.answer({"kind": "stacks"}, TELLER) == {"accepted": "rank 0 on a runs\nrank 1 on a sleeps"}
    fresh.look(ranks)
    for kind in ("list", "pause"):
        assert "no mt.Trainer runs in it now" in fresh.answer({"kind": kind}, TELLER)["refused"]
    assert Orders("it has servers").answer({"kind": "pause"}, TELLER) == {"refused": "it has servers"}
    assert "there is no order 'dance'" in job.answer(kind="dance")["refused"]
    for value in ("b" * 4000, "\1" * 900, "\u00fc" * 800):  # in the record of a rank, the last two take 6 bytes each
        told = job.answer(kind="set", name="x", value=value)
        assert re.match(r"the order takes \d+ bytes, and 4000 are allowed", told["refused"])
    monkeypatch.setattr("mpitrain.launch.orders.ANSWER_SECONDS", 0.01)
    late = job.answer(kind="pause")
    assert late["refused"].startswith("not applied within 0.01 s: step 8 has not ended. The order stays")
    for _ in range(499):
        job.answer(kind="pause")
    assert "it was told 500 things that last" in job.answer(kind="resume")["refused"]


def test_an_order_does_not_overwrite_one_that_a_rank_has_not_obeyed(job: Told) -> None:
    """Ranks 0 and 1 train apart from each other."""
    job.ranks.steering_of_1 = job.ranks.steering
    job.tell("pause")
    job.apply(1, (1, 1, 8, True, "paused"))
    job.answered()
    job.tell("resume")
    assert job.numbers() == [1]
    job.ranks.steering_of_1 = job.ranks.steering
    job.look()
    assert job.numbers() == [1, 2]
    job.orders.close()
    job.answered()


def test_a_torn_text_is_left_out(job: Told) -> None:
    whole = job.ranks.steering
    job.ranks.steering = whole[:-3]
    job.look()
    assert job.answer(kind="list")["can"] == json.loads(whole)


def test_the_next_try_hears_of_a_stop(job: Told) -> None:
    job.tell("stop")
    job.apply(0, (1, 1, 8, True, "the run ends"))
    job.answered()
    (replayed,) = json.loads(job.orders.replay())
    assert (replayed["kind"], replayed["after_step"], replayed["run"]) == ("stop", 8, 1)


def test_what_lasts_fits_into_a_variable(job: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel allows 128 KiB for one. What was refused does not count."""
    monkeypatch.setattr("mpitrain.launch.orders.ANSWER_SECONDS", 0.0)
    told = {"kind": "set", "name": "x", "value": "\u4e2d" * 100}
    for _ in range(1, 1000):
        if not job.answer(**told)["refused"].startswith("not applied within"):
            break
    assert len(job.orders._given) < 500
    for given in job.orders._given:
        given.run, given.after_step, given.is_applied, given.outcome = 1, 10**9, True, "x is"
    assert 110_000 < len(f"MPITRAIN_ORDERS={job.orders.replay()}") < 128 * 1024
    assert "things that last" in job.answer(**told)["refused"]
    assert job.answer(kind="stop")["refused"].startswith("not applied within")
    for given in job.orders._given:
        given.is_applied = False
    assert job.answer(**told)["refused"].startswith("not applied within")
