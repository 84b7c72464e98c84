"""Strangers: says which peers were sent away before they had joined."""

from __future__ import annotations

import math
from collections.abc import Callable

from mpitrain.serve.link import ENDED, ServerLink

# However many strangers come, and however often.
_EVERY_SECONDS = 10.0


class Strangers:
    """Counts peers with another key, and peers with the key that send no messages. Prints a line from time to time."""

    def __init__(self, link: ServerLink, say: Callable[[str], None], now: Callable[[], float]) -> None:
        self._link, self._say, self._now = link, say, now
        self._said, self._known, self._others = -math.inf, 0, 0
        self._why = ""

    def leave(self, why: str) -> None:
        """Take in that a peer that has not joined is gone. Only one that was sent away counts."""
        if why != ENDED:
            self._others, self._why = self._others + 1, why

    def look(self) -> None:
        """Say what has not been said, unless a line was printed in the last seconds."""
        keys = self._link.refused - self._known
        if not (keys or self._others) or self._now() - self._said < _EVERY_SECONDS:
            return
        self._said = self._now()
        if keys:
            self._say(
                f"refused, because they have another key: {keys} connections, at last one from "
                f"{self._link.refused_from}; a worker needs the line that this server has printed"
            )
        if self._others:
            self._say(f"refused, before they had joined: {self._others}; the last one because {self._why}")
        self._known, self._others = self._link.refused, 0
