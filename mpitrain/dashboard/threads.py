"""Calls that may hang, each in a thread of its own: nobody but who wants the answer waits for it, also at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(call: Callable[[], Result], name: str) -> asyncio.Future[Result]:
    """Call this in a thread of this name. The future has what it returns or raises; somebody else may settle it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None is one only where `call` has returned it

    def run() -> None:
        result, failed = None, None
        try:
            result = call()
        except Exception as error:  # whoever waits gets it
            failed = error
        with suppress(RuntimeError):  # the dashboard has ended
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
