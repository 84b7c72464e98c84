"""What the ranks of a job have printed, for operators: the launcher keeps the last lines, and is asked for them."""

from __future__ import annotations

import asyncio
from typing import Any

from mpitrain.dashboard.shown_jobs import ShownJob
from mpitrain.dashboard.threads import in_thread
from mpitrain.errors import LaunchError
from mpitrain.launch.live_folder import socket_of
from mpitrain.launch.live_jobs import output_of

GONE = (
    "The launcher of the job had the output, and it has gone with the launcher. To keep the output of a job, redirect "
    "it: mpitrain run ... > FILE 2>&1"
)
_SERVED = "This job has no launcher, so nobody keeps its output; its processes have printed it where they were started"
_MOST_ASKED = 8


class Outputs:
    """The questions that launchers have not answered yet, of all operators together. One event loop calls."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str, str], asyncio.Future[dict[str, Any]]] = {}

    def end(self) -> None:
        """Wait for no launcher any more: the dashboard ends."""
        for asked in list(self._asked.values()):
            if not asked.done():
                asked.set_result({"refused": "the dashboard ends"})

    async def lines(self, job: ShownJob | None, ranks: str, text: str) -> dict[str, Any]:
        """Return the `output` of docs/live.md, or {"refused": why there is none}.

        Args:
            job: whose; None: the job of the run has no launcher here any more.
            ranks: of which ranks, such as "0-2,5"; "": of all.
            text: which the lines have; "": any.
        """
        if job is None:
            return {"refused": GONE}
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
