"""The jobs of this user on several hosts, as each host's roster reports them; how one of them is ended or changed.

A job that has lost its launcher is kept for a while: its ranks have ended, and keepers hold its state (keeper.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.launch.connections import COMMON, connect, typed_on
from mpitrain.launch.placement import Placement
from mpitrain.watching.ranges import rank_ranges
from mpitrain.watching.rank_record import BUSY, ENDED, WAITS
from mpitrain.watching.view import RankView, from_json

# The modules of the roster, each after those that it imports.
ROSTER = (*COMMON, "watching.served_record", "launch.control", "launch.roster")
_ANSWER_SECONDS = 45.0  # hosts with jobs are busy: a login and the start of Python take seconds there
_END_SECONDS = 70.0  # after the answer, a job has 17 s to end
# A server publishes its state every second, but not in a hook or in an update.
_SILENT_SECONDS = 5.0
_CHANGE_SECONDS = 90.0  # a host that is to join has 45 s to answer


@dataclass
class RunningJob:
    """What is known of a job: its processes by host, its ranks, when it began, and what its server says (roster.py)."""

    token: str
    script: str = ""
    since: float = float("inf")  # in seconds since the epoch
    ranks: dict[int, RankView] = field(default_factory=dict)
    num_processes: dict[str, int] = field(default_factory=dict)
    launcher: str = ""
    is_launched: bool = False  # the launcher is alive on one of the hosts
    is_served: bool = False  # it is of `mpitrain serve`: its only rank is the server
    served: Mapping[str, Any] = field(default_factory=dict)

    def where(self) -> str:
        """Return text such as `0-3 on node1, 4-7 on node2`, or `2 servers on node1, 8 workers (1 gone)`."""
        by_host: dict[str, list[int]] = {}
        for rank, view in sorted(self.ranks.items()):
            by_host.setdefault(view.host, []).append(rank)
        servers = f"{self.served['servers']} servers" if self.served.get("servers", 1) > 1 else "server"
        named = [f"{servers if self.is_served else rank_ranges(ranks)} on {host}" for host, ranks in by_host.items()]
        if "here" in self.served:
            here, gone = self.served["here"], self.served["joined"] - self.served["here"]
            named.append(f"{here} worker{'s' * (here != 1)}{f' ({gone} gone)' * (gone > 0)}")
        return ", ".join(named) or f"none on {', '.join(self.num_processes)}"

    def state(self, hosts: Iterable[str]) -> str:
        """Describe the state in a few words; `hosts` are those that were asked."""
        views = self.ranks.values()
        if stopped := sorted(rank for rank, view in self.ranks.items() if view.state in ("T", "t")):
            return f"{'server' if self.is_served else f'rank {rank_ranges(stopped)}'} stopped"
        if not self.is_launched and self.launcher.partition(" ")[0] in hosts:
            return "its launcher is gone"
        waits = [view.seconds for view in views if view.record.status == WAITS]
        if waits and not any(view.record.status == BUSY for view in views) and min(waits) > 10:
            return f"{len(waits)} of {len(views)} ranks wait, since {min(waits):.0f} s"
        if views and all(view.record.status == ENDED for view in views):
            return "ends"
        if paused := next((view.record.paused for view in views if view.record.steering), ""):
            return paused
        if "here" in self.served:
            return self._state_of_server()
        return "trains" if any(view.record.step for view in views) else "starts"

    def _state_of_server(self) -> str:
        joined, expected, seconds, stage = (self.served[name] for name in ("joined", "expected", "seconds", "stage"))
        if stage == "leaves":
            return "its run is over; workers still hear of it"
        if stage == "over":
            return "its run is over"
        if seconds > _SILENT_SECONDS:
            return f"server in a hook or an update, since {seconds:.0f} s"
        if joined < expected:
            return f"waits for {expected - joined} of {expected} workers"
        return "trains" if self.served["here"] else "waits for workers"

    def step(self) -> str:
        """Return the last step that a rank has begun; "-": no rank has begun one."""
        return str(max((view.record.step for view in self.ranks.values()), default=0) or "-")

    def metrics(self) -> str:
        """Return loss and samples per second, of the lowest rank that has reported them; "-": none has.

        Updates of a server come in bursts, so its speed is that of its answers.
        """
        reported = next((view.record.metrics for _, view in sorted(self.ranks.items()) if view.record.metrics), {})
        if reported and "all" in self.served:
            reported = {**reported, "samples/s": self.served["all"]["samples_per_second"]}
        return ", ".join(f"{name} {value:.4g}" for name, value in reported.items()) or "-"


@dataclass(frozen=True)
class KeptJob:
    """A job that may restart, as its keepers know it. It need not have lost its launcher.

    Attributes:
        estate: as keepers.py says.
        keepers: the names of the sockets of the keepers, by host, in the order of the hosts of the job.
        step: the last step that a rank has begun, as far as its launcher had heard.
        lost_ms: when the launcher was lost, by time.time(), in milliseconds; 0: a keeper hears it.
        until_ms: until when all of it is kept.
        is_launched: the launcher is known to be alive.
    """

    estate: Mapping[str, Any]
    keepers: Mapping[str, str]
    step: int
    lost_ms: int
    until_ms: int
    is_launched: bool

    @property
    def token(self) -> str:
        """The id of its last attempt."""
        return str(self.estate["tries"][-1])

    @property
    def is_lost(self) -> bool:
        """True if another launcher may continue with it."""
        return self.lost_ms > 0 and not self.is_launched


def find_jobs(placement: Placement) -> tuple[list[RunningJob], dict[str, str]]:
    """Return the jobs on the machines of `placement`, oldest first; and by host why a host could not be asked."""
    answers, wrong = _ask(placement, {}, _ANSWER_SECONDS)
    return _running(answers), wrong


def find_all(placement: Placement, *, is_whole: bool = False) -> tuple[list[RunningJob], list[KeptJob], dict[str, str]]:
    """Return also those that keepers hold; if `is_whole`, with their environments, which may have secrets."""
    answers, wrong = _ask(placement, {"kept": 1 + is_whole}, _ANSWER_SECONDS)
    return _running(answers), kept_jobs({host: answer["kept"] for host, answer in answers.items()}), wrong


def kept_jobs(by_host: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[KeptJob]:
    """Sort the answers of each host's snapshot agents (roster.kept) by job. A pure function.

    A keeper that was cut off before the last attempt of a job began is left out: the others have gone on without it, so
    its copy of a step may have other bits than theirs.
    """
    by_job: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for host, entries in by_host.items():
        for entry in entries:
            by_job.setdefault(entry["estate"]["tries"][0], []).append((host, entry))
    jobs = []
    for entries_of_job in by_job.values():
        most = max(len(entry["estate"]["tries"]) for _, entry in entries_of_job)
        newest = {host: entry for host, entry in entries_of_job if len(entry["estate"]["tries"]) == most}
        # One that was cut off has not heard what the launcher said last.
        first = min(newest.values(), key=lambda entry: "lost_ms" in entry)
        order = [host for host, _, _ in first["estate"]["places"]]
        hosts = sorted(newest, key=lambda host: order.index(host) if host in order else len(order))
        lost = [entry.get("lost_ms", 0) for entry in newest.values()]
        jobs.append(
            KeptJob(
                first["estate"],
                {host: newest[host]["keeper"] for host in hosts},
                max(entry["step"] for entry in newest.values()),
                max(lost) if all(lost) else 0,
                min(entry.get("until_ms", 0) for entry in newest.values()),
                any(entry["is_launched_here"] for _, entry in entries_of_job),
            )
        )
    return sorted(jobs, key=lambda job: float(job.estate["since"]))


def _running(answers: Mapping[str, Any]) -> list[RunningJob]:
    by_id: dict[str, RunningJob] = {}
    for host, answer in answers.items():
        for entry in answer["jobs"]:
            job = by_id.setdefault(entry["id"], RunningJob(entry["id"]))
            job.script = job.script or " ".join(entry["script"])
            job.since = min(job.since, entry["since"])
            job.launcher = job.launcher or entry["launcher"]
            job.is_launched = job.is_launched or entry["is_launched_here"]
            job.is_served = job.is_served or entry["is_served"]
            job.served = job.served or entry["served"]
            job.num_processes[host] = len(entry["pids"])
            for view in (from_json(fields, host) for fields in entry["ranks"]):
                job.ranks[view.record.rank] = view
    return sorted(by_id.values(), key=lambda job: job.since)


def end_job(placement: Placement, token: str, *, keeps: bool = False) -> tuple[dict[str, list[str]], dict[str, str]]:
    """End a job on all hosts. Return by host the processes that survived, and why a host could not be asked.

    What keepers hold of it is dropped, unless it `keeps` that.
    """
    answers, wrong = _ask(placement, {"end": token, **({"keeps": 1} if keeps else {})}, _END_SECONDS)
    return {host: [f"{pid} {line}" for pid, line in answer["left"]] for host, answer in answers.items()}, wrong


def tell_launcher(placement: Placement, token: str, wish: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Send a request to a job's launcher (control.py). Return its answer, {} if none came; and why hosts were not
    asked."""
    answers, wrong = _ask(placement, {"change": token, "how": wish}, _CHANGE_SECONDS)
    return next((told["answer"] for told in answers.values() if told["answer"]), {}), wrong


def _ask(placement: Placement, wish: Mapping[str, Any], seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Return every host's answer, and by host why there is none."""
    hosts = placement.machines
    now = time.monotonic()
    connections = {host: connect(host, host == placement.own, wish, now, ROSTER) for host in hosts}
    answers: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    deadline = now + seconds
    while len(answers) + len(wrong) < len(hosts) and time.monotonic() < deadline:
        for host, connection in connections.items():
            if host in answers or host in wrong:
                continue
            connection.flush()
            for message in connection.receive(time.monotonic()):
                answers[host] = message
            if connection.is_closed and host not in answers:
                wrong[host] = connection.why_closed()
        time.sleep(0.02)
    for host, connection in connections.items():
        connection.hang_up()
        connection.close(0.5)
        if host not in answers and host not in wrong:
            wrong[host] = f"{host}: no answer within {seconds:g} s; does `{typed_on(host, 'true')}` come back at once?"
    return {host: answers[host] for host in hosts if host in answers}, wrong
