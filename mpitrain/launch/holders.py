"""The holders of a job's warm interpreters (holder.py), as its launcher sees them: one a host, over all attempts.

They are started when an attempt has made its first step, so the start of a job does not wait for them. Their
interpreters fork the ranks of the attempts after that, whether these start after it or beside it (successor.py).

The guards of the attempt that trains send the beats of the holders, from their thread, because the main thread may
block on a reader of its output.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from mpitrain.errors import LaunchError
from mpitrain.launch.connections import GUARD, Connection, connect
from mpitrain.launch.placement import Place
from mpitrain.launch.processes import left_out
from mpitrain.launch.rank import command_of
from mpitrain.launch.roster import launcher_name
from mpitrain.watching.rank_record import RankRecord

# The modules of the holder, each after those that it imports.
HOLDER = (*GUARD, "launch.holder")
# Longer than that of a guard: between two attempts, nobody sends beats.
_SILENCE_SECONDS = 60.0
_BEGIN_SECONDS = 30.0
_CLOSE_SECONDS = 10.0
_HOOK = Path(__file__).parents[1] / "job" / "warm_start"


class Holders:
    """Use this in `with`: at its end, nothing of the holders is left on a host that can be reached."""

    def __init__(self, own: str, program: Sequence[str]) -> None:
        """`own` is the name of this machine among the hosts, `program` the user's of each rank. None is started yet."""
        self._own, self._program, self._token = own, program, secrets.token_hex(4)
        self._name = f"mpitrain-warm-{self._token}"
        self._holders: dict[str, Connection] = {}
        self._listening: set[str] = set()
        self._ended: set[str] = set()  # the hosts whose holder has ended: what happened would happen again
        self._answer_until = 0.0
        self._served: Sequence[Place] = ()  # the places of the attempt for which interpreters were started
        self._sending = threading.Lock()
        self._none_of_job = ExitStack()

    def __enter__(self) -> Holders:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go(list(self._holders), _CLOSE_SECONDS)
        self._none_of_job.close()

    def begin(self, hosts: Sequence[str]) -> None:
        """An attempt begins on these hosts: let the holders of others go."""
        self._let_go([host for host in self._holders if host not in hosts], 0.0)
        self._ended &= set(hosts)
        self._served = ()

    def command(self, settings: str = "{}") -> list[str]:
        """Return what mpiexec is to start for each rank, with these settings by ranks, as JSON."""
        words = command_of(settings, self._program)
        if not self._holders:
            return words
        return [sys.executable, "-I", "-S", str(Path(__file__).with_name("stub.py")), self._name, *words]

    def beat(self) -> None:
        """Call this every second, from any thread."""
        with self._sending:
            for connection in self._holders.values():
                connection.send({"beat": 1})

    def have_come(self) -> bool:
        """Whether the holders of this attempt have logged in, have failed to, or have had their time."""
        waits = self._holders.keys() - self._listening
        return bool(self._served) and (not waits or time.monotonic() >= self._answer_until)

    def news(self, places: Sequence[Place], records: Mapping[int, RankRecord]) -> list[str]:
        """When the attempt at these places has made a step, have interpreters for the next. Return what to say."""
        if places != self._served and any(record.step > record.first_step for record in records.values()):
            self._serve(places)
        with self._sending:
            for connection in self._holders.values():
                connection.flush()
        lines = []
        for host, connection in list(self._holders.items()):
            for message in connection.receive(time.monotonic()):
                self._listening.add(host)
                if "said" in message:
                    lines.append(message["said"])
            if connection.is_closed:
                why = connection.why_closed().removeprefix(f"{host}: ")
                if host in self._listening:
                    why = "the process that holds the warm interpreter has ended"
                lines.append(f"{host}: ranks start cold from now on: {why}")
                self._ended.add(host)
                self._let_go([host], 0.0)
        return lines

    def _serve(self, places: Sequence[Place]) -> None:
        self._served = places
        self._widen(place.host for place in places)
        with self._sending:
            for place in places:
                if place.host in self._holders:
                    wanted = {"program": list(self._program), "hook": str(_HOOK), "folder": str(Path.cwd())}
                    self._holders[place.host].send({"start": wanted})

    def _widen(self, hosts: Iterable[str]) -> None:
        self._answer_until = time.monotonic() + _BEGIN_SECONDS
        for host in hosts:
            if host in self._holders or host in self._ended:
                continue
            wish = {
                "socket": self._name,
                "token": self._token,
                "launcher": launcher_name(os.getpid()),
                "silence_seconds": 0 if host == self._own else _SILENCE_SECONDS,
            }
            try:
                connection = connect(host, host == self._own, wish, time.monotonic(), HOLDER)
            except (LaunchError, OSError):  # the agents of the next attempt need ssh too, and report it
                self._ended.add(host)
                continue
            self._none_of_job.enter_context(left_out({connection.process.pid}))  # also if an attempt is running
            with self._sending:
                self._holders[host] = connection

    def _let_go(self, hosts: Sequence[str], patience_seconds: float) -> None:
        with self._sending:
            gone = [self._holders.pop(host) for host in hosts]
            for connection in gone:
                connection.hang_up()
        self._listening -= set(hosts)
        deadline = time.monotonic() + patience_seconds
        for connection in gone:
            connection.close(max(0.0, deadline - time.monotonic()))
