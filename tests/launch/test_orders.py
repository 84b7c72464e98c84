"""Orders to a training, as its launcher handles them: one at a time, and those that last for the next try."""

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


class Ranks:
    """A stand-in for the guards of a try with two ranks: the test says what rank 0 publishes."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.steering = self.steering_of_1 = ""

    def publish(self, run: int, *outcomes: tuple[int, int, int, bool, str]) -> None:
        self.steering = json.dumps({"run": run, "outcomes": outcomes})

    def records(self) -> dict[int, RankRecord]:
        second = RankRecord(1, step=7, steering=self.steering_of_1)
        return {0: RankRecord(0, step=8, steering=self.steering), 1: second}

    def lost(self) -> set[int]:
        return set()

    def give(self, order: Mapping[str, Any]) -> None:
        if order not in self.given:
            self.given.append(dict(order))

    def stacks(self) -> list[str]:
        return ["rank 0 on a runs", "rank 1 on a sleeps"]


@pytest.fixture(autouse=True)
def _no_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.launch.orders._BEGIN_SECONDS", 0.1)


def tell(orders: Orders, answers: list[Any], kind: str, value: str = "", name: str = "") -> threading.Thread:
    order = {"kind": kind, "value": value, "name": name}
    thread = threading.Thread(target=lambda: answers.append(orders.answer(order, "ada on lab1")), daemon=True)
    thread.start()
    return thread


def test_one_order_at_a_time_and_those_that_last() -> None:
    orders, ranks, answers = Orders(), Ranks(), list[Any]()
    orders.lead(ranks)
    ranks.publish(1)
    orders.look(ranks)
    first = tell(orders, answers, "rate", "0.5")
    until(lambda: orders.look(ranks) or ranks.given)
    second = tell(orders, answers, "set", "0.2", "dropout")
    until(lambda: len(orders._given) == 2)
    third = tell(orders, answers, "save")
    until(lambda: len(orders._given) == 3)
    orders.look(ranks)
    assert [order["number"] for order in ranks.given] == [1]
    ranks.publish(1, (1, 1, 8, True, "the learning rate"))
    orders.look(ranks)
    first.join()
    assert answers == [{"accepted": "the learning rate, applied after step 8", "step": 8}]
    assert [order["number"] for order in ranks.given] == [1, 2]
    by_number = {order["number"]: order for order in ranks.given}
    assert TrainingOrder.of_plain(by_number[1]).value == "0.5"
    ranks.publish(1, (1, 1, 8, True, "the learning rate"), (2, 1, 9, True, "second"))
    orders.look(ranks)
    ranks.publish(1, (3, 1, 10, True, "third"))
    orders.look(ranks)
    second.join()
    third.join()
    replayed = [TrainingOrder.of_plain(fields) for fields in json.loads(orders.replay())]
    assert [(order.kind, order.run) for order in replayed] == [("rate", 1), ("set", 1)]
    assert replayed[0] == TrainingOrder(by_number[1]["of"], 1, "rate", "ada on lab1", replayed[0].at, "", "0.5", 8, 1)


def test_an_order_that_no_step_has_applied_waits_for_the_next_try() -> None:
    orders, before, after, answers = Orders(), Ranks(), Ranks(), list[Any]()
    orders.lead(before)
    before.publish(1)
    orders.look(before)
    teller = tell(orders, answers, "pause")
    until(lambda: orders.look(before) or before.given)
    assert orders.replay() == ""
    orders.lead(after)
    orders.look(after)
    assert after.given == before.given
    after.publish(1, (1, 1, 3, True, "paused"))
    orders.look(before)  # its thread may look once more
    assert answers == []
    orders.look(after)
    teller.join()
    assert answers == [{"accepted": "paused, applied after step 3", "step": 3}]


@pytest.mark.parametrize("ends", ["the run of its Trainer has ended", "the job has ended"])
def test_an_order_at_the_end(ends: str) -> None:
    orders, ranks, answers = Orders(), Ranks(), list[Any]()
    orders.lead(ranks)
    ranks.publish(1)
    orders.look(ranks)
    teller = tell(orders, answers, "save")
    until(lambda: orders.look(ranks) or ranks.given)
    if "Trainer" in ends:
        ranks.publish(0)
        orders.look(ranks)
    else:
        orders.close()
    teller.join()
    assert answers == [{"refused": ends}]


def test_what_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    orders, ranks = Orders(), Ranks()
    assert orders.answer({"kind": "stacks"}, "ada on lab1") == {"refused": "it has no ranks now"}
    orders.lead(ranks)
    assert orders.answer({"kind": "stacks"}, "ada on lab1") == {"accepted": "rank 0 on a runs\nrank 1 on a sleeps"}
    orders.look(ranks)
    for kind in ("list", "pause"):
        assert "no mt.Trainer runs in it now" in orders.answer({"kind": kind}, "ada on lab1")["refused"]
    ranks.publish(1)
    orders.look(ranks)
    assert "there is no order 'dance'" in orders.answer({"kind": "dance"}, "ada on lab1")["refused"]
    for value in ("b" * 4000, "\1" * 900, "\u00fc" * 800):  # in the record of a rank, the last two take 6 bytes each
        told = orders.answer({"kind": "set", "name": "x", "value": value}, "ada on lab1")
        assert re.match(r"the order takes \d+ bytes, and 4000 are allowed", told["refused"])
    monkeypatch.setattr("mpitrain.launch.orders.ANSWER_SECONDS", 0.01)
    late = orders.answer({"kind": "pause"}, "ada on lab1")
    assert late["refused"].startswith("not applied within 0.01 s: step 8 has not ended. The order stays")
    for _ in range(499):
        orders.answer({"kind": "pause"}, "ada on lab1")
    assert "it was told 500 things that last" in orders.answer({"kind": "resume"}, "ada on lab1")["refused"]
    served = Orders("it has servers")
    assert served.answer({"kind": "pause"}, "ada on lab1") == {"refused": "it has servers"}


def test_an_order_does_not_overwrite_one_that_a_rank_has_not_obeyed() -> None:
    """Ranks 0 and 1 train apart from each other."""
    orders, ranks, answers = Orders(), Ranks(), list[Any]()
    orders.lead(ranks)
    ranks.publish(1)
    ranks.steering_of_1 = ranks.steering
    orders.look(ranks)
    first = tell(orders, answers, "pause")
    until(lambda: orders.look(ranks) or ranks.given)
    ranks.publish(1, (1, 1, 8, True, "paused"))
    orders.look(ranks)
    first.join()
    second = tell(orders, answers, "resume")
    until(lambda: len(orders._given) == 2)
    orders.look(ranks)
    assert [order["number"] for order in ranks.given] == [1]
    ranks.steering_of_1 = ranks.steering
    orders.look(ranks)
    assert [order["number"] for order in ranks.given] == [1, 2]
    orders.close()
    second.join()


def test_a_torn_text_is_left_out() -> None:
    orders, ranks = Orders(), Ranks()
    orders.lead(ranks)
    ranks.publish(1)
    whole = ranks.steering
    orders.look(ranks)
    ranks.steering = whole[:-3]
    orders.look(ranks)
    assert orders.answer({"kind": "list"}, "ada on lab1")["can"] == json.loads(whole)


def test_the_next_try_hears_of_a_stop() -> None:
    orders, ranks, answers = Orders(), Ranks(), list[Any]()
    orders.lead(ranks)
    ranks.publish(1)
    orders.look(ranks)
    teller = tell(orders, answers, "stop")
    until(lambda: orders.look(ranks) or ranks.given)
    ranks.publish(0, (1, 1, 8, True, "the run ends"))
    orders.look(ranks)
    teller.join()
    (replayed,) = json.loads(orders.replay())
    assert (replayed["kind"], replayed["after_step"], replayed["run"]) == ("stop", 8, 1)


def test_what_lasts_fits_into_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel allows 128 KiB for one. What was refused does not count."""
    monkeypatch.setattr("mpitrain.launch.orders.ANSWER_SECONDS", 0.0)
    orders, ranks = Orders(), Ranks()
    orders.lead(ranks)
    ranks.publish(1)
    orders.look(ranks)
    told = {"kind": "set", "name": "x", "value": "\u4e2d" * 100}
    for _ in range(1, 1000):
        if not orders.answer(told, "ada on lab1")["refused"].startswith("not applied within"):
            break
    number = len(orders._given)
    assert number < 500
    for given in orders._given:
        given.run, given.after_step, given.is_applied, given.outcome = 1, 10**9, True, "x is"
    assert 110_000 < len(f"MPITRAIN_ORDERS={orders.replay()}") < 128 * 1024
    assert "things that last" in orders.answer(told, "ada on lab1")["refused"]
    assert orders.answer({"kind": "stop"}, "ada on lab1")["refused"].startswith("not applied within")
    for given in orders._given:
        given.is_applied = False
    assert orders.answer(told, "ada on lab1")["refused"].startswith("not applied within")
