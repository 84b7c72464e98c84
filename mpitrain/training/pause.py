"""A training that is paused: all ranks wait between two steps, until somebody tells them to go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpitrain.launch.kept import STAYS
from mpitrain.training.state_copies import StateCopies
from mpitrain.waiting.control import until
from mpitrain.watching.activity import own_activity
from mpitrain.watching.rank_record import BUSY

if TYPE_CHECKING:
    from mpitrain.training.trainer import Trainer

# All ranks look together, which is a message of 40 bytes each.
_LOOK_SECONDS = 0.25
_NAP_SECONDS = 0.02


def wait_in_pause(trainer: Trainer, copies: StateCopies, obey: Callable[[int], None]) -> int:
    """Wait while the training is paused. Collective.

    Nobody waits for another rank here, so the wait is not reported. A rank that does not come to a look is.

    Args:
        trainer: is between two steps.
        copies: of its run. They are made anew after an order that lasts, and if the ranks are to leave.
        obey: applies orders, after the number of them that a rank has heard of.

    Return what the launcher wishes, as StateCopies.after_step does.
    """
    world, steering, activity = trainer.world, trainer.steering, own_activity()
    words = f"a pause {steering.words.removeprefix('paused ')}"
    steering.paused_since = time.monotonic()  # what the hooks have done since the order is no pause
    entry = activity.begin(BUSY, words, time.monotonic()) if activity else None
    try:
        while steering.pause:
            due = time.monotonic() + _LOOK_SECONDS
            world.control.wait(until(lambda due=due: time.monotonic() >= due, lambda: _NAP_SECONDS), words, status=BUSY)  # type: ignore[misc]
            number = activity.order_number if activity else 0
            looks = world.agree("look for orders in a pause", code=copies.wish(), detail=number)
            heard = int(looks["detail"].max())
            if heard > steering.num_heard:
                obey(heard)
            if looks["code"].max() > STAYS or steering.has_news:
                wish = copies.after_step(trainer, is_due=True)
                steering.has_news = False
                if wish != STAYS:
                    return wish
    finally:
        if activity and entry:
            activity.end(entry)
    return STAYS
