"""What became of orders, beside what a training can be told: both find room in the record of a rank."""

from __future__ import annotations

import json

from mpitrain.training.steering import Outcomes
from mpitrain.training.tunable import Tunables
from mpitrain.watching.rank_record import MOST_STEERING_BYTES

LONG = "\U0001f600"  # as JSON, it takes 12 bytes


def test_the_newest_come_last() -> None:
    outcomes = Outcomes()
    assert json.loads(outcomes.beside({"run": 0})) == {"run": 0, "outcomes": []}
    for number in range(1, 12):
        outcomes.note(number, 1, number, True, "done")
    told = json.loads(outcomes.beside({"run": 1}))
    assert [outcome[0] for outcome in told["outcomes"]] == list(range(4, 12))


def test_the_longest_values_find_room() -> None:
    tunables, outcomes = Tunables(), Outcomes()
    for number in range(32):
        tunables.declare(f"{'x' * 58}{number:02d}", LONG * 100)
    for number in range(1, 9):
        outcomes.note(number, 1, number, False, LONG * 400)
    facts = {"run": 1, "paused": LONG * 200, "tunables": tunables.values()}
    text = outcomes.beside(facts)
    assert len(text.encode()) <= MOST_STEERING_BYTES
    told = json.loads(text)
    assert {name: value for name, value in told.items() if name != "outcomes"} == facts
    assert told["outcomes"][-1] == [8, 1, 8, False, LONG * 400]
    plain = Tunables()
    plain.declare("x", 0.5)
    assert len(json.loads(outcomes.beside({"tunables": plain.values()}))["outcomes"]) == 8
