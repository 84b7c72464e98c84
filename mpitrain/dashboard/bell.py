"""A bell that wakes all who wait for a change."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Bell:
    """Rings in one event loop.

    Attributes:
        count: how often it has rung.
    """

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake all who wait."""
        self.count += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, count: int, timeout_seconds: float) -> int:
        """Return the new count as soon as it is not `count` any more; or the old one, after this time."""
        if self.count == count:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._event.wait(), timeout_seconds)
        return self.count
