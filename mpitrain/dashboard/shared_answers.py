"""Answers that concurrent requests share: a disk that hangs takes one thread, however many requests come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from mpitrain.errors import DataError

Result = TypeVar("Result")


def in_thread(call: Callable[[], Result], name: str) -> asyncio.Future[Result]:
    """Call this in a thread of this name. The future has what it returns or raises; another caller may settle it."""
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
        except Exception as error:  # the waiting callers get it
            failed = error
        with suppress(RuntimeError):  # the dashboard has ended
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


_MOST_ASKED = 8
_ANSWER_SECONDS = 10.0


class SharedAnswers:
    """One event loop calls."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[Any]] = {}

    def end(self) -> None:
        """Stop waiting for answers, because the dashboard ends."""
        for asked in list(self._asked.values()):
            if not asked.done():
                asked.set_exception(DataError("the dashboard ends"))

    async def get(self, name: str, call: Callable[[], Any]) -> Any:
        """Return what `call` returns in a thread, or what an earlier call of this name that still runs will return.

        Args:
            name: what is asked for, in words for the user.
            call: what is called; if it raises an error, so does this.

        Raises:
            DataError: there is no answer in time, or too many calls run.
        """
        future = self._asked.get(name)
        if future is None:
            if len(self._asked) >= _MOST_ASKED:
                waiting = next(iter(self._asked))
                raise DataError(f"{_MOST_ASKED} answers are waited for, which is the limit; the oldest is {waiting}")
            future = self._asked[name] = in_thread(call, "answer")
            future.add_done_callback(lambda done: self._remove(name, done))
        await asyncio.wait([future], timeout=_ANSWER_SECONDS)  # the thread waits also when nobody does
        if not future.done():
            raise DataError(
                f"there is no answer for {_ANSWER_SECONDS:g} s from {name}: is a disk or network file system lost? The "
                "next look waits again"
            )
        return future.result()

    def _remove(self, name: str, done: asyncio.Future[Any]) -> None:
        del self._asked[name]
        done.exception()  # nobody may have waited for it
