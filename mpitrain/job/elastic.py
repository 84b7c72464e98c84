"""elastic(): a training loop of the user's own that goes on when a rank is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpitrain.job.start import the_job
from mpitrain.world import World

Result = TypeVar("Result")


def elastic(train: Callable[[World], Result]) -> Result:
    """Call `train(world)`, and again in a new World after each loss of a rank. Return what the last call returns.

    A rank can be lost only with `mpitrain run --recover`. Without it, `elastic` is a single call. A Trainer goes on by
    itself: do not make one in `train`.

    Collective. `train` keeps what it has reached outside of itself, and calls `world.commit()` in every step, after
    what the step exchanges and before the step changes anything that was kept. Then the ranks that are left have all
    made the same steps, when `train` is called again.

    Args:
        train: makes all that needs a World, such as a GradientReducer, from the one that it is given.

    Raises:
        ConfigError: `train` makes a Trainer.
        Exception: what `train` raises, unless a lost rank is the cause.
    """
    job = the_job()
    job.is_elastic = True
    try:
        while True:
            try:
                result = train(job.world)
                job.world.commit()  # no rank leaves while others have to make the last step again
            except Exception as error:
                if job.recovery is None or not job.recovery.is_loss(error):
                    raise
                job.recovery.abandon()
                job.recover(lambda world: world.barrier(), error)
            else:
                return result
    finally:
        job.is_elastic = False
