"""Whether all ranks of a job over several hosts have arrived, or the others wait for a rank that never will.

Pure functions of who has reached which phase when. Of a program that never imports mpitrain only the start of its ranks
is known. Such a job is ended only if a rank never started, or ended early while the others went on. Ranks that end
normally wait for each other in MPI_Finalize (seen with MPICH and Open MPI), so those others still wait in MPI_Init.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpitrain.launch.host_report import HostReport
from mpitrain.launch.placement import Place
from mpitrain.watching.ranges import rank_ranges
from mpitrain.watching.rank_record import BEGUN, CALLED, FAILED, STARTED

# A rank that fails before init() usually ends the job by itself a moment later.
_GONE_SECONDS = 5.0
_MOST_PROCESSES = 8  # shown per host in a diagnosis

When = Mapping[str, Mapping[int, float]]  # by phase, by rank


def problem(
    places: Sequence[Place],
    when: When,
    gone: Mapping[int, float],
    *,
    since: float,
    now: float,
    start_seconds: float,
) -> str | None:
    """Return in one line what is wrong with the start; None if nothing is wrong, or not yet.

    Args:
        places: the ranks of each host.
        when: by phase, which rank reached it at what time.
        gone: the ranks whose processes have ended, each with the time.
        since: the time when mpiexec was started.
        now: the present time, by the same clock.
        start_seconds: how long the start may take; 0: without limit.
    """
    everyone = {rank for place in places for rank in place.ranks}
    # A rank that failed may have left init() unseen; it has reported the reason for its end itself.
    late = everyone - when[BEGUN].keys() - when[FAILED].keys()
    if not start_seconds or not late:
        return None
    longer = "if its start takes longer: --start-seconds N, 0 for no limit"
    if called := when[CALLED]:
        dead = gone.keys() & late
        if any(now - gone[rank] > _GONE_SECONDS for rank in dead):
            where = "before init() had returned" if dead & called.keys() else "before calling init()"
            return f"{_names(dead, places)} ended {where}, and the others wait there; see its output above"
        if now - min(called.values()) > start_seconds:
            first = _names({min(called, key=lambda rank: called[rank])}, places)
            if away := late - called.keys():
                return f"{_names(away, places)}: did not call init() within {start_seconds:g} s after {first}; {longer}"
            return f"init() has not returned on {_names(late, places)}, {start_seconds:g} s after {first} called it"
    elif any(gone[rank] - since < start_seconds < now - gone[rank] for rank in gone):
        return (
            f"{_names(set(gone), places)} ended early, and the others have gone on for {start_seconds:g} s: they wait "
            f"in MPI_Init, or work on after MPI_Finalize (then: --start-seconds 0)"
        )
    if now - since > start_seconds and (absent := everyone - when[STARTED].keys()):
        return f"{_names(absent, places)} did not start within {start_seconds:g} s; {longer}"
    return None


def misplaced(places: Sequence[Place], reports: Mapping[str, HostReport]) -> str | None:
    """Return an error if a rank runs on another host than planned, and so has another rank's device; else None."""
    for host, report in reports.items():
        for rank in sorted(report.ranks):
            if host != (meant := next(place.host for place in places if rank in place.ranks)):
                return f"rank {rank} has started on {host} and was meant for {meant}: mpiexec reads --hosts otherwise"
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
            lines.append(f"{place.host}: {state}; its guard does not report what runs there")
            continue
        lines.append(f"{place.host}: {state}; {len(processes)} processes of the job there")
        if any(rank not in when[CALLED] and rank not in gone for rank in place.ranks):
            lines += [f"    {pid} {how} {line[:100]}" for pid, how, line in processes[:_MOST_PROCESSES]]
    return lines + _dropped({(host, peer) for host, report in reports.items() for peer in report.unreachable})


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
