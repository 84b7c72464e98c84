"""What operators tell jobs from a page: the way to the launcher of a job, as `mpitrain tell` and `kill` go it.

An answer may take a minute, because an order is applied after a step. So a thread waits for each, and the server goes
on. The launcher decides what can be done; nothing here knows better.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.dashboard.threads import in_thread
from mpitrain.errors import ConfigError
from mpitrain.launch.hosts import place_ranks
from mpitrain.launch.jobs import end_job
from mpitrain.launch.roster import NOT_TOLD, launcher_pid
from mpitrain.launch.wishes import ask

MOST_BYTES = 4096  # of a command; a launcher takes 4,000 bytes
_MOST_A_SECOND = 5
_MOST_WAITING = 8
_END_SECONDS = 30.0  # a launcher whose ranks have ended still tells its guards
_FIELDS = ("kind", "name", "value")
_LIST = {"kind": "list"}
_ENDS = {
    "refused": "the dashboard ends, and cannot wait for the answer; the record of the run will show what was applied"
}


class Commands:
    """The commands to all jobs, of all operators together. One event loop calls."""

    def __init__(self) -> None:
        self._begun: deque[float] = deque(maxlen=_MOST_A_SECOND)  # by time.monotonic()
        self._told: set[asyncio.Future[dict[str, Any]]] = set()  # that wait for their answers
        self._lists: dict[str, asyncio.Future[dict[str, Any]]] = {}  # that are asked for now, by launcher
        self._is_ending = False

    def end(self) -> None:
        """Wait for no answer any more: the dashboard ends. The jobs have their commands."""
        self._is_ending = True
        for one in (*self._told, *self._lists.values()):
            if not one.done():
                one.set_result(_ENDS)

    def why_not(self) -> str:
        """Return why no command is passed on now; "": the next one is."""
        if len(self._begun) == _MOST_A_SECOND and time.monotonic() - self._begun[0] < 1.0:
            return f"{_MOST_A_SECOND} commands a second are passed on, of all operators together; wait a second"
        if len(self._told) >= _MOST_WAITING:
            return f"{_MOST_WAITING} commands wait for their answers, which is the limit; wait for one"
        return ""

    async def tell(self, job: ShownJob, order: Mapping[str, str]) -> dict[str, Any]:
        """Tell a job something, and return what its launcher answers; Orders.answer has the forms.

        Args:
            job: which.
            order: as `order_of` returns it. Its kind may also be "kill".
        """
        self._begun.append(time.monotonic())
        told = self._in_thread(lambda: _kill(job) if order["kind"] == "kill" else _tell(job, order))
        self._told.add(told)
        told.add_done_callback(self._told.discard)
        return await asyncio.shield(told)  # the thread waits also when nobody does

    async def can(self, job: ShownJob) -> dict[str, Any]:
        """Return what a job can be told now, with its present values. All who ask meanwhile get the same answer."""
        asked = self._lists.get(job.launcher)
        if asked is None:
            asked = self._in_thread(lambda: _tell(job, _LIST))
            self._lists[job.launcher] = asked
            asked.add_done_callback(lambda _: self._lists.pop(job.launcher))
        return await asyncio.shield(asked)

    def _in_thread(self, call: Callable[[], dict[str, Any]]) -> asyncio.Future[dict[str, Any]]:
        """Call this in a thread of its own, for which the end of the dashboard does not wait."""

        def passed_on() -> dict[str, Any]:
            try:
                return call()
            except Exception as error:  # the page is told, and the next command may go well
                return {"refused": f"the dashboard cannot pass it on: {error!r}"}

        if not self._is_ending:
            return in_thread(passed_on, "command")
        result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        result.set_result(_ENDS)
        return result


def order_of(body: bytes) -> dict[str, str]:
    """Return the order in the body of a request: {"kind": text, "name": text, "value": text}, the last two if needed.

    Raises:
        ConfigError: it is something else.
    """
    try:
        order = json.loads(body)
        is_order = isinstance(order, dict) and "kind" in order and order.keys() <= set(_FIELDS)
        if is_order and all(isinstance(text, str) for text in order.values()):
            "".join(order.values()).encode()  # half of a surrogate pair is no text
            return dict(order)
    except (ValueError, RecursionError):
        pass
    raise ConfigError('a command is a JSON object of texts: {"kind": ..., "name": ..., "value": ...}')


def _tell(job: ShownJob, order: Mapping[str, str]) -> dict[str, Any]:
    if not job.launcher:
        return {"refused": NOT_TOLD}
    return ask(job.launcher, {"tell": dict(order), "from": f"the dashboard of {socket.gethostname()}"})


def _kill(job: ShownJob) -> dict[str, Any]:
    """End a job by its launcher, which is on this machine. What is left here after 12 s is killed."""
    if not job.ids:
        return {"refused": "it has no ranks yet; wait until it has begun"}
    left, wrong = end_job(place_ranks("localhost", None, None, 1), job.ids[-1])
    lines = [f"process {line} could not be killed" for of_host in left.values() for line in of_host]
    lines += wrong.values()
    deadline = time.monotonic() + _END_SECONDS
    while (pid := launcher_pid(job.launcher)) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    if pid is not None:
        lines.append(f"its launcher, process {pid}, goes on; is it stopped?")
    return {"refused": "; ".join(lines)} if lines else {"accepted": "the job has ended, without a save"}
