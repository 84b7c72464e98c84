"""Why a job must be ended because of its start or its hosts: pure functions of the agents' messages and their times.

**Its start** (`start_problem`): all ranks must arrive, or the others wait for a rank that never will. Of a program that
never imports mpitrain only the start of its ranks is known. Such a job is ended only if a rank never started, or ended
early while the others use no processor. Ranks that end normally wait for each other in MPI_Finalize (seen with MPICH
and Open MPI), so those others still wait in MPI_Init.

**Its hosts** (`host_trouble`): a connection has broken, a host is silent, or an agent hangs. An agent gives a
sign of life every second, from a thread that does nothing else, so a busy host is late by less than a second or two.
What makes all hosts late at once is on this machine: its cable, or its own load.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mpitrain.launch.connections import LATE_SECONDS, Connection
from mpitrain.launch.placement import Place
from mpitrain.launch.reports import HostReport
from mpitrain.watching.ranges import rank_ranges
from mpitrain.watching.rank_record import BEGUN, CALLED, FAILED, STARTED

# A rank that fails before init() usually ends the job by itself a moment later.
_GONE_SECONDS = 5.0
_MOST_PROCESSES = 8  # shown per host in a diagnosis
_OF_MPIEXEC = re.compile(r"(\S*/)?(mpiexec|mpirun|hydra_|prte|srun)")

When = Mapping[str, Mapping[int, float]]  # by phase, by rank


def start_problem(
    places: Sequence[Place],
    when: When,
    gone: Mapping[int, float],
    *,
    since: float,
    now: float,
    start_seconds: float,
    read_at: Mapping[int, float] = MappingProxyType({}),
    idle_seconds: float = math.inf,
) -> str | None:
    """Return in one line what is wrong with the start; None if nothing is wrong, or not yet.

    Args:
        places: the ranks of each host.
        when: by phase, which rank reached it at what time.
        gone: the ranks whose processes have ended, each with the time.
        since: the time when mpiexec was started.
        now: the present time, by the same clock.
        start_seconds: how long the start may take; 0: without limit.
        read_at: when ranks have last read files before init(). A rank that imports from a slow share is not late.
        idle_seconds: for how long no rank has used a processor, if none has called init().
    """
    everyone = {rank for place in places for rank in place.ranks}
    # A rank that failed may have left init() unseen; it has reported the reason for its end itself.
    late = everyone - when[BEGUN].keys() - when[FAILED].keys()
    if not late:
        return None
    called = when[CALLED]
    dead = gone.keys() & late
    if called and any(now - gone[rank] > _GONE_SECONDS for rank in dead):
        where = "before init() had returned" if dead & called.keys() else "before calling init()"
        return f"{_names(dead, places)} ended {where}, and the others wait there; see its output above"
    if not start_seconds:
        return None
    longer = "if its start takes longer: --start-timeout 600s, 0 for no limit"
    if called:
        away = late - called.keys()
        if now - max([min(called.values()), *(read_at.get(rank, 0.0) for rank in away)]) > start_seconds:
            first = _names({min(called, key=lambda rank: called[rank])}, places)
            if away:
                return f"{_names(away, places)}: did not call init() within {start_seconds:g} s after {first}; {longer}"
            return f"init() has not returned on {_names(late, places)}, {start_seconds:g} s after {first} called it"
    elif idle_seconds >= start_seconds and any(gone[rank] - since < start_seconds < now - gone[rank] for rank in gone):
        return (
            f"{_names(set(gone), places)} ended early, and the others have used no processor for {start_seconds:g} s: "
            "they wait in MPI_Init, or for a rank that has left (if they wait for something else: --start-timeout 0)"
        )
    if now - since > start_seconds and (absent := everyone - when[STARTED].keys()):
        return f"{_names(absent, places)} did not start within {start_seconds:g} s; {longer}"
    return None


def misplaced(places: Sequence[Place], reports: Mapping[str, HostReport]) -> str | None:
    """Return an error if a rank runs on another host than planned, and so has another rank's device; else None."""
    for host, report in reports.items():
        for rank in sorted(report.ranks):
            if host != (meant := next(place.host for place in places if rank in place.ranks)):
                return (
                    f"rank {rank} has started on {host} and was planned for {meant}: mpiexec reads --hosts differently"
                )
    return None


def diagnosis(
    places: Sequence[Place], when: When, gone: Mapping[int, float], reports: Mapping[str, HostReport]
) -> list[str]:
    """List what each host's ranks do, the processes of ranks that are behind, and the check to run."""
    lines = []
    for place in places:
        steps: dict[str, list[int]] = {}
        for rank in place.ranks:
            steps.setdefault(_step(rank, when, gone), []).append(rank)
        state = "; ".join(f"{_ranks(ranks)} {step}" for step, ranks in steps.items())
        processes = reports[place.host].processes
        if processes is None:
            lines.append(f"{place.host}: {state}; its agent does not report what runs there")
            continue
        lines.append(f"{place.host}: {state}; {len(processes)} processes of the job there")
        if any(rank not in when[CALLED] and rank not in gone for rank in place.ranks):
            lines += _list(processes)
    return lines + _dropped({(host, peer) for host, report in reports.items() for peer in report.unreachable})


def left_over(reports: Mapping[str, HostReport]) -> list[str]:
    """List the processes that ranks have started and left: mpiexec waits until nobody can write to its output."""
    lines = ["all ranks have ended, and mpiexec waits for processes that they have started, which may still write:"]
    for host, report in reports.items():
        left = [one for one in report.processes or () if not _OF_MPIEXEC.match(one[2])]
        lines += [f"    {host}:{line.removeprefix('   ')}" for line in _list(left)]
    return lines


