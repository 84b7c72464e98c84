"""What became of the orders that came to this process: the launcher reads it a while later (launch/orders.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mpitrain.watching.rank_record import MOST_STEERING_BYTES

_MOST = 8


class Outcomes:
    """The newest outcomes, whichever run of the script had the orders.

    Attributes:
        newest: number, run, step, whether the order was applied, and words. The oldest comes first.
        num_heard: the number of the newest order that a run has obeyed, or that none will obey.
    """

    def __init__(self) -> None:
        self.newest: list[tuple[int, int, int, bool, str]] = []
        self.num_heard = 0

    def note(self, number: int, run: int, step: int, is_applied: bool, words: str) -> None:
        """Note what became of an order."""
        self.newest = [*self.newest[1 - _MOST :], (number, run, step, is_applied, words)]

    def beside(self, facts: Mapping[str, Any]) -> str:
        """Return the facts and as many of the newest outcomes as find room in the record of a rank, as JSON."""
        text = ""
        for first in range(max(1, len(self.newest))):
            text = json.dumps({**facts, "outcomes": self.newest[first:]})
            if len(text) <= MOST_STEERING_BYTES:
                break
        return text


OUTCOMES = Outcomes()
