"""run(): the function of a script, called again after each loss of a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from mpitrain.errors import ConfigError
from mpitrain.horovod.elastic.state import ElasticState
from mpitrain.horovod.exceptions import HostsUpdatedInterrupt
from mpitrain.horovod.renewals import renewals
from mpitrain.job.elastic import elastic
from mpitrain.job.start import init
from mpitrain.world import World

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate `func(state, ...)`: it is called again from the last commit when a rank is lost. Collective.

        @hvd.elastic.run
        def train(state):
            for state.batch in range(state.batch, 100):
                ...
                state.commit()

        train(hvd.elastic.TorchState(model, optimizer, batch=0))

    Every rank first gets rank 0's state. With `mpitrain run --recover`, the ranks that are left go on after a loss.
    Each restores its last commit, calls the reset callbacks, gets rank 0's state, and calls `func` again. With
    `--restarts`, a new try of the job goes on from the newest copy of the state in memory, after a failure, and when
    hosts join or leave. It calls the reset callbacks before `func`. Without either, `func` is called once.

    Args:
        func: its first argument is the state. All ranks commit the same number of times.

    Raises:
        ConfigError: the first argument is no state. On this rank.
        Exception: what `func` raises, unless a lost rank is the cause. So also a HorovodInternalError of a call that
            the ranks have made differently: Horovod would make that call again and again.
    """

    @functools.wraps(func)
    def wrapper(state: ElasticState, *args: Any, **kwargs: Any) -> Result:
        if not isinstance(state, ElasticState):
            raise ConfigError(
                f"{init().name()}: the function of hvd.elastic.run was given a {type(state).__name__} as its first "
                "argument; give it a state, such as hvd.elastic.TorchState(model, optimizer, batch=0)"
            )
        has_begun, is_reset = False, state.begin_copies()

        def train(_: World) -> Result:
            nonlocal has_begun, is_reset
            if has_begun:  # and a rank was lost
                for renew in renewals:
                    renew()
                state.restore()
                is_reset = True
            has_begun, syncs = True, True
            while True:
                if is_reset:
                    state.on_reset()
                if syncs:
                    state.sync()
                try:
                    return func(state, *args, **kwargs)
                except HostsUpdatedInterrupt as interrupt:
                    is_reset, syncs = True, not interrupt.skip_sync

        try:
            return elastic(train)
        finally:
            state.end_copies()

    return wrapper
