"""The state of a training, and run(), which calls a script's function again from that state.

All ranks continue from this state when one is lost, and so does the next attempt of a job.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from mpitrain.errors import ConfigError
from mpitrain.job.start import elastic, init, the_job
from mpitrain.state.keep import KeptState, RankState
from mpitrain.state.packed import pack, unpack
from mpitrain.world.world import World

Result = TypeVar("Result")


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """A script raises this on all ranks to make elastic.run call its function again. mpitrain itself never raises it.

    `skip_sync`: the ranks agree already, so rank 0 need not send its state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the function of elastic.run is to be called again")
        self.skip_sync = skip_sync


class ElasticState:
    """hvd.elastic.State: subclass it for your own state. A subclass has save, restore and sync.

    For restarts from in-memory checkpoints, it also needs state_dict and load_state_dict, as ObjectState and TorchState
    have.
    """

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        """
        Args:
            bcast_object: sends rank 0's object to all ranks; default: World.broadcast_object.
            get_rank: returns this rank; default: that of mpitrain.init().
        """
        self._bcast_object = bcast_object or (lambda value: init().broadcast_object(value))
        self._rank = get_rank or (lambda: init().rank)
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._copies: KeptState | None = None

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions that are called on all ranks after the ranks of the job have changed, before they
        continue."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the callbacks: the ranks have changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Make the current state the one to continue from. Collective.

        With `mpitrain run --recover`, either all ranks save, or none does. If the hosts of the job change, the call
        does not return: the ranks end as by sys.exit(0), and others continue from here.

        Raises:
            LostRankError: a rank is lost; elastic.run continues from the previous commit. Raised on every remaining
                rank.
        """
        init().commit()
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Allow the job's hosts to change here, with the current state, if one has joined or is to leave. Collective.

        Here a job that may restart takes an in-memory checkpoint, if one is due.
        """
        if self._copies is not None:
            self._copies.update()

    def begin_copies(self) -> bool:
        """Take in-memory checkpoints from now on, if the job has snapshot agents. True: the job resumes from one.
        Collective."""
        context = init().context
        if not context.keeper or (the_job().is_elastic and not context.must_copy):
            return False
        if not (hasattr(self, "state_dict") and hasattr(self, "load_state_dict")):
            if not context.must_copy:
                return False
            raise ConfigError(
                f"{init().name()}: a {type(self).__name__} has no state_dict() and load_state_dict(), which a "
                "restart from memory needs; add them, use hvd.elastic.ObjectState or TorchState, or leave out "
                "--max-restarts"
            )
        self._copies = KeptState({}, {"the state": self}, self.of_rank())
        if not self._copies.memory_step:
            return False
        self.save()
        return True

    def end_copies(self) -> None:
        """Called when the training has ended; later commits only save."""
        self._copies = None

    def of_rank(self) -> RankState:
        """Return the state that belongs to this rank alone."""
        return RankState()

    def save(self) -> None:
        """Note the current state, for `restore`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method save()")

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError(f"{type(self).__name__} needs a method restore()")

    def sync(self) -> None:
        """Take over rank 0's state. Collective."""
        raise NotImplementedError(f"{type(self).__name__} needs a method sync()")

    def reset(self) -> None:
        """Make everything again that depends on the ranks. Called before the callbacks."""


class ObjectState(ElasticState):
    """Python objects by name, each an attribute of the state: `ObjectState(batch=0).batch`."""

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            bcast_object, get_rank: see ElasticState.
            kwargs: the saved objects by name, with the same names on every rank. Pickle must be able to write them.
        """
        super().__init__(bcast_object, get_rank)
        self._names = list(kwargs)
        self._saved: dict[str, Any] = {}
        self._set(kwargs)
        self.save()

    def save(self) -> None:
        """Copy the objects."""
        self._saved = copy.deepcopy(self.state_dict())

    def restore(self) -> None:
        """Set the attributes to copies of what was saved."""
        self.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take over rank 0's objects, and save them. Collective.

        Raises:
            CheckpointError: an object cannot be pickled. Raised on every rank.
            ValueError: a rank's names differ from rank 0's. Raised on every rank.
        """
        world, packed = init(), None
        with world.together("pack the state"):
            if self._rank() == 0:
                packed = pack("the state", self.state_dict())
        packed = self._bcast_object(packed)
        with world.together("take over the state of rank 0"):
            if self._rank() != 0:
                self.load_state_dict(unpack(packed))
        self.save()

    def state_dict(self) -> dict[str, Any]:
        """Return the objects by name."""
        return {name: getattr(self, name) for name in self._names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the objects.

        Raises:
            ValueError: `state` has other names.
        """
        if list(state) != self._names:
            raise ValueError(f"a state of {', '.join(state)}; this one has {', '.join(self._names)}")
        self._set(state)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate `func(state, ...)`: it is called again from the last commit when a rank is lost. Collective.

        @hvd.elastic.run
        def train(state):
            for state.batch in range(state.batch, 100):
                ...
                state.commit()

        train(hvd.elastic.TorchState(model, optimizer, batch=0))

    Every rank first gets rank 0's state. With `mpitrain run --recover`, the remaining ranks continue after a loss.
    Each restores its last commit, calls the reset callbacks, gets rank 0's state, and calls `func` again. After a
    restart, and when hosts join or leave, a new attempt of the job resumes from the newest in-memory checkpoint. It
    calls the reset callbacks before `func`.

    Args:
        func: its first argument is the state. All ranks commit the same number of times.

    Raises:
        ConfigError: the first argument is not a state. Raised on this rank.
        Exception: what `func` raises, unless a lost rank is the cause. This includes a HorovodInternalError of a call
            that differs between ranks: Horovod would repeat that call endlessly.
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
                named_calls = sys.modules.get("mpitrain.horovod.process_sets")
                if named_calls is not None:
                    named_calls.renew()
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
