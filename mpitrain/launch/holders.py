"""The warm interpreters of a job (holder.py), as its launcher sees them: one a host, over all attempts.

They are started when an attempt has made its first step, so the start of a job does not wait for them. They fork the
ranks of the attempts after that, whether these start after it or beside it (successor.py).
"""

from __future__ import annotations

import os
import secrets
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.launch.agents import Agents
from mpitrain.launch.placement import Place
from mpitrain.launch.processes import launcher_name
from mpitrain.launch.rank import HOOK, command_of
from mpitrain.watching.rank_record import RankRecord


class Holders:
    """The warm interpreters of a job's hosts. They end with the agents."""

    def __init__(self, agents: Agents, program: Sequence[str]) -> None:
        """`program` is the user's of each rank. None is started yet."""
        self._agents, self._program, self._token = agents, program, secrets.token_hex(4)
        self._name = f"mpitrain-warm-{self._token}"
        self._served: Sequence[Place] = ()  # the places of the attempt for which interpreters were started
        self._are_there = False
        self._said: deque[str] = deque()
        agents.heard["warm"] = self._take

    def begin(self) -> None:
        """An attempt begins."""
        self._served = ()

    def command(self, settings: str = "{}") -> list[str]:
        """Return what mpiexec is to start for each rank, with these settings by ranks, as JSON."""
        words = command_of(settings, self._program)
        if not self._are_there:
            return words
        return [sys.executable, "-I", "-S", str(Path(__file__).with_name("stub.py")), self._name, *words]

    def news(self, places: Sequence[Place], records: Mapping[int, RankRecord]) -> list[str]:
        """When the attempt at these places has made a step, have interpreters for the next. Return what to say."""
        if places != self._served and any(record.step > record.first_step for record in records.values()):
            self._served, self._are_there = places, True
            wanted = {
                "name": self._name,
                "token": self._token,
                "launcher": launcher_name(os.getpid()),
                "program": list(self._program),
                "hook": HOOK,
                "folder": str(Path.cwd()),
            }
            self._agents.tell([place.host for place in places], {"warm": wanted})
        return [self._said.popleft() for _ in range(len(self._said))]

    def _take(self, _host: str, message: dict[str, Any]) -> None:
        self._said.append(message["said"])
