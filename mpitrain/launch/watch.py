"""The guards of all hosts of a job, as the launcher sees them: their facts, their silence, their last reports.

A thread keeps the connections alive and up to date, because the main thread may block on a reader of its output.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpitrain.launch.batch import advice_on_lost
from mpitrain.launch.conditions import Condition, Refusal, refuse, refuse_here
from mpitrain.launch.connections import Connection, connect, typed_on
from mpitrain.launch.holders import Holders
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.orders import Orders
from mpitrain.launch.processes import remove
from mpitrain.launch.reports import HostReport, Said
from mpitrain.launch.trouble import PATIENCE_SECONDS, SILENCE_SECONDS, host_trouble
from mpitrain.watching.hang_report import stacks_of

BEAT_SECONDS = 1.0
_SUSPENDED_SECONDS = SILENCE_SECONDS / 3  # after such a gap in its own time this process was suspended, not the hosts
# So many beats follow each other at once, to compare the host's clock: many jobs end in their first seconds.
_QUICK_BEATS = 20
FACTS_SECONDS = 90.0  # a host must answer within this time, even if it is busy and its disks are slow
END_SECONDS = 15.0
_LOOK_SECONDS = 3.0
_PATHS_SECONDS = 6.0
# While the other hosts report what their ranks do, a host with this much silence is not waited for.
_SHORT_SILENCE_SECONDS = 3.0
_CLOSE_SECONDS = 3.0
# A sweep says nothing before it has been let in. A host whose connection broke is mostly down, so it has less time.
_LOGIN_SECONDS, _LOGIN_SECONDS_OF_BROKEN = 10.0, 1.0


class Guards(Said):
    """Use this in `with`: at its end, nothing of it is left here.

    Attributes:
        trouble: why the job must be ended, if it must.
        is_interrupted: a signal to the launcher ends the job.
        looking: hold it while you look at the ranks and read what was seen.
    """

    def __init__(
        self,
        own: str,
        hosts: Iterable[str],
        wishes: Mapping[str, Mapping[str, Any]],
        keepers: Keepers | None = None,
        holders: Holders | None = None,
    ) -> None:
        """Connect to all hosts; `own` is the name of this machine among them.

        `keepers` and `holders`, of the job, get their beats from here.
        """
        super().__init__(hosts)
        self.trouble: str | None = None
        self.is_interrupted = False
        self._wishes, self._own, self._keepers, self._holders = wishes, own, keepers, holders
        self._orders: Orders | None = None
        self._order_number = 0  # of the newest order that was passed on
        self.looking = threading.Lock()
        self._beaten = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        now = time.monotonic()
        self._connections = {host: connect(host, host == own, wishes[host], now) for host in self.reports}
        self._closed: list[Connection] = []

    def __enter__(self) -> Guards:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stop.set()
        if self._thread is not None:
            self._thread.join(END_SECONDS)
        if self._orders is not None:  # what became of an order may have come with the last reports
            self._orders.look(self)
        connections = [*self._connections.values(), *self._closed]
        for connection in connections:
            connection.send({"bye": 1})
            connection.hang_up()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for connection in connections:
            is_lost = connection.host != self._own and self.silence(connection) > SILENCE_SECONDS
            connection.close(0.0 if is_lost else max(0.0, deadline - time.monotonic()))
        if self._own in self._wishes:  # the guard here may have been killed while it asked for facts
            remove(self._wishes[self._own]["roll_call"])

    def processes(self) -> set[int]:
        """Return the ids of the processes here that connect to the hosts."""
        return {connection.process.pid for connection in self._connections.values()}

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each host.

        Raises:
            LaunchError: names every host that cannot be reached or does not answer in time.
        """
        deadline = time.monotonic() + FACTS_SECONDS
        wrong: dict[str, Refusal] = {}
        while len(self._facts) + len(wrong) < len(self._connections) and time.monotonic() < deadline:
            self._beat(time.monotonic())
            self._exchange(time.monotonic(), BEAT_SECONDS / 4)
            for host, connection in self._connections.items():
                if connection.is_closed and host not in self._facts and host not in wrong:
                    wrong[host] = Refusal(Condition.LOGIN, host, connection.why_closed().removeprefix(f"{host}: "))
        for host in self._connections.keys() - self._facts.keys() - wrong.keys():
            fault = f"no answer within {FACTS_SECONDS:g} s; does `{typed_on(host, 'true')}` come back at once?"
            wrong[host] = Refusal(Condition.LOGIN, host, fault)
        for host, facts in self._facts.items():
            if "error" in facts:
                wrong[host] = Refusal(Condition[facts["condition"]], host, facts["error"])
        if wrong:
            refusals = [wrong[host] for host in self._connections if host in wrong]
            is_here = len(self._connections) == 1
            error = refuse_here(refusals[0])
            if not is_here:
                error = refuse("these hosts cannot take part", refusals, script="", advice=advice_on_lost(wrong))
            error.hosts = tuple(wrong)
            raise error
        return {host: self._facts[host] for host in self._connections}

    def ask_again(self, hosts: Iterable[str]) -> None:
        """Have the next `facts` wait for new ones of these hosts. Call this before `keep`."""
        for host in hosts:
            del self._facts[host]
            self._connections[host].send({"facts": 1})

    def keep(self) -> None:
        """From now on, treat silence as trouble."""
        self._grant(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="guards", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """The same, if it is not so yet, and have guards work that are idle. Call this before mpiexec runs."""
        if self._thread is None:
            self.keep()
        self._send_all({"begin": 1})

    def narrow(self, hosts: Iterable[str]) -> bool:
        """Keep only the guards of these hosts, after `keep`. False: there is trouble with one of them."""
        assert self._thread is not None
        self._stop.set()
        self._thread.join(END_SECONDS)
        self._stop.clear()
        for host in self._connections.keys() - set(hosts):
            with self._lock:
                connection = self._connections.pop(host)
                del self.reports[host], self._answered[host]
            connection.hang_up()
            connection.close(0.0)
        if any(one.is_closed or self.reports[host].has_vanished for host, one in self._connections.items()):
            return False
        self.trouble = None
        self.keep()
        return True

    def have_paths(self, paths: Sequence[str]) -> bool:
        """Ask whether these paths are there on all hosts. False, too, if a host does not answer in time."""
        for report in self.reports.values():
            report.paths = None
        self._send_all({"paths": paths})
        deadline = time.monotonic() + _PATHS_SECONDS
        while time.monotonic() < deadline and self.trouble is None:
            if all(report.paths is not None for report in self.reports.values()):
                return all(state == ["there"] for one in self.reports.values() for state in (one.paths or {}).values())
            time.sleep(0.01)
        return False

    def beat_for(self, keepers: Keepers) -> None:
        """Send `keepers` their beats from now on: the ranks of this job are those that train."""
        self._keepers = keepers

    def take_orders(self, orders: Orders) -> None:
        """The ranks of this job are those that train from now on: they get the orders."""
        orders.lead(self)
        self._orders = orders

    def give(self, order: Mapping[str, Any]) -> None:
        """Pass an order on to all ranks, once."""
        if order["number"] != self._order_number:
            self._order_number = order["number"]
            self._send_all({"order": order})

    def interrupt(self) -> None:
        """Take note that a signal to the launcher ends the job, and tell the keepers soon."""
        self.is_interrupted = True
        self._beaten = 0.0

    def look(self) -> None:
        """Ask every host for the job's processes and for unreachable hosts. A report without them had no answer."""
        for report in self.reports.values():
            report.processes = None
        self._send_all({"processes": 1})
        deadline = time.monotonic() + _LOOK_SECONDS
        while time.monotonic() < deadline and any(report.processes is None for report in self.reports.values()):
            time.sleep(0.05)

    def watch(self, seconds: float) -> None:
        """Have the guards say every `seconds` what their ranks do, for some seconds from now. Any thread may call."""
        with self._lock:
            if not self._stop.is_set():
                for connection in self._connections.values():
                    connection.send({"watch": seconds})

    def hosts_now(self) -> dict[str, tuple[HostReport, float]]:
        """Return each host's report, and for how long it has been silent, in seconds. Any thread may call."""
        with self._lock:
            return {host: (self.reports[host], self.silence(one)) for host, one in self._connections.items()}

    def stacks(self) -> list[str]:
        """Return what every rank does now, with its stack, line by line."""
        with self.looking:
            silent = self.look_at_ranks(is_whole=True)
            seen = [view for report in self.reports.values() for view in report.seen or []]
        return stacks_of(seen, silent)

    def look_at_ranks(self, *, is_whole: bool = False) -> dict[str, float]:
        """Ask what every rank does. Return how long each silent host has been silent, in seconds.

        With `is_whole`, all ranks are asked for their stacks.
        """
        for report in self.reports.values():
            report.seen = None
        self._send_all({"look": "all" if is_whole else 1})
        deadline = time.monotonic() + _LOOK_SECONDS
        while time.monotonic() < deadline and any(
            self.reports[host].seen is None and self.silence(connection) < _SHORT_SILENCE_SECONDS
            for host, connection in self._connections.items()
        ):
            time.sleep(0.02)
        return {
            host: self.silence(connection)
            for host, connection in self._connections.items()
            if self.reports[host].seen is None
        }

    @staticmethod
    def silence(connection: Connection) -> float:
        """Return how long ago a host was last heard, in seconds."""
        return time.monotonic() - connection.heard_seconds

    def end(self, linger_seconds: float) -> None:
        """End the job's processes that remain on every host that can be reached, and receive their last reports."""
        self._send_all({"end": linger_seconds})
        self._sweep(linger_seconds)
        deadline = time.monotonic() + linger_seconds + END_SECONDS
        while time.monotonic() < deadline and any(
            self.reports[host].left is None and self._may_answer(connection)
            for host, connection in self._connections.items()
        ):
            time.sleep(0.005)

    def _sweep(self, linger_seconds: float) -> None:
        """Start a sweep in place of each guard that was killed."""
        for host, connection in self._connections.items():
            report, wish = self.reports[host], self._wishes[host]
            if not connection.is_closed or report.left is not None or not report.since:
                continue
            sweep = {key: wish[key] for key in ("token", "roll_call")}
            sweep |= {"files": report.files, "since": report.since, "linger_seconds": linger_seconds}
            patience = _LOGIN_SECONDS if connection.how_killed() else _LOGIN_SECONDS_OF_BROKEN
            now = time.monotonic() + patience - SILENCE_SECONDS
            with self._lock:
                self._closed.append(connection)
                self._connections[host] = connect(host, host == self._own, sweep, now, outlives_us=True)

    def _may_answer(self, connection: Connection) -> bool:
        limit = PATIENCE_SECONDS if connection.host == self._own else SILENCE_SECONDS
        return not connection.is_closed and self.silence(connection) < limit

    def _grant(self, now: float) -> None:
        """Count silence from now on."""
        for host, connection in self._connections.items():
            connection.heard_seconds = self._answered[host] = now

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:  # otherwise nobody would watch, or keep the guards from ending the job
            self.trouble = f"the job is ended on all hosts, because it cannot be watched: {error!r}"
            raise

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if now - looked > _SUSPENDED_SECONDS:
                self._grant(now)
            looked = now
            self._beat(now)
            self._exchange(now, BEAT_SECONDS / 4)
            if self._orders is not None:
                self._orders.look(self)
            judged = time.monotonic()
            # A wait in which this process was suspended may end without what has come meanwhile.
            if self.trouble is None and judged - now < _SUSPENDED_SECONDS:
                self.trouble = host_trouble(self._connections, self.reports, self._answered, self._own, judged)

    def _beat(self, now: float) -> None:
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            self._send_all({"beat": now})
            if self._keepers is not None:
                self._beat_keepers(self._keepers)
            if self._holders is not None:
                self._holders.beat()

    def _beat_keepers(self, keepers: Keepers) -> None:
        lost = self.lost()
        has_failed = self.is_interrupted or self.failed() is not None
        records = [record for rank, record in self.records().items() if rank not in lost]
        _, gone = self.seen()  # without pidfd_open(2) it may not be known which end was the first
        is_ending = bool(self.first_ends() or gone.keys() - lost)
        keepers.beat(records, is_ending=is_ending, has_failed=has_failed)

    def _send_all(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            for connection in self._connections.values():
                connection.send(message)

    def _exchange(self, now: float, timeout_seconds: float) -> None:
        """Take in what arrives within that time."""
        with selectors.DefaultSelector() as ways:
            for host, connection in self._connections.items():
                if connection.is_closed:
                    continue
                assert connection.process.stdin is not None
                assert connection.process.stdout is not None
                ways.register(connection.process.stdout, selectors.EVENT_READ, host)
                if connection.has_unsent:
                    ways.register(connection.process.stdin, selectors.EVENT_WRITE, None)
            if not ways.get_map():
                self._stop.wait(timeout_seconds)  # the caller that ends the thread waits for it
                return
            for key, _ in ways.select(timeout_seconds):
                if key.data is not None:
                    connection = self._connections[key.data]
                    messages = connection.receive(time.monotonic())
                    with self._lock:
                        for message in messages:
                            self.take(key.data, message, connection.heard_seconds, now)
                            if "echo" in message and self.num_echoes(key.data) < _QUICK_BEATS:
                                connection.send({"beat": time.monotonic()})
        with self._lock:
            for connection in self._connections.values():
                connection.flush()
