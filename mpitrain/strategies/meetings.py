"""The outer steps of a training in rounds: when the ranks meet, and what they have in common then.

    step           1   2   3  ...  sync_every     sync_every + 1
    rank 0         ──────────────────┐  outer  ┌──────────────
    rank 1         ──────────────────┴─ step ──┴──────────────

Whoever makes the steps of a rank, the calls of each one are `begin_step`, then `around_update`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy

from mpitrain.adapters.adapter import LocalModel
from mpitrain.compression import power_sgd
from mpitrain.errors import ConfigError, NonFiniteError, everywhere
from mpitrain.exchange.exchange import Exchange, make_exchange
from mpitrain.strategies.flat_ranges import cut
from mpitrain.strategies.fragments import Fragment, finish_all
from mpitrain.strategies.round_plan import RoundPlan
from mpitrain.strategies.round_state import RoundState
from mpitrain.training.checkpoint.names import host_copy
from mpitrain.training.optimizers import Optimizer, described
from mpitrain.world import World


class Meetings:
    """The outer steps of one model. All ranks make the same calls.

    The parameters may be cut into fragments, each with its own outer step, which may arrive some steps later.

    Attributes:
        fragments: the parts of the parameters.
        steps: the number of steps made in the present round.
    """

    def __init__(
        self,
        world: World,
        model: LocalModel,
        plan: RoundPlan,
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
                    "that power_sgd could send as products. Take a codec, such as int8, or train with mt.Sync"
                )
            )
        self._world, self._model, self._plan = world, model, plan
        self._has_outer = outer is not None
        world.agree("begin", [str(plan), f"outer optimizer {described(outer) if outer else 'none'}"])
        between = replace(world, node_ranks=tuple(range(world.size))) if by_rank else world
        self.fragments = [
            Fragment(between, model, pieces, offset, outer, exchange)
            for pieces, offset in zip(cut(model, plan.fragments), plan.offsets, strict=True)
        ]
        self._states = RoundState(world, model, plan, self.fragments)
        self.steps = 0
        self._is_resumed = False  # True: the ranks have not yet counted the samples that a resume has left them

    @property
    def replicas_are_equal(self) -> bool:
        """False within a round."""
        return not any(fragment.is_apart or fragment.flying for fragment in self.fragments)

    @property
    def num_outer_steps(self) -> int:
        """The number of outer steps so far. Each fragment has its own."""
        return sum(fragment.num_updates for fragment in self.fragments)

    @property
    def place(self) -> str:
        """A text that is equal if each rank can go on with its own state."""
        return self._states.place()

    def begin_step(self) -> None:
        """Begin a step. Fragments that are sent with a delay start here, from the committed values."""
        self._count_resumed()
        if self.replicas_are_equal and not self._is_plain:
            for fragment in self.fragments:
                fragment.note()
        if self._plan.delay:
            for fragment in self._due(self.steps or self._plan.sync_every):
                fragment.start(self._plan.delay)

    @contextmanager
    def around_update(self, samples: float, all_samples: float) -> Iterator[None]:
        """Put the update of this rank's parameters into this context. An outer step follows there if it is due.

        Args:
            samples: of this rank in this step; 0 if the update is skipped.
            all_samples: the same of all ranks together.

        Raises:
            NonFiniteError: see Fragment.finish. Raised on every rank; parameters and optimizer are as before the step.
        """
        flying = [fragment for fragment in self.fragments if fragment.flying]
        arriving = [fragment for fragment in flying if fragment.steps_left == 1]
        finish_all(arriving)
        if due := [] if self._is_plain or self._plan.delay else self._due(self.steps + 1):
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
        for fragment in flying:
            fragment.steps_left -= 1
        for fragment in arriving:
            fragment.update(self._plan.alpha)
        self.steps = 0 if self._is_plain else (self.steps + 1) % self._plan.sync_every

    def end_round(self) -> None:
        """End the round here, with all that is under way. Collective.

        Raises:
            NonFiniteError: see Fragment.finish. The round goes on.
        """
        self._count_resumed()
        if self.replicas_are_equal:
            return
        for fragment in self.fragments:
            with suppress(NonFiniteError):  # it is sent again, and then the error is raised
                fragment.finish()
            fragment.forget()
        for fragment in self.fragments:
            fragment.start(0)
        finish_all(self.fragments)
        self._world.commit()
        for fragment in self.fragments:
            if fragment.flying:
                fragment.update(0.0)
            elif fragment.is_apart:  # all steps since its last outer step were skipped
                fragment.go_back()
        self.steps = 0

    @property
    def _is_plain(self) -> bool:
        """One rank trains, and begins no round, since its end would change nothing."""
        return self._world.size == 1 and not self._has_outer and all(fragment.is_idle for fragment in self.fragments)

    def _due(self, steps: int) -> Sequence[Fragment]:
        """The fragments that are sent when so many steps of a round have been made."""
        return [fragment for fragment in self.fragments if fragment.offset == steps]

    def _count(self, samples: float, all_samples: float) -> None:
        for fragment in self.fragments:
            fragment.count(samples, all_samples)

    def _count_resumed(self) -> None:
        """Count the samples of all ranks after a resume: parts of ranks may have been lost. Collective then."""
        if not self._is_resumed:
            return
        weights = numpy.array([fragment.weight for fragment in self.fragments])
        for fragment, total in zip(self.fragments, self._world.sum(weights).tolist(), strict=True):
            fragment.expect(total)
        self._is_resumed = False

    @contextmanager
    def _taken_back_on_error(self) -> Iterator[None]:
        """Make the last step before an outer step, and the outer step, with one commit."""
        # Only this step shows whether the ranks can meet after it. If they cannot, nothing has changed.
        before = host_copy(self._model.state())
        counts = [fragment.counts for fragment in self.fragments]
        try:
            yield
        except Exception:
            self._model.restore(before)
            for fragment, its_counts in zip(self.fragments, counts, strict=True):
                fragment.forget()
                fragment.counts = its_counts
            raise

    # -- checkpoints: see round_state.py ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What is the same on every rank: `outer` if there is an outer optimizer, `round` in the middle of one."""
        state: dict[str, Any] = {}
        if self._has_outer:
            state["outer"] = self._states.outer()
        if self.steps or not self.replicas_are_equal:
            state["round"] = self._states.round(self.steps)
        return state

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a `state` that does not fit. Nothing changes.

        Raises:
            CheckpointError: the state belongs to other parameters, other fragments, or a longer round.
        """
        self._states.check(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`; that of Sync, {}, begins a round. Collective. Raises what `check` raises."""
        self._states.check(state)
        self._states.restore(state)
        self.steps = state.get("round", {}).get("steps", 0)
        self._is_resumed = True

    def own_state(self) -> dict[str, Any]:
        """Return `whole_own_state`, or {} if a checkpoint of the model is enough for one rank. Collective."""
        own = self.whole_own_state()
        return {} if self._world.size == 1 and all(fragment.is_idle for fragment in self.fragments) else own

    def whole_own_state(self) -> dict[str, Any]:
        """Return parameters and optimizer of this rank, and what they add to the outer steps: `residual`. Collective.

        What is under way arrives first, so that the state is complete.
        """
        if not self._world.control.is_broken:
            finish_all(self.fragments)
        return self._states.own()

    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Go on from an `own_state`.

        With other ranks than before, all begin with the parameters of the last outer step. What the ranks before had
        learned since then goes into the next outer step.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        self._states.restore_own(state)
        self._is_resumed = True

    def close(self) -> None:
        """Give back the communicators. Collective, except in a broken World."""
        for fragment in self.fragments:
            if not self._world.control.is_broken:
                fragment.drop()
            fragment.close()
