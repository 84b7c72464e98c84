"""The change from one try of a job to the next, which is ready and waits: the ranks before leave, these go on.

    ranks before: copy ─> commit ─> hooks closed ─> their keepers ─> end
                                                         │
    these ranks: init() ─> build ─> wait at their keepers ┴─> all have heard it ─> read the copy ─> train

A host on which no rank was before has nobody to wait for. So all ranks wait for each other too, mostly asleep: a wait
of MPI would take the time of the cores on which the ranks before still train.
"""

from __future__ import annotations

import time
from typing import NoReturn

from mpitrain.errors import LaunchError
from mpitrain.launch.kept import KeeperLine
from mpitrain.watching.activity import own_activity
from mpitrain.watching.rank_record import BUSY
from mpitrain.world import World

_LOOK_SECONDS = 0.002


def wait_for_turn(world: World, line: KeeperLine | None) -> tuple[int, int]:
    """Wait until the ranks of the try before have left. Collective.

    Return the step after which they left, and when, by time.time() of their host, in milliseconds.

    Raises:
        LaunchError: the keeper of a host does not answer. Raised on every rank.
    """
    activity = own_activity()
    assert activity is not None, "a rank with a keeper has a record"
    entry = activity.begin(BUSY, "ready, until the ranks before leave", time.monotonic())
    activity.get_ready()
    left: list[int] = []
    problem = None if line else LaunchError(f"{world.name()}: this host has no keeper, so its ranks cannot take over")
    if line is not None:
        try:
            left = line.follow(world.context.follows)
        except OSError as error:
            problem = LaunchError(f"{world.name()}: the keeper of this host does not answer: {error}")
    everyone = world.objects.Ibarrier()
    while not everyone.Test():
        time.sleep(_LOOK_SECONDS)
    activity.end(entry)
    with world.together("take over from the ranks before"):
        if problem is not None:
            raise problem
    step, ms = next(told for told in world.allgather(left) if told)
    return step, ms


def end_try(step: int) -> NoReturn:
    """End this process as if the script were over: on other hosts, the next try goes on after `step`."""
    if activity := own_activity():
        activity.leave(step)
    raise SystemExit(0)
