"""The spares of a job, as its launcher sees them: a holder on each host (spares.py), over all tries.

The guards of the try that trains send the beats of the holders, from their thread, because the main thread may block
on a reader of its output.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpitrain.launch.connections import GUARD, Connection, connect
from mpitrain.launch.placement import Place
from mpitrain.watching.rank_record import RankRecord

# The modules of the holder of spares, each after those that it imports.
SPARES = (*GUARD, "launch.spare", "launch.spares")
# Longer than that of a guard: between two tries, nobody sends beats.
_SILENCE_SECONDS = 60.0
_BEGIN_SECONDS = 30.0
_CLOSE_SECONDS = 10.0


class Reserve:
    """Use this in `with`: at its end, nothing of the spares is left on a host that can be reached."""

    def __init__(self, own: str) -> None:
        """`own` is the name of this machine among the hosts. No holder is started yet."""
        self._own, self._token = own, secrets.token_hex(4)
        self._name = f"mpitrain-spares-{self._token}"
        self._holders: dict[str, Connection] = {}
        self._listening: set[str] = set()
        self._ended: set[str] = set()  # the hosts whose holder has ended: what happened would happen again
        self._wanted: dict[str, dict[str, object]] = {}
        self._ready: dict[str, int] = {}  # how many spares wait on each host; 0: not all yet
        self._sending = threading.Lock()

    def __enter__(self) -> Reserve:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go(list(self._holders), _CLOSE_SECONDS)

    def begin(self, hosts: Sequence[str]) -> None:
        """Before a try: have a holder on each of these hosts, and on no others. `stub` waits for them."""
        self._let_go([host for host in self._holders if host not in hosts], 0.0)
        self._ended &= set(hosts)
        self._wanted, self._ready = {}, {}
        for host in hosts:
            if host in self._holders or host in self._ended:
                continue
            silence = 0 if host == self._own else _SILENCE_SECONDS
            wish = {"socket": self._name, "token": self._token, "silence_seconds": silence}
            connection = connect(host, host == self._own, wish, time.monotonic(), SPARES)
            with self._sending:
                self._holders[host] = connection

    def processes(self) -> set[int]:
        """Return the ids of the processes here that connect to the holders."""
        return {connection.process.pid for connection in self._holders.values()}

    def stub(self, program: Sequence[str], places: Sequence[Place]) -> list[str]:
        """Return what mpiexec is to start in place of `program`, the command of each rank at these places."""
        deadline = time.monotonic() + _BEGIN_SECONDS
        while time.monotonic() < deadline:
            missing = [one for host, one in self._holders.items() if host not in self._listening and not one.is_closed]
            if not missing:
                break
            self._flush()
            for connection in missing:
                if connection.receive(time.monotonic()):
                    self._listening.add(connection.host)
            time.sleep(0.005)
        for host in self._holders.keys() - self._listening:
            holder = self._holders[host]
            why = holder.why_closed() if holder.is_closed else f"no answer within {_BEGIN_SECONDS:g} s"
            text = f"{host}: no spares can be kept there ({why.removeprefix(f'{host}: ')}), so ranks start without them"
            print(f"mpitrain: {text}", file=sys.stderr, flush=True)
            self._drop(host)
        self._wanted = {place.host: {"program": list(program), "count": place.num_ranks} for place in places}
        return [sys.executable, "-I", "-S", str(Path(__file__).with_name("stub.py")), self._name, *program]

    def beat(self) -> None:
        """Call this every second, from any thread."""
        with self._sending:
            for connection in self._holders.values():
                connection.send({"beat": 1})

    def news(self, records: Mapping[int, RankRecord]) -> list[str]:
        """Start spares when the job has made its first step. Return what to tell the user, one line per entry."""
        if self._wanted and any(record.step > record.first_step for record in records.values()):
            with self._sending:
                for host, connection in self._holders.items():
                    connection.send({"start": self._wanted[host]})
            self._ready = dict.fromkeys(self._holders, 0)
            self._wanted = {}
        self._flush()
        lines = []
        for host, connection in list(self._holders.items()):
            for message in connection.receive(time.monotonic()):
                if "said" in message:
                    lines.append(message["said"])
                elif number := message["ready"]:
                    self._ready[host] = number
                    if all(self._ready.values()):
                        lines.append(f"{sum(self._ready.values())} spares are ready")
            if connection.is_closed:
                self._drop(host)
                ended = "the process that holds the spares has ended; from now on ranks start there without them"
                lines.append(f"{host}: {ended}")
        return lines

    def _flush(self) -> None:
        with self._sending:
            for connection in self._holders.values():
                connection.flush()

    def _drop(self, host: str) -> None:
        self._ended.add(host)
        self._ready.pop(host, None)
        self._let_go([host], 0.0)

    def _let_go(self, hosts: Sequence[str], patience_seconds: float) -> None:
        with self._sending:
            gone = [self._holders.pop(host) for host in hosts]
            for connection in gone:
                connection.hang_up()
        self._listening -= set(hosts)
        deadline = time.monotonic() + patience_seconds
        for connection in gone:
            connection.close(max(0.0, deadline - time.monotonic()))
