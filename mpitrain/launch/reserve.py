"""The spares of a job, as its launcher sees them: a holder on each host (spares.py), over all attempts.

Spares are started when an attempt has made its first step. They become the ranks of the next one, whether that starts
after the try or beside it (successor.py).

The guards of the try that trains send the beats of the holders, from their thread, because the main thread may block
on a reader of its output.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from mpitrain.launch.connections import GUARD, Connection, connect
from mpitrain.launch.placement import Place
from mpitrain.launch.processes import left_out
from mpitrain.watching.rank_record import RankRecord

# The modules of the holder of spares, each after those that it imports.
SPARES = (*GUARD, "launch.spares")
# Longer than that of a guard: between two attempts, nobody sends beats.
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
        self._answer_until = 0.0
        self._program: Sequence[str] = ()
        self._served: Sequence[Place] = ()  # the places of the try for which spares were started; empty: of none
        self._is_lent = False  # the next attempt starts beside the present one, and takes the spares
        self._ready: dict[str, int] = {}  # how many spares wait on each host; 0: not all yet
        self._sending = threading.Lock()
        self._none_of_job = ExitStack()

    def __enter__(self) -> Reserve:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go(list(self._holders), _CLOSE_SECONDS)
        self._none_of_job.close()

    def begin(self, hosts: Sequence[str]) -> None:
        """An attempt begins: have a holder on each of these hosts, and on no others. `stub` waits for them."""
        self._let_go([host for host in self._holders if host not in hosts], 0.0)
        self._ended &= set(hosts)
        self._ready = {}
        self.take_back()
        self._widen(hosts)

    def lend(self, hosts: Sequence[str]) -> None:
        """The next attempt starts on these hosts, beside the present one. It has the spares until `begin` or
        `take_back`.

        `listens` says when the holders of new hosts are there.
        """
        self._is_lent = True
        self._widen(hosts)

    def take_back(self) -> None:
        """The next attempt has been given up. If the present one continues, new spares are started for it."""
        self._is_lent, self._served = False, ()

    def _widen(self, hosts: Sequence[str]) -> None:
        self._answer_until = time.monotonic() + _BEGIN_SECONDS
        for host in hosts:
            if host in self._holders or host in self._ended:
                continue
            silence = 0 if host == self._own else _SILENCE_SECONDS
            wish = {"socket": self._name, "token": self._token, "silence_seconds": silence}
            connection = connect(host, host == self._own, wish, time.monotonic(), SPARES)
            self._none_of_job.enter_context(left_out({connection.process.pid}))  # also if an attempt is running
            with self._sending:
                self._holders[host] = connection

    def processes(self) -> set[int]:
        """Return the ids of the processes here that connect to the holders."""
        return {connection.process.pid for connection in self._holders.values()}

    def listens(self) -> bool:
        """Whether each holder has answered, has ended, or has had its time. Returns at once."""
        self._flush()
        missing = [one for host, one in self._holders.items() if host not in self._listening and not one.is_closed]
        for connection in missing:
            if connection.receive(time.monotonic()):
                self._listening.add(connection.host)
        return time.monotonic() >= self._answer_until or all(
            one.is_closed or one.host in self._listening for one in missing
        )

    def stub(self, program: Sequence[str]) -> list[str]:
        """Return what mpiexec is to start in place of `program`, the command of each rank."""
        while not self.listens():
            time.sleep(0.005)
        for host in self._holders.keys() - self._listening:
            holder = self._holders[host]
            why = holder.why_closed() if holder.is_closed else f"no answer within {_BEGIN_SECONDS:g} s"
            text = f"{host}: no spares can be kept there ({why.removeprefix(f'{host}: ')}), so ranks start without them"
            print(f"mpitrain: {text}", file=sys.stderr, flush=True)
            self._drop(host)
        self._program = program
        return [sys.executable, "-I", "-S", str(Path(__file__).with_name("stub.py")), self._name, *program]

    def beat(self) -> None:
        """Call this every second, from any thread."""
        with self._sending:
            for connection in self._holders.values():
                connection.send({"beat": 1})

    def news(self, places: Sequence[Place], records: Mapping[int, RankRecord]) -> list[str]:
        """Start spares for the try at these places when it has made its first step. Return what to tell the user."""
        is_new = not self._is_lent and places != self._served
        if is_new and any(record.step > record.first_step for record in records.values()):
            self._serve(places)
        self._flush()
        lines = []
        for host, connection in list(self._holders.items()):
            for message in connection.receive(time.monotonic()):
                self._listening.add(host)
                if "said" in message:
                    lines.append(message["said"])
                elif (number := message["ready"]) and host in self._ready:
                    self._ready[host] = number
                    if all(self._ready.values()):
                        total = sum(self._ready.values())
                        lines.append("1 spare is ready" if total == 1 else f"{total} spares are ready")
            if connection.is_closed:
                self._drop(host)
                ended = "the process that holds the spares has ended; from now on ranks start there without them"
                lines.append(f"{host}: {ended}")
        return lines

    def _serve(self, places: Sequence[Place]) -> None:
        self._served, self._ready = places, {}
        with self._sending:
            for place in places:
                if place.host in self._holders:
                    wanted = {"program": list(self._program), "count": place.num_ranks}
                    self._holders[place.host].send({"start": wanted})
                    self._ready[place.host] = 0

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
