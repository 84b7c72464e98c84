"""An attempt of a job as the launcher sees it through the agents of its hosts: facts, silence, last reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpitrain.errors import LaunchError
from mpitrain.launch.agents import END_SECONDS, Agents, silence
from mpitrain.launch.batch import advice_on_lost
from mpitrain.launch.conditions import Condition, Refusal, refuse, refuse_here
from mpitrain.launch.connections import Connection, typed_on
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.orders import Orders
from mpitrain.launch.processes import remove
from mpitrain.launch.reports import HostReport, Said
from mpitrain.launch.trouble import PATIENCE_SECONDS, SILENCE_SECONDS, host_trouble
from mpitrain.watching.hang_report import stacks_of
from mpitrain.watching.rank_record import records_of
from mpitrain.watching.view import RankView, to_json

FACTS_SECONDS = 90.0  # a host must answer within this time, even if it is busy and its disks are slow
_FACTS_LOOK_SECONDS = _ANSWER_LOOK_SECONDS = 0.005
_LOOK_SECONDS = 3.0
_PATHS_SECONDS = 6.0
# While the other hosts report what their ranks do, a host with this much silence is not waited for.
_SHORT_SILENCE_SECONDS = 3.0
# A new agent says nothing before it has been let in. A host whose connection broke is mostly down, so it has less time.
_LOGIN_SECONDS, _LOGIN_SECONDS_OF_BROKEN = 10.0, 1.0


class AttemptOnHosts(Said):
    """Use this in `with`: at its end, nothing of the attempt is left on a host that can be reached.

    Attributes:
        token: the id of the attempt.
        trouble: why the job must be ended, if it must.
        is_kept: silence is trouble.
        is_interrupted: a signal to the launcher ends the job.
        heard_ranks: takes in what the agent of a host says of ranks that it has started itself (host_ranks.py).
        looking: hold it while you look at the ranks and read what was seen.
    """

    def __init__(
        self,
        agents: Agents,
        hosts: Iterable[str],
        wishes: Mapping[str, Mapping[str, Any]],
        keepers: Keepers | None = None,
    ) -> None:
        """Have an agent on all hosts, and begin an attempt there. `keepers`, of the job, get their beats from here."""
        super().__init__(hosts)
        self.token: str = wishes[next(iter(self.reports))]["token"]
        self.trouble: str | None = None
        self.is_kept = self.is_interrupted = False
        self._agents, self._wishes, self._keepers = agents, wishes, keepers
        self.heard_ranks: Callable[[str, Mapping[str, Any]], None] = lambda host, message: None
        self._orders: Orders | None = None
        self._order_number = 0  # of the newest order that was passed on
        self._has_left = False
        self.looking = threading.Lock()
        self._connections: dict[str, Connection] = {}
        agents.join(self)
        try:
            self._connections = agents.have(self.reports)
        except BaseException:
            agents.part(self)
            raise
        self._clocks = {host: agents.clocks[host] for host in self.reports}
        for host, connection in self._connections.items():
            self._send(connection, {"wish": wishes[host]})

    def __enter__(self) -> AttemptOnHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._has_left = True
        if self._orders is not None:  # what became of an order may have come with the last reports
            self._orders.look(self)
        self._part_with(self._connections)
        self._agents.part(self)
        own = self._agents.own
        if own in self._wishes:  # the agent here may have been killed while it asked for facts
            remove(self._wishes[own]["roll_call"])

    @property
    def hosts(self) -> Iterable[str]:
        """The hosts of the attempt."""
        return self.reports

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return the facts of each host.

        Raises:
            LaunchError: names every host that cannot be reached or does not answer in time; or another thread has
                left the attempt, for which no answer will come.
        """
        deadline = time.monotonic() + FACTS_SECONDS
        wrong: dict[str, Refusal] = {}
        while len(self._facts) + len(wrong) < len(self._connections) and time.monotonic() < deadline:
            if self._has_left:
                raise LaunchError("nobody needs these facts any more: the attempt has been left")
            for host, connection in self._connections.items():
                if connection.is_closed and host not in self._facts and host not in wrong:
                    wrong[host] = Refusal(Condition.LOGIN, host, connection.why_closed().removeprefix(f"{host}: "))
            time.sleep(_FACTS_LOOK_SECONDS)
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
            self._send(self._connections[host], {"facts": 1})

    def keep(self) -> None:
        """From now on, treat silence as trouble."""
        self.is_kept = True

    def start(self) -> None:
        """The same, and have agents look at an attempt that was idle. Call this before mpiexec runs."""
        self.keep()
        self._send_all({"begin": 1})

    def tell(self, host: str, message: Mapping[str, Any]) -> None:
        """Send the agent of a host a message of this attempt. Any thread may call."""
        self._send(self._connections[host], message)

    def take(self, host: str, message: dict[str, Any], heard: float, now: float) -> None:
        """See Watched."""
        super().take(host, message, heard, now)
        if "output" in message or "exits" in message:
            self.heard_ranks(host, message)

    def narrow(self, hosts: Iterable[str]) -> bool:
        """Keep only these hosts. False: there is trouble with one of them."""
        away = self._connections.keys() - set(hosts)
        self._part_with(away)
        with self._lock:
            self._connections = {host: one for host, one in self._connections.items() if host not in away}
            self.reports = {host: report for host, report in self.reports.items() if host not in away}
            if any(one.is_closed or self.reports[host].has_vanished for host, one in self._connections.items()):
                return False
            self.trouble = None
        return True

    def _part_with(self, hosts: Iterable[str]) -> None:
        """Say goodbye there, also to an agent in place of one that was killed, which has left the roll call."""
        for host in hosts:
            told = {"attempt": self.token, "bye": 1, "roll_call": self._wishes[host]["roll_call"]}
            self._agents.tell([host], told)

    def have_paths(self, paths: Sequence[str]) -> bool:
        """Ask whether these paths are there on all hosts. False, too, if a host does not answer in time."""
        for report in self.reports.values():
            report.paths = None
        self._send_all({"paths": paths})
        self._wait(_PATHS_SECONDS, lambda host, _: self.trouble is None and self.reports[host].paths is None)
        told = [report.paths for report in self.reports.values()]
        is_there = all(one is not None and all(state == ["there"] for state in one.values()) for one in told)
        return is_there and self.trouble is None

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
        self._agents.beat_soon()

    def look(self) -> None:
        """Ask every host for the job's processes and for unreachable hosts. A report without them had no answer."""
        for report in self.reports.values():
            report.processes = None
        self._send_all({"processes": 1})
        self._wait(_LOOK_SECONDS, lambda host, _: self.reports[host].processes is None)

    def watch(self, seconds: float) -> None:
        """Have the agents report every `seconds` what the ranks do, for some seconds from now. Any thread may call."""
        self._send_all({"watch": seconds})

    def hosts_now(self) -> dict[str, tuple[HostReport, float]]:
        """Return each host's report, and for how long it has been silent, in seconds. Any thread may call."""
        with self._lock:
            return {host: (self.reports[host], silence(one)) for host, one in self._connections.items()}

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
        self._wait(
            _LOOK_SECONDS, lambda host, one: self.reports[host].seen is None and silence(one) < _SHORT_SILENCE_SECONDS
        )
        return {
            host: silence(connection)
            for host, connection in self._connections.items()
            if self.reports[host].seen is None
        }

    def look_without_agent(self, pids: Iterable[int]) -> None:
        """Read the records of the ranks among these processes, if the agent of this host was killed.

        It may not have told yet that the ranks have made steps. Without steps, the job would not start again.
        """
        own, now = self._agents.own, time.monotonic()
        if own in self._connections and self._connections[own].is_closed:
            views = [to_json(RankView(record, record.pid)) for record in records_of(pids)]
            self.take(own, {"ranks": views}, now, now)

    def end(self, linger_seconds: float) -> None:
        """End the job's processes that remain on every host that can be reached, and receive their last reports."""
        self._send_all({"end": linger_seconds})
        self._sweep(linger_seconds)
        self._wait(
            linger_seconds + END_SECONDS, lambda host, one: self.reports[host].left is None and self._may_answer(one)
        )

    def _sweep(self, linger_seconds: float) -> None:
        """Have a new agent in place of each one that was killed, which ends what is left."""
        for host, connection in list(self._connections.items()):
            report, wish = self.reports[host], self._wishes[host]
            if not connection.is_closed or report.left is not None or not connection.has_spoken:
                continue
            sweep = {key: wish[key] for key in ("token", "roll_call")}
            sweep |= {"files": report.files, "since": report.since or None, "linger_seconds": linger_seconds}
            patience = _LOGIN_SECONDS if connection.how_killed() else _LOGIN_SECONDS_OF_BROKEN
            new = self._agents.have([host])[host]
            new.heard_seconds = time.monotonic() + patience - SILENCE_SECONDS
            self._connections = {**self._connections, host: new}
            self._send(new, {"wish": sweep})

    def _wait(self, seconds: float, waits: Callable[[str, Connection], bool]) -> None:
        """Wait for so long while one of the hosts is to answer yet."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(waits(host, one) for host, one in self._connections.items()):
            time.sleep(_ANSWER_LOOK_SECONDS)

    def _may_answer(self, connection: Connection) -> bool:
        limit = PATIENCE_SECONDS if connection.host == self._agents.own else SILENCE_SECONDS
        return not connection.is_closed and silence(connection) < limit

    def beat(self) -> None:
        """Tell the keepers what the ranks do. The thread of the agents calls, every second."""
        if self._keepers is None:
            return
        lost = self.lost()
        has_failed = self.is_interrupted or self.failed() is not None
        records = [record for rank, record in self.records().items() if rank not in lost]
        _, gone = self.seen()  # without pidfd_open(2) it may not be known which end was the first
        is_ending = bool(self.first_ends() or gone.keys() - lost)
        self._keepers.beat(records, is_ending=is_ending, has_failed=has_failed)

    def judge(self, now: float, *, is_sure: bool) -> None:
        """Check whether there is trouble. Without `is_sure`, silence is not taken as trouble. The thread of the agents
        calls."""
        if self._orders is not None:
            self._orders.look(self)
        if not (self.is_kept and is_sure) or self.trouble is not None:
            return
        with self._lock:
            connections, reports = self._connections, self.reports
        answered = {host: one.answered_seconds for host, one in connections.items()}
        trouble = host_trouble(connections, reports, answered, self._agents.own, now)
        if connections is self._connections:  # the attempt may have been narrowed meanwhile
            self.trouble = trouble

    def _send_all(self, message: Mapping[str, Any]) -> None:
        for connection in self._connections.values():
            self._send(connection, message)

    def _send(self, connection: Connection, message: Mapping[str, Any]) -> None:
        self._agents.send(connection, {"attempt": self.token, **message})
