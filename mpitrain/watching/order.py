"""A command to a running training, as it comes from the launcher (launch/orders.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mpitrain.reading import shown
from mpitrain.typed import made

KINDS = ("rate", "set", "pause", "resume", "save", "stop")
_MOST_SECONDS = 1e11  # the year 5138: Python can write it as a date


@dataclass(frozen=True)
class TrainingOrder:
    """A command to the training.

    Attributes:
        of: the launcher that numbered it.
        number: from 1, in the order in which the launcher has accepted them.
        kind: one of KINDS.
        name: for "set": of the value.
        value: for "rate" the factor, for "set" the value, as typed.
        teller: the user and the host, such as "ada on lab1".
        at: when it was accepted, in seconds since the epoch, by the launcher's clock.
        after_step: an attempt before this one applied it after this step. None: no attempt has.
        run: the run of the script that applied it. 0: none.
    """

    of: str
    number: int
    kind: str
    teller: str
    at: float
    name: str = ""
    value: str = ""
    after_step: int | None = None
    run: int = 0

    @classmethod
    def of_plain(cls, fields: Mapping[str, Any]) -> TrainingOrder:
        """Return the command in a launcher's message.

        Raises:
            ValueError: the fields are malformed.
        """
        order = made(cls, fields)
        if order.kind not in KINDS:
            raise ValueError(f"kind is {shown(order.kind)}; allowed are {', '.join(KINDS)}")
        if order.number < 1 or not 0 <= order.at < _MOST_SECONDS:
            raise ValueError(f"it has the number {order.number} and the time {order.at:g}")
        return order

    def plain(self) -> dict[str, Any]:
        """Return the command in the form in which ranks get it."""
        return asdict(self)
