"""`mpitrain resume JOB`: a launcher continues with the job of one that has gone.

    job ─> keepers here, else on the cluster's hosts ─> estate ─> keepers on all hosts of the job ─> refuse, or
    ─> processes that are left end ─> start, as the launcher before, with the ranks' memory (keepers.adopt)

Nothing that is kept changes before all of this is clear. So after a refusal the command can be given again.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitrain.errors import LaunchError
from mpitrain.launch.events import Limits, Pause
from mpitrain.launch.hosts import place_ranks, placed_again
from mpitrain.launch.jobs import KeptJob, RunningJob, end_job, find_all, kept_jobs
from mpitrain.launch.keepers import KEEP_SECONDS, code_of
from mpitrain.launch.log import say
from mpitrain.launch.placement import Placement
from mpitrain.launch.roster import kept
from mpitrain.launch.start import Heritage, Request, start
from mpitrain.launch.trouble import AGENT_SILENCE_SECONDS

_MOST_NAMES = 5
_LOOK_SECONDS = 1.0
_LOSS_SECONDS = AGENT_SILENCE_SECONDS + 30.0


def resume(job: str, inventory: Path | None) -> int:
    """Continue with a job, see to its end, and return its exit code. Call this as start.start.

    Args:
        job: the id of any of its attempts.
        inventory: the cluster's hosts, as for `mpitrain run`.

    Raises:
        ConfigError: a host of the job is unknown here.
        LaunchError: the job is not kept, or it runs, or what it needs has changed.
    """
    inventory = inventory.absolute() if inventory else None  # the job may have another folder
    asked = _asked(job, inventory)
    one, running, wrong = _kept(job, asked)
    if one.estate["is_here"] and socket.gethostname() not in one.keepers:
        there = ", ".join(one.keepers)
        raise LaunchError(f"job {job} ran on {there} alone, so it can continue only there: give the command on {there}")
    where = _where(one.estate, inventory).led_by(one.keepers)  # an elastic job may not use all of its hosts
    if where != asked:  # its estate was found elsewhere, or is newer than the one here
        one, running, wrong = _kept(job, where)
    estate = one.estate
    _refuse_changed(job, estate)
    for host in where.machines:
        if host in wrong:
            say(wrong[host])
    if estate["own"] in wrong or estate["own"] not in where.machines:
        say(
            f"the launcher of job {job} ran on {estate['own']}. If it is alive there, it may continue with the job on "
            "the hosts that it reaches"
        )
    _end_rest(where, running, estate)
    limits = Limits(**estate["request"]["limits"])
    request = _request(estate["request"], limits)
    request = replace(request, inventory=inventory or request.inventory, detaches=False)
    since = time.monotonic() - (time.time() - one.lost_ms / 1000)
    cause = estate["ended"] or f"the launcher on {estate['own']} was lost"
    pause = Pause(cause, one.step or None, since)
    away = tuple(host for host in where.hosts if host in wrong)
    say(f"continuing with job {job} from what is kept on {', '.join(one.keepers)}")
    return start(request, Heritage(estate, one.keepers, where, away, pause))


def _asked(job: str, inventory: Path | None) -> Placement:
    """Where to look: on all hosts of the job if this is one of them, else on those of the cluster."""
    here = next((one for one in kept_jobs({"": kept()}) if job in one.estate["tries"]), None)
    return place_ranks(None, inventory, None, 1) if here is None else _where(here.estate, inventory)


def _where(estate: Mapping[str, Any], inventory: Path | None) -> Placement:
    return placed_again(estate["places"], inventory, is_here=estate["is_here"])


def _kept(job: str, asked: Placement) -> tuple[KeptJob, list[RunningJob], dict[str, str]]:
    """Return the job that is kept, what runs, and by host why a host could not be asked; or refuse."""
    deadline = time.monotonic() + _LOSS_SECONDS
    is_told = False
    while True:
        running, kept_there, wrong = find_all(asked, is_whole=True)
        one = _chosen(job, asked, running, kept_there, wrong)
        if one.is_lost:
            return one, running, wrong
        if time.monotonic() > deadline:
            raise LaunchError(
                f"job {job} is running: its keepers hear its launcher on {one.estate['own']}, which this machine does "
                f"not reach. `mpitrain kill {one.token}` ends the job on the hosts that can be reached"
            )
        if not is_told:
            say(
                f"the keepers of job {job} still wait for its launcher on {one.estate['own']}; they take it for lost "
                f"after {AGENT_SILENCE_SECONDS:g} s of silence"
            )
            is_told = True
        time.sleep(_LOOK_SECONDS)


def _chosen(
    job: str, asked: Placement, running: list[RunningJob], kept_there: list[KeptJob], wrong: Mapping[str, str]
) -> KeptJob:
    """Return the job that keepers hold, or refuse."""
    one = next((one for one in kept_there if job in one.estate["tries"]), None)
    hosts = ", ".join(asked.machines)
    if one is None:
        if any(other.token == job for other in running):
            raise LaunchError(
                f"job {job} is running on {hosts}, and nothing is kept of it; `mpitrain kill {job}` ends it"
            )
        not_asked = f" These could not be asked: {'; '.join(wrong.values())}." if wrong else ""
        raise LaunchError(
            f"nothing is kept of a job {job} of yours on {hosts}.{not_asked} A job is kept only if it may restart and "
            f"has copied its state, for {KEEP_SECONDS / 60:g} min after the loss of its launcher. "
            "`mpitrain ps` lists what is kept. If its memory is gone, start its command again: it continues from its "
            "newest checkpoint"
        )
    if one.is_launched:
        host, pid, _ = one.estate["launcher"].split()
        raise LaunchError(
            f"job {job} is running: its launcher, process {pid} on {host}, is alive. `mpitrain kill {one.token}` ends "
            "the job"
        )
    return one


def _refuse_changed(job: str, estate: Mapping[str, Any]) -> None:
    """Go into the folder of the job, and see that it would start the same again."""
    if sys.executable != estate["python"]:
        raise LaunchError(
            f"job {job} runs {estate['python']}, and this mpitrain is of {sys.executable}. Give the command with the "
            f"other one: {estate['python']} -m mpitrain resume {job}"
        )
    script = estate["request"]["script"]
    try:
        os.chdir(estate["folder"])
        now = code_of(script)
    except OSError as error:
        raise LaunchError(
            f"job {job} cannot continue here: {error.filename}: {error.strerror}. It needs its script {script} in "
            f"{estate['folder']}; is the shared folder mounted?"
        ) from None
    before = estate["code"]
    if changed := sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
        more = f" and {len(changed) - _MOST_NAMES} more" if len(changed) > _MOST_NAMES else ""
        raise LaunchError(
            f"job {job} cannot continue: since its start, {', '.join(changed[:_MOST_NAMES])}{more} in "
            f"{Path(script).absolute().parent} differ. Undo the change. Or drop what is kept, `mpitrain kill {job}`, "
            "and start the command again, which continues from its newest checkpoint"
        )


def _end_rest(where: Placement, running: list[RunningJob], estate: Mapping[str, Any]) -> None:
    """End the processes of the last attempt, which would write into the memory from which the next one continues.

    The estate does not have the id of an attempt that was started beside the last one (successor.py).
    """
    for rest in running:
        if rest.token in estate["tries"] or rest.launcher == estate["launcher"]:
            left, _ = end_job(where, rest.token, keeps=True)
            lines = [f"{host}: process {line}" for host, left_there in left.items() for line in left_there]
            if lines:
                raise LaunchError(
                    f"the ranks of the last attempt do not end, so the job cannot continue: {'; '.join(lines)}"
                )


def _request(fields: Mapping[str, Any], limits: Limits) -> Request:
    paths = {name: Path(fields[name]) for name in ("inventory", "mpiexec", "log_dir") if fields[name] is not None}
    return Request(**{**fields, **paths, "limits": limits})
