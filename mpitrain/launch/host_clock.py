"""The clock of another host, against the one here: from messages that the host echoes with its own time."""

from __future__ import annotations

from collections import deque

# Two clocks drift apart by up to a second a day, so only recent echoes count.
_RECENT_ECHOES = 60


class HostClock:
    """Converts the times of a host's clock to the clock here."""

    def __init__(self) -> None:
        self._echoes: deque[tuple[float, float]] = deque(maxlen=_RECENT_ECHOES)  # the duration; what to add

    @property
    def num_echoes(self) -> int:
        """The number of recent echoes."""
        return len(self._echoes)

    def add(self, sent: float, there: float, heard: float) -> None:
        """Add an echo: when the message was sent and the echo heard, by the clock here, and the host's time between."""
        self._echoes.append((heard - sent, (heard + sent) / 2 - there))

    def here(self, seconds: float) -> float:
        """Convert a time of the host's clock. The fastest echo is the most precise: to half its duration."""
        return seconds + min(self._echoes, default=(0.0, 0.0))[1]
