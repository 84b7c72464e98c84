"""The outer steps of local updates: their schedule for each fragment, and their state in checkpoints.

    step           1   2   3  ...  sync_every     sync_every + 1
    rank 0         ──────────────────┐  outer  ┌──────────────
    rank 1         ──────────────────┴─ step ──┴──────────────

The `sync_every` steps are a *round*. For each step of a rank, `begin_step` is called, then
`around_update`.

A checkpoint has a common part, with the parameters of the last outer step, and a part for each rank: its parameters and
optimizer, and what it adds to the next outer steps. If the ranks have changed, all begin with the parameters of the
last outer step. What the earlier ranks had learned since then goes into the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy

from mpitrain.adapters.adapter import LocalModel, check_fits
from mpitrain.arrays import Array, is_array, like
from mpitrain.compression import power_sgd
from mpitrain.errors import CheckpointError, ConfigError, NonFiniteError, everywhere
from mpitrain.optim.optimizers import Optimizer, described
from mpitrain.reducer.exchange import Exchange, make_exchange
from mpitrain.state.names import host_copy
from mpitrain.strategies.fragments import Fragment, cut, finish_all, under
from mpitrain.strategies.strategy import ROUND
from mpitrain.world.world import World


@dataclass(frozen=True)
class OuterSchedule:
    """The settings of a strategy, which documents them as its arguments. `kind` is its name.

    Raises:
        ConfigError: a value is not allowed.
    """

    kind: str
    sync_every: int
    warm_up: int
    fragments: int
    delay: int
    alpha: float

    def __post_init__(self) -> None:
        for name, least in (("sync_every", 1), ("warm_up", 0), ("fragments", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{self.kind}: {name}={value!r}; it must be an int of at least {least}")
        if not isinstance(self.delay, int) or isinstance(self.delay, bool) or not 0 <= self.delay <= self.sync_every:
            raise ConfigError(
                f"{self.kind}: delay={self.delay!r}; it must be an int from 0 to sync_every={self.sync_every}, as a "
                "fragment must arrive before it is sent again"
            )
        if not 0 <= self.alpha < 1 or (self.alpha and not self.delay):
            raise ConfigError(
                f"{self.kind}: alpha={self.alpha!r}; it must be at least 0 and below 1, and 0 without a delay"
            )

    def __str__(self) -> str:
        numbers = {name: value for name, value in vars(self).items() if name != "kind"}
        return f"{self.kind}({', '.join(f'{name}={value}' for name, value in numbers.items())})"

    @property
    def offsets(self) -> list[int]:
        """The steps of a round after which each fragment is sent: at equal intervals, the last one at the end."""
        return [-(-self.sync_every * number // self.fragments) for number in range(1, self.fragments + 1)]


class OuterSteps:
    """The outer steps of one model. All ranks make the same calls.

    Attributes:
        fragments: the parts of the parameters.
        steps: the number of steps made in the current round.
    """

    def __init__(
        self,
        world: World,
        model: LocalModel,
        schedule: OuterSchedule,
        outer: Optimizer | None,
        exchange: Callable[[World], Exchange],
        *,
        by_rank: bool = False,
    ) -> None:
        """Collective. The parameters of all ranks are equal, or become equal before the first step.

        `by_rank`: in an outer step, each rank sends for itself, also to the others of its node.

        Raises:
            MismatchError: the ranks differ in the arguments or in the model. Raised on every rank.
            ConfigError: there are more fragments than trained elements, or the setting of the World's compression is
                power_sgd. Raised on every rank.
        """
        setting = world.config.compression
        if exchange is make_exchange and setting.partition(":")[0] == power_sgd.NAME:
            raise everywhere(
                ConfigError(
                    f"compression={setting}: an outer step exchanges ranges of all parameters, which have no matrices "
                    "that power_sgd could send as products. Use a codec, such as int8, or train with mt.Sync"
                )
            )
        self._world, self._model, self._schedule = world, model, schedule
        self._has_outer = outer is not None
        world.agree("begin", [str(schedule), f"outer optimizer {described(outer) if outer else 'none'}"])
        between = world.replaced(node_ranks=tuple(range(world.size))) if by_rank else world
        self.fragments = [
            Fragment(between, model, pieces, offset, outer, exchange)
            for pieces, offset in zip(cut(model, schedule.fragments), schedule.offsets, strict=True)
        ]
        self.steps = 0
        self._is_resumed = False  # True: the ranks have not yet counted the samples that they have after a resume

    @property
    def replicas_are_equal(self) -> bool:
        """False within a round."""
        return not any(fragment.is_apart or fragment.sent for fragment in self.fragments)

    @property
    def num_outer_steps(self) -> int:
        """The number of outer steps so far. Each fragment has its own."""
        return sum(fragment.num_updates for fragment in self.fragments)

    @property
    def place(self) -> str:
        """A text that is equal if each rank can continue with its own state."""
        codecs = [fragment.place() for fragment in self.fragments]
        numbers = self._schedule.fragments, self._schedule.sync_every, self._schedule.delay
        parts = [self._schedule.kind, self._world.node_ranks, numbers, codecs]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    # -- the steps of a round ----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step. Fragments with a delay are sent from here, with the committed values."""
        self._count_resumed()
        if self.replicas_are_equal and not self._is_plain:
            for fragment in self.fragments:
                fragment.note()
        if self._schedule.delay:
            for fragment in self._due(self.steps or self._schedule.sync_every):
                fragment.start(self._schedule.delay)

    @contextmanager
    def around_update(self, samples: float, all_samples: float) -> Iterator[None]:
        """A context for the update of this rank's parameters. At its end, an outer step follows if it is due.

        Args:
            samples: of this rank in this step; 0 if the update is skipped.
            all_samples: the same of all ranks together.

        Raises:
            NonFiniteError: see Fragment.finish. Raised on every rank; parameters and optimizer are as before the step.
        """
        under_way = [(fragment, fragment.sent) for fragment in self.fragments if fragment.sent]
        arriving = [fragment for fragment, sent in under_way if sent.steps_left == 1]
        finish_all(arriving)
        if due := [] if self._is_plain or self._schedule.delay else self._due(self.steps + 1):
            with self._taken_back_on_error():
                yield
                self._count(samples, all_samples)
                for fragment in due:
                    fragment.start(0)
                finish_all(due)
                self._world.commit()
            for fragment in due:
                fragment.update(0.0)
        else:
            self._world.commit()
            yield
            if not self._is_plain:
                self._count(samples, all_samples)
        for _, sent in under_way:
            sent.steps_left -= 1
        for fragment in arriving:
            fragment.update(self._schedule.alpha)
        self.steps = 0 if self._is_plain else (self.steps + 1) % self._schedule.sync_every

    def end_round(self) -> None:
        """End the round here, including all messages under way. Collective.

        Raises:
            NonFiniteError: see Fragment.finish. The round continues.
        """
        self._count_resumed()
        if self.replicas_are_equal:
            return
        for fragment in self.fragments:
            with suppress(NonFiniteError):  # it is sent again, and then the error is raised
                fragment.finish()
            fragment.take_back()
        for fragment in self.fragments:
            fragment.start(0)
        finish_all(self.fragments)
        self._world.commit()
        for fragment in self.fragments:
            if fragment.sent:
                fragment.update(0.0)
            elif fragment.is_apart:  # all steps since its last outer step were skipped
                fragment.go_back()
        self.steps = 0

    @property
    def _is_plain(self) -> bool:
        """Whether a single rank trains, without rounds, because their ends would change nothing."""
        return self._world.size == 1 and not self._has_outer and all(fragment.is_idle for fragment in self.fragments)

    def _due(self, steps: int) -> Sequence[Fragment]:
        """The fragments that are sent after this many steps of a round."""
        return [fragment for fragment in self.fragments if fragment.offset == steps]

    def _count(self, samples: float, all_samples: float) -> None:
        for fragment in self.fragments:
            fragment.count(samples, all_samples)

    def _count_resumed(self) -> None:
        """After a resume, count the samples of all ranks, because ranks' parts may have been lost. Collective in that
        case."""
        if not self._is_resumed:
            return
        weights = numpy.array([fragment.weight for fragment in self.fragments])
        for fragment, total in zip(self.fragments, self._world.sum(weights).tolist(), strict=True):
            fragment.expect(total)
        self._is_resumed = False

    @contextmanager
    def _taken_back_on_error(self) -> Iterator[None]:
        """Make the last step before an outer step, and the outer step, with one commit."""
        # Only this step shows whether the outer step after it is possible. If it is not, nothing has changed.
        before = host_copy(self._model.state())
        counts = [fragment.counts for fragment in self.fragments]
        try:
            yield
        except Exception:
            self._model.restore(before)
            for fragment, counted in zip(self.fragments, counts, strict=True):
                fragment.take_back()
                fragment.counts = counted
            raise

    # -- the common state ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state that is the same on every rank: `outer` if there is an outer optimizer, `round` in the middle of a
        round."""
        state: dict[str, Any] = {}
        if self._has_outer:
            state["outer"] = self._outer_state()
        if self.steps or not self.replicas_are_equal:
            state["round"] = self._round_state()
        return state

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a `state` that does not fit. Nothing changes.

        Raises:
            CheckpointError: the state belongs to other parameters, other fragments, or a longer round.
        """
        begun: Mapping[str, Any] = state.get("round", {})
        steps, count = begun.get("steps", 0), len(begun.get("samples", self.fragments))
        outer: Mapping[str, Any] = state.get("outer", {})
        if not steps < self._schedule.sync_every or count != len(self.fragments):
            raise CheckpointError(
                f"the checkpoint was made after {steps} steps of a round, with {count} fragments; this strategy "
                f"has sync_every={self._schedule.sync_every} and fragments={len(self.fragments)}: continue with "
                f"sync_every above {steps} and fragments={count}"
            )
        own = self._outer_state()
        kinds, saved_kinds = ({number: of.keys() for number, of in one.items()} for one in (own, outer))
        if outer and kinds != saved_kinds:
            raise CheckpointError(
                "the checkpoint has the state of another outer optimizer, or of other fragments; continue "
                "with the strategy that saved it"
            )
        for number, of_number in outer.items():
            for dtype, saved in of_number.items():
                check_fits(f"outer optimizer of fragment {number}", _arrays(saved), _arrays(own[number][dtype]))
        if begun:
            check_fits("parameters of the last outer step", begun["parameters"], self._common())
        for number, arrived in begun.get("arrived", {}).items():
            means = self.fragments[int(number)].means()
            check_fits(f"mean of fragment {number}, which has arrived", arrived["means"], means)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; that of Sync, {}, begins a round. Raises what `check` raises.

        Collective: messages under way are discarded.
        """
        self.check(state)
        begun: Mapping[str, Any] = state.get("round", {})
        outer = state.get("outer", {})
        for number, fragment in enumerate(self.fragments):
            fragment.drop()
            for dtype, optimizer in fragment.optimizers.items() if outer else ():
                optimizer.restore(outer[str(number)][str(dtype)])
            fragment.is_apart = bool(begun and begun["apart"][number])
            if not begun:
                continue
            for piece, common in zip(fragment.pieces, fragment.common, strict=True):
                common[...] = like(piece.of(begun["parameters"]), common)
            fragment.all_samples = begun["samples"][number]
            if arrived := begun.get("arrived", {}).get(str(number)):
                fragment.arrive(arrived["samples"], arrived["steps_left"], arrived["means"])
                if (begun["sync_every"], begun["delay"]) != (self._schedule.sync_every, self._schedule.delay):
                    fragment.take_back()
        self.steps = begun.get("steps", 0)
        self._is_resumed = True

    def _outer_state(self) -> dict[str, Any]:
        """The state of the outer optimizers, by fragment and dtype."""
        return {
            str(number): {str(dtype): deepcopy(one.state()) for dtype, one in fragment.optimizers.items()}
            for number, fragment in enumerate(self.fragments)
        }

    def _round_state(self) -> dict[str, Any]:
        """The common state within a round."""
        return {
            "steps": self.steps,
            "sync_every": self._schedule.sync_every,
            "delay": self._schedule.delay,
            # Including the samples of a message that has not arrived, because it is sent again.
            "samples": [
                one.all_samples + (one.sent.all_samples if one.sent and not one.sent.has_arrived else 0.0)
                for one in self.fragments
            ],
            "apart": [one.is_apart or bool(one.sent) for one in self.fragments],
            "arrived": {
                str(number): {
                    "steps_left": sent.steps_left,
                    "samples": sent.all_samples,
                    "means": {piece: mean.copy() for piece, mean in fragment.means().items()},
                }
                for number, fragment in enumerate(self.fragments)
                if (sent := fragment.sent) and sent.has_arrived
            },
            "parameters": self._common(),
        }

    def _common(self) -> dict[str, Array]:
        """A copy of the parameters of the last outer step, by name."""
        values = self._model.parameters()
        copied = {parameter.name: values[parameter.name].copy() for parameter in self._model.layout}
        for fragment in self.fragments:
            for piece, value in zip(fragment.pieces, fragment.common, strict=True):
                piece.of(copied)[...] = value
        return copied

    # -- the state of each rank ---------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """Return `whole_own_state`, or {} if there is one rank, for which a checkpoint of the model is enough.
        Collective."""
        own = self.whole_own_state()
        return {} if self._world.size == 1 and all(fragment.is_idle for fragment in self.fragments) else own

    def whole_own_state(self) -> dict[str, Any]:
        """Return this rank's model, `local`, and what it adds to the outer steps: `residual`, `carried`. Collective.

        It first waits for messages under way, so that the state is complete.
        """
        if not self._world.control.is_broken:
            finish_all(self.fragments)
        samples = [[one.samples, one.sent.samples if one.sent else 0.0] for one in self.fragments]
        state: dict[str, Any] = {"place": self.place, "local": self._model.state(), "samples": samples}
        for number, fragment in enumerate(self.fragments):
            for key, part in fragment.own_state().items():
                named = state.setdefault(key, {})
                named |= {f"{ROUND}{number}/{name}": value for name, value in part.items()}
        return state

    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Continue from an `own_state`, or from `carried` sums alone. Then this rank begins with the common parameters.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        is_same_rank = "local" in state
        if is_same_rank:
            self._model.restore(state["local"])
        for number, fragment in enumerate(self.fragments):
            if is_same_rank:
                fragment.samples, sent = state["samples"][number]
                if fragment.sent:
                    fragment.sent.samples = sent
            else:
                fragment.take_back()
                fragment.samples = 0.0
                if fragment.is_apart:
                    fragment.go_back()
            parts = {key: state[key] for key in ("residual", "carried") if key in state}
            fragment.restore_own({key: under(f"{ROUND}{number}/", part) for key, part in parts.items()})
        self._is_resumed = True

    def close(self) -> None:
        """Free the communicators. Collective, except in a broken World."""
        for fragment in self.fragments:
            if not self._world.control.is_broken:
                fragment.drop()
            fragment.close()


def _arrays(state: Mapping[str, Any]) -> dict[str, Array]:
    return {name: value for name, value in state.items() if is_array(value)}
