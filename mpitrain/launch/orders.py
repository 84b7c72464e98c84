"""Orders to a training that runs (`mpitrain tell`): the launcher numbers them, and hears what became of each.

    teller ─> launcher: {"order": ...} ─> agents ─> records of the ranks ─> training/steering.py
    teller <─ launcher <─ agents <─ records: "outcomes"

The ranks have one order at a time: the next one goes to them when all have said what became of the one before. Orders
belong to the job, and not to an attempt. An attempt that follows gets those that last with the steps after which they
were applied, so that it applies them after the same steps.

A thread of each teller waits here, and the thread of the agents (watch.py) looks.
"""

from __future__ import annotations

import json
import pwd
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mpitrain.watching.order import KINDS, TrainingOrder
from mpitrain.watching.rank_record import MOST_ORDER_BYTES, RankRecord, read_steering

_LASTING = ("rate", "set", "pause", "resume", "stop")  # the last one ends a run, so there is always room for it
# The next attempt gets those that last in a variable of its environment, and the kernel allows 128 KiB for one.
_MOST_LASTING, _MOST_LASTING_BYTES = 500, 120_000
_APPLIED_BYTES = 40  # of the step and the run, which come to an order when it is applied
ANSWER_SECONDS = 30.0
# So long an order waits for a training that is about to begin.
_BEGIN_SECONDS = 5.0


class Led(Protocol):
    """The attempt that trains (watch.py)."""

    def records(self) -> dict[int, RankRecord]:
        """Return the last record of each rank."""

    def lost(self) -> set[int]:
        """Return the ranks that were lost, and without which the others continue."""

    def give(self, order: Mapping[str, Any]) -> None:
        """Pass an order on to all ranks, once."""

    def stacks(self) -> list[str]:
        """Return what every rank does now, with its stack, line by line."""


@dataclass
class _Given:
    """An order, and what became of it."""

    order: TrainingOrder
    num_bytes: int
    is_applied: bool = False
    outcome: str = ""  # "": it is not known yet

    @property
    def may_last(self) -> bool:
        """True if the next attempt gets it, or may yet."""
        return self.order.kind in _LASTING and (self.is_applied or not self.outcome)


