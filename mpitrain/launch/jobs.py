"""The jobs of this user on several hosts, as each host's roster reports them; how one of them is ended or changed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.launch.connections import GUARD, connect
from mpitrain.launch.placement import Placement
from mpitrain.watching.ranges import rank_ranges
from mpitrain.watching.rank_record import BUSY, ENDED, WAITS
from mpitrain.watching.view import RankView, from_json

# The modules of the roster, each after those that it imports.
ROSTER = (*GUARD, "launch.kept", "launch.wishes", "launch.roster")
_ANSWER_SECONDS = 45.0  # hosts with jobs are busy: a login and the start of Python take seconds there
_END_SECONDS = 70.0  # after the answer, a job has 17 s to end
_CHANGE_SECONDS = 90.0  # a host that is to join has 45 s to answer


@dataclass
class RunningJob:
    """What is known of a job: its processes by host, its ranks, when it began."""

    token: str
    script: str = ""
    since: float = float("inf")  # in seconds since the epoch
    ranks: dict[int, RankView] = field(default_factory=dict)
    num_processes: dict[str, int] = field(default_factory=dict)
    launcher: str = ""
    is_launched: bool = False  # the launcher is alive on one of the hosts

    def where(self) -> str:
        """Return text such as `0-3 on node1, 4-7 on node2`."""
        by_host: dict[str, list[int]] = {}
        for rank, view in sorted(self.ranks.items()):
            by_host.setdefault(view.host, []).append(rank)
        named = [f"{rank_ranges(ranks)} on {host}" for host, ranks in by_host.items()]
        return ", ".join(named) or f"none on {', '.join(self.num_processes)}"

    def state(self, hosts: Iterable[str]) -> str:
        """Describe the state in a few words; `hosts` are those that were asked."""
        views = self.ranks.values()
        if stopped := sorted(rank for rank, view in self.ranks.items() if view.state in ("T", "t")):
            return f"rank {rank_ranges(stopped)} stopped"
        if not self.is_launched and self.launcher.partition(" ")[0] in hosts:
            return "its launcher is gone"
        waits = [view.seconds for view in views if view.record.status == WAITS]
        if waits and not any(view.record.status == BUSY for view in views) and min(waits) > 10:
            return f"{len(waits)} of {len(views)} ranks wait, since {min(waits):.0f} s"
        if views and all(view.record.status == ENDED for view in views):
            return "ends"
        return "runs"

    def step(self) -> str:
        """Return the last step that a rank has begun; "-": no rank has begun one."""
        return str(max((view.record.step for view in self.ranks.values()), default=0) or "-")

    def metrics(self) -> str:
        """Return loss and samples per second, of the lowest rank that has reported them; "-": none has."""
        reported = next((view.record.metrics for _, view in sorted(self.ranks.items()) if view.record.metrics), {})
        return ", ".join(f"{name} {value:.4g}" for name, value in reported.items()) or "-"


def find_jobs(placement: Placement) -> tuple[list[RunningJob], dict[str, str]]:
    """Return the jobs on the machines of `placement`, oldest first; and by host why a host could not be asked."""
    answers, wrong = _ask(placement, {}, _ANSWER_SECONDS)
    by_id: dict[str, RunningJob] = {}
    for host, answer in answers.items():
        for entry in answer["jobs"]:
            job = by_id.setdefault(entry["id"], RunningJob(entry["id"]))
            job.script = job.script or " ".join(entry["script"])
            job.since = min(job.since, entry["since"])
            job.launcher = job.launcher or entry["launcher"]
            job.is_launched = job.is_launched or entry["is_launched_here"]
            job.num_processes[host] = len(entry["pids"])
            for view in (from_json(fields, host) for fields in entry["ranks"]):
                job.ranks[view.record.rank] = view
    return sorted(by_id.values(), key=lambda job: job.since), wrong


def end_job(placement: Placement, token: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """End a job on all hosts. Return by host the processes that survived, and why a host could not be asked."""
    answers, wrong = _ask(placement, {"end": token}, _END_SECONDS)
    return {host: [f"{pid} {line}" for pid, line in answer["left"]] for host, answer in answers.items()}, wrong


def change_hosts(placement: Placement, token: str, wish: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Tell a job's launcher a wish (wishes.py). Return its answer, {} if none came; and why hosts were not asked."""
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
            wrong[host] = f"{host}: no answer within {seconds:g} s; does `ssh {host} true` come back at once?"
    return {host: answers[host] for host in hosts if host in answers}, wrong
