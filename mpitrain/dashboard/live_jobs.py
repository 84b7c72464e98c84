"""The jobs that go on now, as their launchers on this machine tell them: one connection each, whoever looks."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.errors import LaunchError
from mpitrain.launch.live_folder import sockets
from mpitrain.launch.live_picture import VERSION

LOOK_SECONDS = 1.0
_SEARCH_SECONDS = 2.0
_MOST_BYTES = 32 << 20  # of a look
_MOST_LOOKS = 600  # of a job, for the grid of ranks and time
_SILENT_SECONDS = 10.0  # behind that a launcher counts as one that hangs


@dataclass
class LiveJob:
    """What a launcher has told.

    Attributes:
        look: its last answer (docs/live.md).
        heard: when that came, by time.monotonic().
        history: of each look the time, and the phase of every rank in the order of ranks.
    """

    look: dict[str, Any]
    heard: float
    history: deque[tuple[float, list[str]]] = field(default_factory=lambda: deque(maxlen=_MOST_LOOKS))

    @property
    def ids(self) -> list[str]:
        """The ids of its tries, the first one first."""
        return [str(one) for one in self.look["ids"]]

    @property
    def is_silent(self) -> bool:
        """The launcher has not said anything for long."""
        return time.monotonic() - self.heard > _SILENT_SECONDS


class LiveJobs:
    """All live jobs of this user on this machine.

    Attributes:
        jobs: by the path of the launcher's socket.
        problem: why launchers cannot be looked for; "": they can.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each look, and when a launcher has gone."""
        self.jobs: dict[Path, LiveJob] = {}
        self.problem = ""
        self._on_change = on_change
        self._tasks: dict[Path, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Look for launchers and listen to them, until this is cancelled."""
        try:
            while True:
                self._search()
                await asyncio.sleep(_SEARCH_SECONDS)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _search(self) -> None:
        try:
            paths = sockets()
            self.problem = ""
        except (LaunchError, OSError) as error:
            paths, self.problem = [], str(error)
        for path in paths:
            if path not in self._tasks or self._tasks[path].done():
                self._tasks[path] = asyncio.create_task(self._listen(path))
        for path in [path for path, task in self._tasks.items() if task.done() and path not in paths]:
            del self._tasks[path]

    async def _listen(self, path: Path) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=_MOST_BYTES)
        except OSError:  # it has just gone, or is of a launcher on another host
            return
        try:
            writer.write(json.dumps({"watch": LOOK_SECONDS, "version": VERSION}).encode() + b"\n")
            while line := await reader.readline():
                if not self._take(path, json.loads(line)):
                    break
        except (OSError, ValueError):  # it has gone, or tells what is no look
            pass
        finally:
            self.jobs.pop(path, None)
            self._on_change()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _take(self, path: Path, look: Any) -> bool:
        """Note a look; return whether others follow."""
        if not isinstance(look, dict) or "error" in look or not isinstance(look.get("ids"), list):
            return False
        job = self.jobs.setdefault(path, LiveJob(look, time.monotonic()))
        job.look, job.heard = look, time.monotonic()
        phases = [str(entry.get("phase", "")) for entry in look.get("ranks", ()) if isinstance(entry, dict)]
        job.history.append((float(look.get("at", time.time())), phases))
        self._on_change()
        return True