class Orders:
    """The orders of one job. `answer` is for tellers."""

    def __init__(self, why_not: str = "") -> None:
        """`why_not`: why this job takes no orders at all; "": it may."""
        self._why_not = why_not
        self._of = secrets.token_hex(4)
        self._given: list[_Given] = []
        self._can: dict[str, Any] = {}  # what the ranks of this attempt have published
        self._text = ""
        self._passed = 0  # the number of the newest order that the ranks of this attempt have
        self._attempt: Led | None = None
        self._changed = threading.Condition()
        self._is_closed = False

    def close(self) -> None:
        """The job is over: answer who still waits."""
        with self._changed:
            self._settle("the job has ended")
            self._is_closed = True
            self._changed.notify_all()

    def lead(self, attempt: Led) -> None:
        """The ranks that train are those of this attempt from now on."""
        with self._changed:
            self._attempt, self._can, self._text, self._passed = attempt, {}, "", 0

    def look(self, attempt: Led) -> None:
        """Take in what the ranks have published, and pass the next order on to them. The thread of the agents calls."""
        lost = attempt.lost()
        texts = {rank: record.steering for rank, record in attempt.records().items() if rank not in lost}
        text = next((texts[rank] for rank in sorted(texts) if texts[rank]), "")
        with self._changed:
            if attempt is not self._attempt:
                return
            if text and text != self._text and (can := read_steering(text)):
                self._text, self._can = text, can
                self._take(can)
            pending = next((one for one in self._given if not one.outcome), None)
            if pending is not None and pending.order.number != self._passed:
                if not all(_is_done(text, self._passed) for text in set(texts.values())):  # it would overwrite that one
                    return
                self._passed = pending.order.number
        if pending is not None:
            attempt.give(pending.order.plain())

    def _take(self, can: Mapping[str, Any]) -> None:
        for number, run, step, is_applied, outcome in can["outcomes"]:
            given = self._given[number - 1]
            if not given.outcome:
                given.order = replace(given.order, run=run, after_step=step)
                given.is_applied, given.outcome = is_applied, outcome
        if not can["run"]:
            self._settle("the run of its Trainer has ended")
        self._changed.notify_all()

    def _settle(self, outcome: str) -> None:
        for given in self._given:
            given.outcome = given.outcome or outcome

    @property
    def has_stopped(self) -> bool:
        """True if the ranks have ended a training and saved it, because they were told to."""
        with self._changed:
            return any(one.order.kind == "stop" and one.is_applied for one in self._given)

    def replay(self) -> str:
        """Return the orders that last, for the next attempt, as JSON; "": there are none."""
        with self._changed:
            lasting = [one.order.plain() for one in self._given if one.is_applied and one.may_last]
        return json.dumps(lasting) if lasting else ""

    def answer(self, order: Mapping[str, Any], teller: str) -> dict[str, Any]:
        """Answer what somebody tells the job: one of KINDS, "stacks", or "list". Waits for what becomes of it.

        Args:
            order: {"kind", "name", "value"}; see watching/order.py.
            teller: the user and the host.

        Return {"accepted": text}, {"refused": text} or {"can": what the ranks have published, "step": number}.
        """
        kind = str(order.get("kind"))
        if kind == "stacks":
            return self._stacks()
        if kind not in (*KINDS, "list"):
            return {"refused": f"there is no order {kind!r}; known are {', '.join(KINDS)}, stacks and list"}
        if self._why_not:
            return {"refused": self._why_not}
        if not self._await(lambda: bool(self._can.get("run")), _BEGIN_SECONDS):
            return {
                "refused": "no mt.Trainer runs in it now, and orders are for one. If its training is about to begin, "
                "try again in a moment"
            }
        if kind == "list":
            with self._changed:
                return {"can": self._can, "step": self._step()}
        return self._give(kind, str(order.get("name", "")), str(order.get("value", "")), teller)

    def _give(self, kind: str, name: str, value: str, teller: str) -> dict[str, Any]:
        with self._changed:
            order = TrainingOrder(self._of, len(self._given) + 1, kind, teller, time.time(), name, value)
            given = _Given(order, num_bytes=len(json.dumps(order.plain())))
            if given.num_bytes > MOST_ORDER_BYTES:
                return {
                    "refused": f"the order takes {given.num_bytes} bytes, and {MOST_ORDER_BYTES} are allowed; a "
                    "character that is not ASCII takes up to 12. Give a shorter name or value"
                }
            lasting = [one for one in [*self._given, given] if one.may_last]
            size = sum(one.num_bytes + _APPLIED_BYTES for one in lasting)
            if kind in _LASTING[:-1] and (len(lasting) > _MOST_LASTING or size > _MOST_LASTING_BYTES):
                return {
                    "refused": f"it was told {len(lasting) - 1} things that last; with this one they take {size} "
                    f"bytes. At most {_MOST_LASTING} of {_MOST_LASTING_BYTES} bytes together hold after a restart"
                }
            self._given.append(given)
        if not self._await(lambda: bool(given.outcome), ANSWER_SECONDS):
            return {
                "refused": f"not applied within {ANSWER_SECONDS:g} s: step {self._step()} has not ended. The order "
                f"stays: it is applied after the step. {self._doing()}".rstrip()
            }
        if given.is_applied:
            step = given.order.after_step
            return {"accepted": f"{given.outcome}, applied after step {step}", "step": step}
        return {"refused": given.outcome}

    def _await(self, test: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: test() or self._is_closed, seconds)
            return test()

    def _step(self) -> int:
        records = self._attempt.records() if self._attempt is not None else {}
        # An attempt that begins in a pause has not begun a step.
        return max([record.step for record in records.values()] + [int(self._can.get("step", 0))])

    def _doing(self) -> str:
        """What the ranks wait in, or are busy with."""
        records = self._attempt.records() if self._attempt is not None else {}
        words = [f"rank {rank}: {record.words}" for rank, record in sorted(records.items()) if record.words]
        return f"Now {words[0]}" if words else ""

    def _stacks(self) -> dict[str, Any]:
        attempt = self._attempt
        if attempt is None or not attempt.records():
            return {"refused": "it has no ranks now"}
        return {"accepted": "\n".join(attempt.stacks())}


def _is_done(text: str, number: int) -> bool:
    """True if a rank that has published this waits for no order, or says what became of this one."""
    can = read_steering(text) if text and number else {}
    return not can.get("run") or any(outcome[0] == number for outcome in can["outcomes"])


def teller_name(uid: int, host: str) -> str:
    """The user and the place of who tells something, such as "ada on lab1", or "ada on the dashboard of lab1"."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"user {uid}"
    shown = "".join(letter for letter in host if letter.isprintable())[:100]
    return f"{name} on {shown}"
