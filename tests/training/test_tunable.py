"""Tunable values: what may be declared and set, what a state brings back, and what became of orders."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.training.steering import Outcomes, checked_factor
from mpitrain.training.tunable import Tunables
from mpitrain.watching.rank_record import MOST_STEERING_BYTES


@pytest.mark.parametrize(
    ("default", "text", "value"),
    [
        (0.1, "0.2", 0.2),
        (0.1, "3", 3.0),
        (0.1, "-1e-3", -0.001),
        (2, "-7", -7),
        (True, "off", False),
        (False, "TRUE", True),
        ("first", "a b=c", "a b=c"),
        ("first", "", ""),
    ],
)
def test_a_value_has_the_type_of_its_default(default: Any, text: str, value: Any) -> None:
    tunables = Tunables()
    one = tunables.declare("x", default)
    assert tunables.set("x", text) == one.value == value
    assert type(one.value) is type(default)
    assert tunables.values() == tunables.told() == {"x": value}


@pytest.mark.parametrize(
    ("default", "text"),
    [(0.1, "much"), (0.1, "inf"), (0.1, "nan"), (2, "2.0"), (2, "true"), (True, "2"), (True, ""), ("a", "b" * 101)],
)
def test_another_value_is_refused(default: Any, text: str) -> None:
    tunables = Tunables()
    one = tunables.declare("x", default)
    with pytest.raises(ConfigError, match=r"x=.*: allowed is .*x stays "):
        tunables.set("x", text)
    assert one.value == default
    assert tunables.told() == {}


def test_an_unknown_name_is_refused() -> None:
    tunables = Tunables()
    with pytest.raises(ConfigError, match="the script has declared none"):
        tunables.set("x", "1")
    tunables.declare("dropout", 0.1)
    with pytest.raises(ConfigError, match=r"there is no tunable x; declared are dropout \(0\.1\)"):
        tunables.set("x", "1")


@pytest.mark.parametrize(
    ("call", "values", "text"),
    [
        (lambda name: Tunables().declare(name, 0.1), ["", "1x", "a b", "a=b", "a/b", "a" * 61], "allowed is a name"),
        (
            lambda default: Tunables().declare("x", default),
            [math.inf, math.nan, None, [1], "a" * 101, 10**100],
            "allowed are True, False, an integer",
        ),
        (
            checked_factor,
            ["0", "-1", "inf", "nan", "half", "x", "", "0.5 x 2"],
            "allowed is a finite number above 0",
        ),
    ],
    ids=["name", "default", "factor"],
)
def test_what_is_not_allowed(call: Any, values: list[Any], text: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=text):
            call(value)


def test_a_factor_of_the_learning_rate() -> None:
    assert [checked_factor(text) for text in ("0.5", "0.5x", "2", "1e-3x")] == [0.5, 0.5, 2.0, 0.001]


def test_a_repeated_declaration() -> None:
    """`build` may be called again, for another World."""
    tunables = Tunables()
    one = tunables.declare("x", 1)
    tunables.set("x", "2")
    assert tunables.declare("x", 1) is one
    for other in (2, 1.0, True):
        with pytest.raises(ConfigError, match="it was declared with the default 1"):
            tunables.declare("x", other)
    assert one.value == 2


def test_too_many() -> None:
    tunables = Tunables()
    for number in range(32):
        tunables.declare(f"x{number}", "a" * 100)
    with pytest.raises(ConfigError, match="at most 32 names"):
        tunables.declare("y", 1)
    assert len(json.dumps(tunables.values())) < 4000  # with the rest, it fits into the record of a rank


def test_a_state_and_back() -> None:
    """A name may be declared after its value has come back, and a name that was never set has its default."""
    tunables = Tunables()
    early, other = tunables.declare("early", 0.1), tunables.declare("other", 1)
    tunables.set("other", "5")
    tunables.restore({"early": 0.3, "late": "b"})
    assert (early.value, other.value) == (0.3, 1)
    assert tunables.declare("late", "a").value == "b"
    assert tunables.told() == {"early": 0.3, "late": "b"}
    with pytest.raises(CheckpointError, match="early=1, and the script declares"):
        tunables.restore({"late": "c", "early": 1})
    assert (early.value, tunables.declare("late", "a").value) == (0.3, "b")


def test_a_declaration_with_another_type_than_in_the_state() -> None:
    tunables = Tunables()
    tunables.restore({"x": 0.3})
    with pytest.raises(CheckpointError, match=r"x=0\.3, and the script declares tunable\('x', 1\)"):
        tunables.declare("x", 1)


def test_a_declaration_is_told() -> None:
    calls: list[dict[str, Any]] = []
    tunables = Tunables()
    tunables.changed = lambda: calls.append(tunables.values())
    tunables.declare("x", 1)
    tunables.declare("x", 1)
    assert calls == [{"x": 1}]


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
