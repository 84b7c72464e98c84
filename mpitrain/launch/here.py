"""A job on this machine alone, from start to end: there is nothing to compare, and one guard without a connection."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from mpitrain.errors import LaunchError
from mpitrain.launch.dialects import JobSpec, command_for
from mpitrain.launch.ending import Ended
from mpitrain.launch.facts import devices
from mpitrain.launch.job import Run
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.live import Live
from mpitrain.launch.live_folder import socket_of
from mpitrain.launch.live_try import LiveTry
from mpitrain.launch.reserve import Reserve
from mpitrain.launch.variables import absent
from mpitrain.launch.watch import Guards
from mpitrain.launch.watched import WatchedJob, identified


def show(job: JobSpec, from_file: Mapping[str, str]) -> None:
    """Print the mpiexec command. The arguments are those of run."""
    _refuse_absent(from_file)
    print(command_for(job, os.environ))


def run(
    job: JobSpec,
    from_file: Mapping[str, str],
    keepers: Keepers | None,
    reserve: Reserve | None,
    live: Live,
    meanwhile: Callable[[], None],
) -> Ended:
    """Start the job and see to its end.

    Args:
        job: what to start.
        from_file: variables of --env-file, already set; the devices that they name must exist.
        keepers: of the job; None: it is not started again.
        reserve: the spares that become the ranks, if there are any.
        live: lets others watch the job.
        meanwhile: is called some times a second while the job runs.

    Raises:
        LaunchError: the job cannot be started.
    """
    _refuse_absent(from_file)
    own, context = job.placement.own, identified(job.context, Path(tempfile.gettempdir()))
    # No limit of silence: a launcher that is stopped (Ctrl-Z) sends nothing, but the job must go on.
    wish = {"token": context.job, "roll_call": context.roll_call, "peers": {}, "silence_seconds": 0}
    wish["live"] = str(socket_of(context.launcher))
    if keepers is not None:
        keepers.begin([own], context.job)
    if reserve is not None:
        reserve.begin([own])
    with Guards(own, [own], {own: wish}, keepers, reserve) as guards:
        guards.facts()
        if keepers is not None:
            keepers.settle()
        watched = WatchedJob(
            job.placement.places,
            guards,
            Path(context.roll_call),
            start_seconds=0.0,
            recovers=bool(context.recover),
            reserve=reserve,
        )
        program = job.program if reserve is None else reserve.stub(job.program)
        with live.showing(context.job, LiveTry(job, guards)):
            return Run(replace(job, context=context, program=program), watched).to_end(meanwhile)


def _refuse_absent(from_file: Mapping[str, str]) -> None:
    if missing := absent(from_file, devices()):
        raise LaunchError(f"the file of variables does not fit this machine: {missing[0]}, which does not exist here")
