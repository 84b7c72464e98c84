"""`mpitrain ps`: list this user's jobs of `mpitrain run` and `mpitrain serve`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mpitrain.cli.changing import add_job_argument
from mpitrain.cli.launching import add_inventory_argument
from mpitrain.cli.terminal_text import columns_of, cut, print_object
from mpitrain.cli.workers_table import table

if TYPE_CHECKING:
    from mpitrain.launch.jobs import KeptJob, RunningJob

_COLUMNS = 40  # of metrics in the list

HELP = "list the jobs that run, and those that can be resumed"
PAGE = "how-to/run-jobs.md"

_EPILOG = """\
If this machine is a node of a cluster, ps looks on all hosts of the cluster,
otherwise only on this machine. Give the id of a job to `mpitrain kill ID`, or
that of a kept one to `mpitrain resume ID`.

With the id of a job, ps lists this job alone, with all its metrics. If the job
has a server, ps also shows each worker, the queue, and how stale the gradients
are.

  mpitrain ps
  mpitrain ps 1a2b3c4d
  mpitrain ps --hosts node1,node2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add_host_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_job_argument(parser, "the id of a job: only this one, with the workers of its server", nargs="?")


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say where to look."""
    parser.add_argument("--hosts", metavar="A,B", help="hosts to look on; localhost for this machine")
    add_inventory_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print one line per job. Return 1 if a host could not be asked, or a server's published data cannot be read."""
    from mpitrain.launch.hosts import place_ranks
    from mpitrain.launch.jobs import find_all

    placement = place_ranks(arguments.hosts, arguments.inventory, None, 1)
    jobs, kept, wrong = find_all(placement)
    hosts = placement.machines
    newest = {one.token for one in kept if arguments.job in one.estate["tries"]}  # each attempt has an id of its own
    shown = [job for job in jobs if arguments.job in (None, job.token) or job.token in newest]
    problems = [
        f"job {job.token}: its server's list of workers cannot be read: {job.served['damaged']}. Look at "
        "what the server itself prints"
        for job in shown
        if "damaged" in job.served
    ]
    running = {job.token for job in jobs}
    lost = [
        one
        for one in kept
        if one.is_lost and arguments.job in (None, *one.estate["tries"]) and running.isdisjoint(one.estate["tries"])
    ]
    waiting = [
        one
        for one in kept
        if one.is_launched and one.estate.get("waits") and running.isdisjoint(one.estate["tries"])
        if arguments.job in (None, *one.estate["tries"])
    ]
    if arguments.job is not None and not (shown or lost or waiting):
        known = ", ".join(job.token for job in jobs) or "none"
        problems.append(f"there is no job {arguments.job} of yours on {', '.join(hosts)}; running: {known}")
    problems += wrong.values()
    if arguments.json:
        print_object({**_document(shown, lost, waiting, hosts), "problems": problems})
    else:
        _print(shown, lost, waiting, hosts, arguments.job, is_complete=not problems)
    for line in problems:
        print(f"mpitrain ps: {line}", file=sys.stderr)
    return int(bool(problems))


def _print(
    shown: Sequence[RunningJob],
    lost: Sequence[KeptJob],
    waiting: Sequence[KeptJob],
    hosts: Sequence[str],
    job_id: str | None,
    *,
    is_complete: bool,
) -> None:
    """Print the table; of one job also all metrics, and the workers of its server."""
    from mpitrain.cli.workers_table import lines_of

    rows = [("JOB", "SINCE", "STATE", "STEP", "METRICS", "RANKS", "SCRIPT")]
    rows += [
        (job.token, _time(job.since), job.state(hosts), job.step(), _cut(job.metrics()), job.where(), job.script)
        for job in shown
    ]
    for one in (*lost, *waiting):
        until = time.strftime("%H:%M:%S", time.localtime(one.until_ms / 1000))
        state = _waits(one) or f"kept until {until}: mpitrain resume {one.token}"
        where = f"none, its state on {', '.join(one.keepers)}"
        since, script = _time(one.estate["since"]), " ".join(one.estate["request"]["program"])
        rows.append((one.token, since, state, str(one.step or "-"), "-", where, script))
    if len(rows) > 1:
        print(_fitting(rows, columns_of(sys.stdout)))
    elif is_complete:
        print(f"no job of yours is running on {', '.join(hosts)}")
    for job in shown if job_id is not None else ():
        if job.metrics() != _cut(job.metrics()):
            print(f"\nmetrics: {job.metrics()}")
        if "here" in job.served:
            print("\n".join(["", *lines_of(job.served)]))


def _fitting(rows: Sequence[tuple[str, ...]], columns: int | None) -> str:
    """Return the table; on a narrow terminal without metrics, and then also without times, so that no line wraps."""
    for left_out in ((), (4,), (1, 4)):
        fewer = [tuple(text for place, text in enumerate(row) if place not in left_out) for row in rows]
        lines = table(fewer, len(fewer[0]))
        if columns is None or max(map(len, lines)) <= columns:
            break
    return cut(lines, sys.stdout)


def _waits(one: KeptJob) -> str:
    """Return the state of a job that has no ranks, because it waits for hosts; "": it does not."""
    return f"waits for {one.estate['waits']}" if one.is_launched and one.estate.get("waits") else ""


def _document(
    shown: Iterable[RunningJob], lost: Iterable[KeptJob], waiting: Iterable[KeptJob], hosts: Sequence[str]
) -> dict[str, Any]:
    """Return what --json prints: times are in seconds since the epoch, ranks are by host."""
    from mpitrain.launch.live_picture import facts_of

    running = []
    for job in shown:
        ranks: dict[str, list[int]] = {}
        for rank, view in sorted(job.ranks.items()):
            ranks.setdefault(view.host, []).append(rank)
        reported = next((view.record.metrics for _, view in sorted(job.ranks.items()) if view.record.metrics), {})
        running.append(
            {
                "job": job.token,
                "since": job.since,
                "state": job.state(hosts),
                "step": max((view.record.step for view in job.ranks.values()), default=0),
                "metrics": dict(reported),
                "ranks": ranks,
                "facts": {rank: facts_of(view.record) for rank, view in sorted(job.ranks.items())},
                "processes": dict(job.num_processes),
                "launcher": job.launcher.partition(" ")[0],
                "script": job.script,
                "server": dict(job.served),
            }
        )
    running += [
        {
            "job": one.token,
            "since": one.estate["since"],
            "state": _waits(one),
            "step": one.step,
            "metrics": {},
            "ranks": {},
            "facts": {},
            "processes": {},
            "launcher": one.estate["own"],
            "script": " ".join(one.estate["request"]["program"]),
            "server": {},
        }
        for one in waiting
    ]
    kept = [
        {
            "job": one.token,
            "since": one.estate["since"],
            "until": one.until_ms / 1000,
            "step": one.step,
            "hosts": list(one.keepers),
            "script": " ".join(one.estate["request"]["program"]),
        }
        for one in lost
    ]
    return {"hosts": list(hosts), "jobs": running, "kept": kept}


def _cut(metrics: str) -> str:
    """Return the metrics that fit into a table: a job with mt.Record has many."""
    if len(metrics) <= _COLUMNS:
        return metrics
    begun = metrics[:_COLUMNS]
    return f"{begun.rpartition(',')[0] or begun}, ..."


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
