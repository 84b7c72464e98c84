"""Commands that operators send to jobs from a page, as `mpitrain tell` and `kill` do, and the output of ranks.

An answer may take a minute, because a command is applied after a step. So a thread waits for each, and the server
continues. Only the launcher decides what can be done.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpitrain.dashboard.shared_answers import in_thread
from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.errors import ConfigError, DataError, LaunchError
from mpitrain.launch.control import ask, socket_of
from mpitrain.launch.hosts import place_ranks
from mpitrain.launch.jobs import end_job
from mpitrain.launch.live_jobs import output_of
from mpitrain.launch.processes import launcher_pid
from mpitrain.launch.record_end import OUTPUT
from mpitrain.launch.roster import NOT_TOLD
from mpitrain.reading import json_of, parsed, read_file
from mpitrain.watching.ranges import ranks_in

MOST_BYTES = 4096  # of a command; a launcher takes 4,000 bytes
_MOST_A_SECOND = 5
_MOST_WAITING = 8
_END_SECONDS = 30.0  # a launcher whose ranks have ended still tells its agents
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
        """Stop waiting for answers, because the dashboard ends. The jobs have received their commands."""
        self._is_ending = True
        for one in (*self._told, *self._lists.values()):
            if not one.done():
                one.set_result(_ENDS)

    def why_not(self) -> str:
        """Return why commands are not passed on now; "": the next one will be."""
        if len(self._begun) == _MOST_A_SECOND and time.monotonic() - self._begun[0] < 1.0:
            return f"{_MOST_A_SECOND} commands a second are passed on, of all operators together; wait a second"
        if len(self._told) >= _MOST_WAITING:
            return f"{_MOST_WAITING} commands wait for their answers, which is the limit; wait for one"
        return ""

    async def tell(self, job: ShownJob, order: Mapping[str, str]) -> dict[str, Any]:
        """Send a command to a job, and return the answer of its launcher; see Orders.answer for the forms.

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
        """Return the commands that a job accepts now, with its current values. Requests that come meanwhile get the
        same answer."""
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
    refusal = ConfigError('a command is a JSON object of texts: {"kind": ..., "name": ..., "value": ...}')
    order = json_of(body, lambda _: refusal, "")
    if "kind" in order and order.keys() <= set(_FIELDS) and all(isinstance(text, str) for text in order.values()):
        return order
    raise refusal


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
        lines.append(f"its launcher, process {pid}, continues; is it stopped?")
    return {"refused": "; ".join(lines)} if lines else {"accepted": "the job has ended, without a save"}


GONE = (
    "The launcher of the job had the output, and it has gone with the launcher. To keep the output of a job, redirect "
    "it: mpitrain run ... > FILE 2>&1"
)
_SERVED = "This job has no launcher, so its output is not kept; its processes have printed it where they were started"
_MOST_ASKED = 8
_MOST_BYTES = 8 << 20


class Outputs:
    """The questions that launchers have not answered yet, of all operators together. One event loop calls."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str, str], asyncio.Future[dict[str, Any]]] = {}

    def end(self) -> None:
        """Stop waiting for launchers, because the dashboard ends."""
        for asked in list(self._asked.values()):
            if not asked.done():
                asked.set_result({"refused": "the dashboard ends"})

    async def lines(
        self, job: ShownJob | None, ranks: str, text: str, folder: str = "", of_job: str = ""
    ) -> dict[str, Any]:
        """Return the `output` of docs/reference/formats-and-protocols.md, or {"refused": why there is none}.

        Args:
            job: whose; None: the job of the run has no launcher here any more.
            ranks: of which ranks, such as "0-2,5"; "": of all.
            text: which the lines have; "": any.
            folder: of the record of the run, where the launcher has left the last lines of a job that failed.
            of_job: the id of the job of the run; a later job may have taken the folder.
        """
        if job is None:
            return await in_thread(lambda: _left(Path(folder), of_job, ranks, text) or {"refused": GONE}, "output")
        if not job.launcher:
            return {"refused": _SERVED}
        path, key = socket_of(job.launcher), (job.launcher, ranks, text)
        asked = self._asked.get(key)
        if asked is None:
            if len(self._asked) >= _MOST_ASKED:
                return {"refused": f"{_MOST_ASKED} others wait for the output of jobs, which is the limit"}
            asked = in_thread(lambda: output_of(path, ranks, text), "output")
            self._asked[key] = asked
            asked.add_done_callback(lambda _: self._asked.pop(key))
        try:
            return await asyncio.shield(asked)
        except LaunchError as error:
            return {"refused": str(error)}


def _left(folder: Path, of_job: str, ranks: str, text: str) -> dict[str, Any] | None:
    """Return the last lines of a job that has failed, as far as they are wanted; None: there are none."""
    path = folder / OUTPUT

    def chosen() -> dict[str, Any]:
        content = json_of(read_file(path, DataError, most_bytes=_MOST_BYTES), DataError, str(path), any_text=True)
        if content["job"] != of_job:
            return {"refused": GONE}
        lines = [
            line
            for line in content["lines"]
            if text.casefold() in line["text"].casefold()
            and (wanted is None or (line["ranks"] and wanted & ranks_in(line["ranks"])))
        ]
        return {"lines": lines, "more": bool(content["more"]), "dropped": int(content["dropped"])}

    try:
        wanted = ranks_in(ranks) if ranks else None
        if not path.is_file():
            return None
        found: dict[str, Any] = parsed(chosen, DataError, str(path), "is damaged")
    except (DataError, OSError, ValueError) as error:
        return {"refused": str(error)}
    return found
