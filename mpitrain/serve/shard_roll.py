"""Which of the further servers are there: they are asked while no answer of a worker comes.

A worker that does not answer may be slow, or may wait for a server that does not answer it.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpitrain.serve.link import ServerLink
from mpitrain.serve.wire import Peer

# How long no answer comes before the servers are asked, and the time between two questions.
_ASK_SECONDS = 1.0


class RollOfShards:
    """Asks the further servers whether they are there, and notes who does not answer."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        # By server: when it was asked, or has been heard of, and how many frames had come from it then.
        self._asked: dict[int, tuple[float, int]] = {}
        self._next = 0.0

    def look(self, peers: Mapping[Peer, int], now: float, quiet_seconds: float) -> dict[int, float]:
        """Return the servers that have not answered, by number, and for how many seconds.

        Args:
            peers: the numbers of the servers.
            now: in seconds.
            quiet_seconds: for which no answer of a worker has come.
        """
        for peer, number in peers.items():
            if number in self._asked and self._link.frames[peer] != self._asked[number][1]:
                del self._asked[number]
        if quiet_seconds >= _ASK_SECONDS and now >= self._next:
            self._next = now + _ASK_SECONDS
            for peer, number in peers.items():
                if number not in self._asked:
                    self._link.send(peer, "ask", {})
                    self._asked[number] = now, self._link.frames[peer]
        return {number: now - asked for number, (asked, _) in self._asked.items() if now - asked >= _ASK_SECONDS}