def _list(processes: Sequence[tuple[int, str, str]]) -> list[str]:
    return [f"    {pid} {how} {line[:100]}" for pid, how, line in processes[:_MOST_PROCESSES]]


def _dropped(pairs: set[tuple[str, str]]) -> list[str]:
    """List which hosts cannot reach which, and the remedy; `pairs` are (who tried, to whom)."""
    if not pairs:
        return []
    # The host in most of the pairs is the likeliest cause.
    hosts = sorted({host for pair in pairs for host in pair})
    worst = max(hosts, key=lambda host: sum(host in pair for pair in pairs))
    lines = []
    for peer in sorted({peer for _, peer in pairs}, key=lambda peer: peer != worst):
        tried = ", ".join(sorted(host for host, to in pairs if to == peer))
        lines.append(f"{peer} does not answer {tried} on the high ports that MPI uses; does a firewall drop them?")
    remedy = "`ansible-playbook cluster/setup.yml --tags firewall` lets the nodes trust each other"
    return [*lines, f"look at {worst} first: `ssh {worst} sudo nft list ruleset`; {remedy}"]


def _step(rank: int, when: When, gone: Mapping[int, float]) -> str:
    if rank in when[FAILED]:
        return "has failed"
    if rank in when[BEGUN]:
        return "has begun"
    where = "in init()" if rank in when[CALLED] else "before init()"
    if rank in gone:
        return f"ended {where}"
    return f"runs, {where}" if rank in when[STARTED] else "has not started"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {rank_ranges(sorted(ranks))}"


def _names(ranks: set[int], places: Sequence[Place]) -> str:
    """List ranks by host, such as `rank 2 on node3, ranks 4,5 on node4`."""
    by_host = [(place.host, sorted(ranks & set(place.ranks))) for place in places]
    return ", ".join(f"{_ranks(host_ranks)} on {host}" for host, host_ranks in by_host if host_ranks)


SILENCE_SECONDS = 5.0  # a host is lost after this silence
# So long all other hosts together may be silent, this machine's own agent, and an agent that lives but does not answer.
PATIENCE_SECONDS = 15.0
AGENT_SILENCE_SECONDS = 30.0  # after this silence of the launcher, an agent ends the job on its host


def host_trouble(
    connections: Mapping[str, Connection],
    reports: Mapping[str, HostReport],
    answered: Mapping[str, float],
    own: str,
    now: float,
) -> str | None:
    """Return why the job must be ended; None: it can continue. Note in the reports which hosts have vanished.

    Args:
        connections: to the agent of each host.
        reports: of each host.
        answered: when each agent has last answered a beat, by the clock of `now`.
        own: the name of this machine among the hosts.
        now: the present time, by the clock of the connections.
    """
    closed = [host for host, one in connections.items() if one.is_closed and reports[host].left is None]
    if closed:
        for host in closed:  # a new agent can take the place of one that was killed
            reports[host].has_vanished = not connections[host].how_killed()
        return "\n".join([*(_why_closed(connections[host]) for host in closed), "The job is ended on all hosts"])
    silent = {host: now - connection.heard_seconds for host, connection in connections.items()}
    lost = lost_hosts(silent, own, {host: now - connection.back_seconds for host, connection in connections.items()})
    for host in lost:
        reports[host].has_vanished = True
    if lost:
        return account_of(lost, silent)
    for host, seconds in answered.items():
        if now - seconds > PATIENCE_SECONDS:
            reports[host].has_vanished = True
            return (
                f"{host}: the agent of the job there lives, but has not answered for {now - seconds:.0f} s: the host "
                "has too little memory, or a disk or share there hangs. The job is ended on all hosts"
            )
    return None


def _why_closed(connection: Connection) -> str:
    if killed := connection.how_killed():
        return f"{connection.host}: the agent of the job there {killed}"
    return f"the connection to {connection.why_closed()}"


def lost_hosts(silent: Mapping[str, float], own: str, back: Mapping[str, float] = MappingProxyType({})) -> list[str]:
    """Return the hosts that are lost.

    A host that is late may be lost too. It is soon known: hosts that are lost together are found together. After this
    machine was cut off, TCP tries again after up to as long as the cut was, on each connection at another time.

    Args:
        silent: how long each host has been silent, in seconds.
        own: the name of this machine among them.
        back: how long ago each host was heard again after it had been late, in seconds.
    """
    others = {host: seconds for host, seconds in silent.items() if host != own}
    late = [host for host, seconds in others.items() if seconds > LATE_SECONDS]
    lost = [host for host in late if others[host] > SILENCE_SECONDS]
    longest = max((others[host] for host in lost), default=0.0)
    were_late = [host for host in others if host in late or back.get(host, math.inf) < longest]
    are_all_late = len(were_late) == len(others) > 1
    if lost and (are_all_late or len(late) > len(lost)) and max(others.values()) <= PATIENCE_SECONDS:
        lost = []
    return lost + [host for host, seconds in silent.items() if host == own and seconds > PATIENCE_SECONDS]


def account_of(lost: Sequence[str], silent: Mapping[str, float]) -> str:
    """Describe in a line what is known of lost hosts."""
    seconds = max(silent[host] for host in lost)
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    noun, pronoun = ("this host", "it") if len(lost) == 1 else ("these hosts", "each of them")
    return (
        f"{', '.join(lost)}: no message from {noun} since {since}, for {seconds:.0f} s: {pronoun} lost power or its "
        f"network, or it is frozen. Does `ssh {lost[0]} true` return? The job is ended on all hosts; the rest on "
        f"{', '.join(lost)} ends {AGENT_SILENCE_SECONDS:g} s after it last heard from here"
    )
