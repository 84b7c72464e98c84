"""Answers that are the same for all who ask meanwhile: a disk that hangs takes one thread, however many ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mpitrain.dashboard.threads import in_thread


class SharedAnswers:
    """One event loop calls."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[Any]] = {}

    async def get(self, name: str, call: Callable[[], Any]) -> Any:
        """Return what `call` returns in a thread, or what an earlier call of this name that still runs will return."""
        future = self._asked.get(name)
        if future is None:
            future = self._asked[name] = in_thread(call, name)
            future.add_done_callback(lambda _: self._asked.pop(name))
        return await asyncio.shield(future)
