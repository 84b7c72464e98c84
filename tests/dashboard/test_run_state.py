"""In which state a run is, from what its record and its launcher say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from records_made import DOCUMENT

from mpitrain.dashboard.differences import differences
from mpitrain.dashboard.run_state import state_of

OPEN = dataclasses.replace(DOCUMENT, end="", ended=None)


def look(
    state: str = "trains", phases: tuple[str, ...] = ("computes", "waits"), still: float = 0.0, **more: Any
) -> dict[str, Any]:
    ranks = [{"rank": rank, "phase": phase, "still": still} for rank, phase in enumerate(phases)]
    return {"state": state, "ranks": ranks, "stall": None, **more}


@pytest.mark.parametrize(
    ("document", "live", "is_alive", "age", "state", "why"),
    [
        (DOCUMENT, None, False, 1e6, "done", "all steps were made"),
        (dataclasses.replace(DOCUMENT, end="DataError: no"), None, False, 1e6, "failed", "DataError: no"),
        (dataclasses.replace(DOCUMENT, end="left"), None, False, 9.0, "lost", "another try was to go on with it"),
        (OPEN, None, True, 1e6, "trains", "rank 0 is alive on nowhere"),
        (OPEN, None, False, 59.0, "trains", "the last row is 59 s old"),
        (OPEN, None, False, 7300.0, "lost", "the last row is 2 h old"),
        (None, None, False, 3.0, "trains", "the last row is 3 s old"),
        (None, None, False, 600.0, "unknown", "no run.json; the last row is 10 min old"),
        (OPEN, look(), False, 1e6, "trains", ""),
        (OPEN, look("restarts"), True, 0.0, "restarts", ""),
        (OPEN, look(phases=("waits", "stopped")), True, 0.0, "stalled", "rank 1 stopped"),
        (OPEN, look(stall="ranks 0-1 wait", still=10.0), True, 0.0, "stalled", "ranks 0-1 wait"),
        (OPEN, look(stall="ranks 0-1 wait", still=9.9), True, 0.0, "trains", ""),
        (OPEN, look("ends", ended={"code": 0, "text": "it has ended"}), True, 0.0, "done", "it has ended"),
        (OPEN, look("ends", ended={"code": 1, "text": "exit code 1"}), True, 0.0, "failed", "exit code 1"),
        (OPEN, look("ends", ended={"code": None, "text": "interrupted"}), True, 0.0, "failed", "interrupted"),
        (OPEN, look(paused="paused by ada on a"), True, 0.0, "paused", "by ada on a"),
        (OPEN, look("starts", paused="paused by ada on a"), True, 0.0, "paused", "by ada on a"),
        (OPEN, look("ends", paused="paused by ada on a"), True, 0.0, "ends", ""),
        (OPEN, look(phases=("busy", "stopped"), paused="paused by ada"), True, 0.0, "stalled", "rank 1 stopped"),
        (OPEN, look(paused=""), True, 0.0, "trains", ""),
        (OPEN, look("a new state"), True, 0.0, "a new state", ""),
    ],
)
def test_states(document: Any, live: Any, is_alive: bool, age: float, state: str, why: str) -> None:
    found = state_of(document, live, is_alive=is_alive, age_seconds=age)
    assert found[0] == state
    assert why in found[1] and bool(why) == bool(found[1])


def test_what_differs() -> None:
    other = dataclasses.replace(
        DOCUMENT,
        arguments=["--lr", "0.2"],
        settings={"algorithm": "ring"},
        packages={"numpy": "2.0.0", "torch": "2.13"},
        is_changed=True,
        hosts={"a": [0, 1]},
        started=5.0,
    )
    assert differences([DOCUMENT, other]) == [
        {"name": "arguments", "values": ["--lr 0.1", "--lr 0.2"]},
        {"name": "commit", "values": ["0123abcd", "0123abcd and changes"]},
        {"name": "ranks", "values": ["3", "2"]},
        {"name": "hosts", "values": ["a: 2, b: 1", "a: 2"]},
        {"name": "setting algorithm", "values": [None, "ring"]},
        {"name": "package torch", "values": [None, "2.13"]},
    ]
    assert differences([DOCUMENT, DOCUMENT]) == differences([]) == differences([None]) == []
    assert {"name": "script", "values": ["train.py", None]} in differences([DOCUMENT, None])
