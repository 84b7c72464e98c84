"""keep(): the state of a user's training loop, kept in memory that outlives the ranks.

kept = mt.keep(w=..., step=0) ─> a step ─> kept.update(...) ─> a step ─> ...
             ^                                  └─ every few steps: copy to memory (state_copies.py)
             └─ a restart, or a change of hosts: the values of the newest copy
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from mpitrain.errors import CheckpointError, ConfigError, MpitrainError, everywhere
from mpitrain.job.start import the_job
from mpitrain.launch.kept import SAVES, STAYS
from mpitrain.state.packed import arrays_in, lines_of, pack, unpack
from mpitrain.state.state_copies import StateCopies, end_try
from mpitrain.watching.activity import own_activity
from mpitrain.world.world import World


class KeptPart(Protocol):
    """An object with a state of its own, such as a model or an optimizer of PyTorch."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class RankState:
    """The state that belongs to each rank, beside the common state: nothing here. mpitrain.torch.keep has more."""

    def state(self) -> dict[str, Any]:
        """Return the state, with a text `place` that is equal if the placement of the ranks is equal. Collective."""
        return {}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue from a `state` of this rank. None: the placement of the ranks has changed since."""


class KeptState(Mapping[str, Any]):
    """The values of a loop, by name: `kept["w"]`. `update` changes them. All ranks make the same calls.

    Attributes:
        step_number: the number of updates so far, including those before a restart.
        memory_step: the step after which this loop continued from an in-memory checkpoint. 0: it did not.
        last_step: always None: the length of the loop is not known.
    """

    def __init__(self, values: Mapping[str, Any], parts: Mapping[str, KeptPart], own: RankState) -> None:
        """See `keep`. Collective."""
        self.step_number = self.memory_step = 0
        self.last_step: int | None = None
        self._values, self._parts, self._own = dict(values), parts, own
        self._job = job = the_job()
        if job.is_elastic:
            raise ConfigError(f"{job.world.name()}: call keep() before mt.elastic, which would call it again")
        job.num_runs += 1
        self._run = job.num_runs
        self._copies = StateCopies(job, self._run, 0)
        with self.world.together("keep the state of a loop"):
            for name, value in values.items():
                if hasattr(value, "load_state_dict"):
                    raise ConfigError(
                        f"{self.world.name()}: keep({name}=...) was given a {type(value).__name__}, which has "
                        "a state that a restart would not restore; give it without a name to "
                        "mpitrain.torch.keep"
                    )
            self.state()
        self.world.agree("keep the state of a loop", list(self._lines()))
        self._copies.resume(self)
        if self.world.context.saves:
            why = f"step {self.memory_step} is in memory, and" if self.memory_step else f"{self._copies.why_not}, and"
            raise everywhere(CheckpointError(f"{self.world.name()}: {why} a loop with keep() saves nothing on a disk"))
        self._say_origin()
        self._publish()

    @property
    def world(self) -> World:
        """The current World of the job."""
        return self._job.world

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def update(self, **values: Any) -> None:
        """End a step: set these values, and copy the state of the loop to memory when a copy is due. Collective.

        With `mpitrain run --recover`, in mt.elastic, either all ranks set the values, or none does. So change kept
        values only by this call.

        If the hosts of the job change, the call does not return: the ranks end as by sys.exit(0), and others continue.

        Args:
            values: new values of some names, the same on every rank. Arrays keep dtype and shape.

        Raises:
            ConfigError: a name is not kept, or a Trainer or another `keep` came after this one.
            CheckpointError: an array has another dtype or shape than in `keep`, or a value cannot be pickled.
            MismatchError: the ranks set other names, or arrays of other dtypes or shapes.
            LostRankError: see World.commit.

        All but the last are raised on every rank.
        """
        arrays = [f"{place} is {kind}" for name, value in values.items() for place, kind in arrays_in(name, value)]
        self.world.agree("update what is kept", [*values, *arrays])
        try:
            self._check(values)
        except MpitrainError as error:  # it follows from what the ranks have just compared
            raise everywhere(error) from None
        self.world.commit()
        self._values.update(values)
        self.step_number += 1
        wish = self._copies.after_step(self)
        if wish != STAYS:
            self._leave(wish)
        self._publish()

    def state(self) -> dict[str, Any]:
        """The common state, for an in-memory checkpoint. Raises CheckpointError if a value cannot be kept."""
        return {
            "step": self.step_number,
            "kinds": self._kinds(),
            "values": {name: pack(name, value) for name, value in self._values.items()},
            "parts": {name: pack(name, part.state_dict()) for name, part in self._parts.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a copy. Raises CheckpointError if it belongs to another loop."""
        kinds, kept = self._kinds(), state.get("kinds", {})
        if kept != kinds:
            raise CheckpointError(
                f"{self.world.name()}: the in-memory checkpoint holds {_listed(kept)}; this script keeps "
                f"{_listed(kinds)}. Every attempt must keep the same: start a new job for a changed script"
            )
        values = {name: unpack(packed) for name, packed in state.get("values", {}).items()}
        self._compare(values, "in the in-memory checkpoint")
        for name, packed in state.get("parts", {}).items():
            try:
                self._parts[name].load_state_dict(unpack(packed))
            except Exception as error:  # a part's own; PyTorch raises RuntimeError, ValueError, KeyError
                raise CheckpointError(
                    f"{self.world.name()}: the in-memory checkpoint does not fit {name}: {error}. Every attempt must "
                    "make the same parts: start a new job for a changed script"
                ) from error
        self._values = values
        self.step_number = int(state["step"])

    def own_state(self, *, reads: bool = True) -> dict[str, Any]:
        """The state that belongs to this rank."""
        return self._own.state()

    def restore_own(self, name: str, parts: int, read_part: Callable[[int], dict[str, Any]], *, reads: bool) -> None:
        """Continue from this rank's own state, if the placement of all ranks is unchanged. Collective."""
        part: dict[str, Any] = {}
        place = self.own_state().get("place")
        if place is None:
            return
        if parts == self.world.size:
            try:
                part = read_part(self.world.rank)
            except CheckpointError:
                part = {}  # the rank was on another host
        is_alike = all(self.world.allgather(part.get("place") == place))
        with self.world.together(f"continue from {name}"):
            self._own.restore(part if is_alike else None)

    def _lines(self) -> Iterator[str]:
        """What the ranks compare before the first step, one item a line."""
        for name, kind in self._kinds().items():
            yield f"{name} ({kind})"
        for name, value in self._values.items():
            for line in lines_of(name, value):
                yield f"{line} (world.broadcast_object gives every rank what rank 0 has)"

    def _kinds(self) -> dict[str, str]:
        return dict.fromkeys(self._values, "value") | {n: type(part).__name__ for n, part in self._parts.items()}

    def _check(self, values: Mapping[str, Any]) -> None:
        if self._run != self._job.num_runs:
            raise ConfigError(
                f"{self.world.name()}: a Trainer or another keep() came after this one, and only the newest has "
                "in-memory checkpoints; give everything to one keep()"
            )
        if unknown := [name for name in values if name not in self._values]:
            raise ConfigError(
                f"{self.world.name()}: update({unknown[0]}=...): this name is not kept; kept are "
                f"{', '.join(self._values) or 'no values'}. Give it to keep()"
            )
        self._compare(values, "in update()")

    def _compare(self, values: Mapping[str, Any], there: str) -> None:
        """Raise CheckpointError unless the arrays in `values` have the dtypes and shapes of those that are kept."""
        for name, value in values.items():
            new, old = dict(arrays_in(name, value)), dict(arrays_in(name, self._values[name]))
            for place in [*new, *old]:
                if new.get(place) != old.get(place):
                    raise CheckpointError(
                        f"{self.world.name()}: {place} is {new.get(place, 'no array')} {there}, and was "
                        f"{old.get(place, 'no array')} in keep(); an array that is kept does not change dtype or shape"
                    )

    def _publish(self) -> None:
        """Publish the step that begins, and whether this loop can be left."""
        if activity := own_activity():
            activity.begin_step(self.step_number + 1)
            activity.copy_run(self._run if self._copies.steps else 0)

    def _say_origin(self) -> None:
        if self.memory_step:
            self.world.print(f"resumed from memory at step {self.memory_step}")
        elif self.world.context.failed_ms or self._copies.taken_over:
            self.world.print(
                f"mpitrain: memory is not used: {self._copies.why_not}. The loop begins with what keep() was given"
            )

    def _leave(self, wish: int) -> None:
        ms = int(1000 * time.time())
        if wish == SAVES:
            self.world.print(f"mpitrain: step {self.step_number} is not saved: in-memory checkpoints end with the job")
        self.world.commit()  # no rank leaves a step that others have to repeat
        self._copies.leave(self.step_number, ms)
        self._copies.close()
        end_try(self.step_number)


def keep(**values: Any) -> KeptState:
    """Keep the state of your own training loop in memory that outlives the ranks. Collective.

        kept = mt.keep(w=numpy.zeros(10), step=0)
        for x, y in world.shard(batches, start=kept["step"]):
            mean = world.mean(gradient(kept["w"], x, y), weight=len(x))
            kept.update(w=kept["w"] - 0.3 * mean, step=kept["step"] + 1)

    Under `mpitrain run`, `update` takes an in-memory checkpoint of all values every few steps, as a Trainer does. After
    a restart, `keep` returns the values of the newest one instead of those given. With `--max-restarts 0`, and in a job
    that `mpitrain run` did not start, there are none.

    Args:
        values: by name, the same on every rank: arrays, and anything that pickle can write. Keep everything that
            changes from step to step, including the position in the data.

    Raises:
        CheckpointError: a value cannot be pickled, or the in-memory checkpoint has other names, dtypes or shapes.
            Raised on every rank.
        ConfigError: the call is inside mpitrain.elastic, which would return the initial values again, or a value is a
            model, an optimizer or the like.
        MismatchError: the ranks give different names, numbers, texts or arrays.
    """
    return KeptState(values, {}, RankState())


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "nothing"
