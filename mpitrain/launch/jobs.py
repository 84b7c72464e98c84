"""The jobs of this user on several hosts, as each host's roster has them; and the end of one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.launch.activity import BUSY, ENDED, WAITS
from mpitrain.launch.connections import connect
from mpitrain.launch.hosts import Layout
from mpitrain.launch.output import rank_ranges

_ROSTER = ("activity", "shared_files", "deaths", "facts", "guard", "roster")
_ANSWER_SECONDS = 15.0
_END_SECONDS = 40.0


@dataclass
class RunningJob:
    """What is known of a job: its processes by host, rows of roster.jobs of its ranks, when it began."""

    token: str
    script: str = ""
    since: float = float("inf")  # seconds since the epoch
    ranks: dict[int, tuple[str, list[Any]]] = field(default_factory=dict)  # host and row
    num_processes: dict[str, int] = field(default_factory=dict)
    launcher: str = ""
    is_launched: bool = False  # its launcher is alive on one of the hosts

    def where(self) -> str:
        """Such as `0-3 on node1, 4-7 on node2`."""
        by_host: dict[str, list[int]] = {}
        for rank, (host, _) in sorted(self.ranks.items()):
            by_host.setdefault(host, []).append(rank)
        named = [f"{rank_ranges(ranks)} on {host}" for host, ranks in by_host.items()]
        return ", ".join(named) or f"none on {', '.join(self.num_processes)}"

    def state(self, hosts: Iterable[str]) -> str:
        """In a few words; `hosts` are those that were asked."""
        rows = [row for _, row in self.ranks.values()]
        if stopped := sorted(row[0] for row in rows if row[2] in "Tt"):
            return f"rank {rank_ranges(stopped)} stopped"
        if not self.is_launched and self.launcher.partition(" ")[0] in hosts:
            return "its launcher is gone"
        waits = [row for row in rows if row[3] == WAITS]
        if waits and not any(row[3] == BUSY for row in rows) and min(row[4] for row in waits) > 10:
            return f"{len(waits)} of {len(rows)} ranks wait, since {min(row[4] for row in waits):.0f} s"
        if rows and all(row[3] == ENDED for row in rows):
            return "ends"
        return "runs"


def hosts_of(layout: Layout) -> list[str]:
    """Their names; of a machine alone its own, not localhost."""
    return list(layout.addresses) or [socket.gethostname()]


def find_jobs(layout: Layout) -> tuple[list[RunningJob], dict[str, str]]:
    """The jobs on the hosts of `layout`, the oldest first; and by host why it could not be asked."""
    answers, wrong = _ask(layout, {}, _ANSWER_SECONDS)
    found: dict[str, RunningJob] = {}
    for host, answer in answers.items():
        for entry in answer["jobs"]:
            job = found.setdefault(entry["id"], RunningJob(entry["id"]))
            job.script = job.script or " ".join(entry["script"])
            job.since = min(job.since, entry["since"])
            job.launcher = job.launcher or entry["launcher"]
            job.is_launched = job.is_launched or entry["is_launched_here"]
            job.num_processes[host] = len(entry["pids"])
            for row in entry["ranks"]:
                job.ranks[row[0]] = (host, row)
    return sorted(found.values(), key=lambda job: job.since), wrong


def end_job(layout: Layout, token: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """End a job on all hosts: by host the processes that could not be ended, and why a host could not be asked."""
    answers, wrong = _ask(layout, {"end": token}, _END_SECONDS)
    return {host: [f"{pid} {line}" for pid, line in answer["left"]] for host, answer in answers.items()}, wrong


def _ask(layout: Layout, wish: Mapping[str, Any], seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Every host's answer, and by host why there is none."""
    hosts = hosts_of(layout)
    now = time.monotonic()
    is_alone = not layout.addresses
    connections = {host: connect(host, is_alone or host == layout.own, wish, now, _ROSTER) for host in hosts}
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
            wrong[host] = f"{host}: no answer within {seconds:g} s; does `ssh {host} true` come back at once?"
    return {host: answers[host] for host in hosts if host in answers}, wrong
