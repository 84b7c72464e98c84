"""What a strategy of rounds keeps in checkpoints and in copies in memory; rounds.py has the strategy.

The common part has the parameters of the last outer step. A rank's own part has its parameters and optimizer, and what
it adds to the next outer steps. With other ranks than before, these sums go on, and the parameters do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from mpitrain.adapters.adapter import LocalModel
from mpitrain.adapters.fits import check_fits
from mpitrain.arrays import Array, is_array
from mpitrain.cuda.staging import like
from mpitrain.errors import CheckpointError
from mpitrain.strategies.fragments import Fragment
from mpitrain.strategies.of_rounds import ROUND
from mpitrain.strategies.round_plan import RoundPlan
from mpitrain.world import World


class RoundState:
    """The states of the fragments of one strategy: of all ranks, and of this one."""

    def __init__(self, world: World, model: LocalModel, plan: RoundPlan, fragments: Sequence[Fragment]) -> None:
        self._world, self._model, self._plan, self._fragments = world, model, plan, fragments

    def outer(self) -> dict[str, Any]:
        """Return the state of the outer optimizers, by fragment and dtype."""
        return {
            str(number): {str(dtype): deepcopy(one.state()) for dtype, one in fragment.optimizers.items()}
            for number, fragment in enumerate(self._fragments)
        }

    def round(self, steps: int) -> dict[str, Any]:
        """Return what is the same on all ranks in a round of which so many steps have been made."""
        return {
            "steps": steps,
            "sync_every": self._plan.sync_every,
            "delay": self._plan.delay,
            # With those of what has not arrived: it is sent anew.
            "samples": [
                one.all_samples + (one.flying[1] if one.flying and not one.has_arrived else 0.0)
                for one in self._fragments
            ],
            "apart": [one.is_apart or bool(one.flying) for one in self._fragments],
            "arrived": {
                str(number): {
                    "steps_left": fragment.steps_left,
                    "samples": fragment.flying[1],
                    "means": {str(piece): mean.copy() for piece, mean in fragment.means()},
                }
                for number, fragment in enumerate(self._fragments)
                if fragment.flying and fragment.has_arrived
            },
            "parameters": self._origin(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of all ranks that does not fit. Nothing changes.

        Raises:
            CheckpointError: the state belongs to other parameters, other fragments, or a longer round.
        """
        begun: Mapping[str, Any] = state.get("round", {})
        steps, count = begun.get("steps", 0), len(begun.get("samples", self._fragments))
        outer: Mapping[str, Any] = state.get("outer", {})
        if not steps < self._plan.sync_every or count != len(self._fragments):
            raise CheckpointError(
                f"the checkpoint was made after {steps} steps of a round, with {count} fragments; this strategy "
                f"has sync_every={self._plan.sync_every} and fragments={len(self._fragments)}: go on with sync_every "
                f"above {steps} and fragments={count}"
            )
        own = self.outer()
        kinds, its_kinds = ({number: of.keys() for number, of in one.items()} for one in (own, outer))
        if outer and kinds != its_kinds:
            raise CheckpointError(
                "the checkpoint has the state of another outer optimizer, or of other fragments; go on with the "
                "strategy that has made it"
            )
        for number, of_number in outer.items():
            for dtype, saved in of_number.items():
                check_fits(f"outer optimizer of fragment {number}", _arrays(saved), _arrays(own[number][dtype]))
        if begun:
            check_fits("parameters of the last outer step", begun["parameters"], self._origin())
        for number, arrived in begun.get("arrived", {}).items():
            means = {str(piece): mean for piece, mean in self._fragments[int(number)].means()}
            check_fits(f"mean of fragment {number}, which has arrived", arrived["means"], means)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of all ranks that `check` has let pass. Collective: what is under way is thrown away."""
        begun: Mapping[str, Any] = state.get("round", {})
        outer = state.get("outer", {})
        for number, fragment in enumerate(self._fragments):
            fragment.drop()
            for dtype, optimizer in fragment.optimizers.items() if outer else ():
                optimizer.restore(outer[str(number)][str(dtype)])
            fragment.is_apart = bool(begun and begun["apart"][number])
            if not begun:
                continue
            for piece, origin in zip(fragment.pieces, fragment.origins, strict=True):
                origin[...] = like(piece.of(begun["parameters"]), origin)
            fragment.all_samples = begun["samples"][number]
            if arrived := begun.get("arrived", {}).get(str(number)):
                fragment.arrive((0.0, arrived["samples"]), arrived["steps_left"], arrived["means"])
                if (begun["sync_every"], begun["delay"]) != (self._plan.sync_every, self._plan.delay):
                    fragment.forget()

    def own(self) -> dict[str, Any]:
        """Return what this rank adds to the outer steps, `residual` and `carried`, and its model: `local`."""
        samples = [[one.samples, one.flying[0] if one.flying else 0.0] for one in self._fragments]
        state: dict[str, Any] = {"place": self.place(), "local": self._model.state(), "samples": samples}
        for number, fragment in enumerate(self._fragments):
            for key, part in fragment.own_state().items():
                named = state.setdefault(key, {})
                named |= {f"{ROUND}{number}/{name}": value for name, value in part.items()}
        return state

    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Go on from an `own`, or from `carried` sums alone. Then this rank begins with the common parameters.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        is_same_rank = "local" in state
        if is_same_rank:
            self._model.restore(state["local"])
        for number, fragment in enumerate(self._fragments):
            if is_same_rank:
                fragment.samples, flying = state["samples"][number]
                if fragment.flying:
                    fragment.flying = flying, fragment.flying[1]
            else:
                fragment.forget()
                fragment.samples = 0.0
                if fragment.is_apart:
                    fragment.go_back()
            prefix = f"{ROUND}{number}/"
            parts = {key: state[key] for key in ("residual", "carried") if key in state}
            fragment.restore_own(
                {
                    key: {name.removeprefix(prefix): value for name, value in part.items() if name.startswith(prefix)}
                    for key, part in parts.items()
                }
            )

    def _origin(self) -> dict[str, Array]:
        """Return a copy of the parameters of the last outer step, by name."""
        values = self._model.parameters()
        origin = {parameter.name: values[parameter.name].copy() for parameter in self._model.layout}
        for fragment in self._fragments:
            for piece, value in zip(fragment.pieces, fragment.origins, strict=True):
                piece.of(origin)[...] = value
        return origin

    def place(self) -> str:
        """A text that is equal if each rank can go on with its own state."""
        codecs = [fragment.place() for fragment in self._fragments]
        rounds = self._plan.fragments, self._plan.sync_every, self._plan.delay
        parts = [self._plan.kind, self._world.node_ranks, rounds, codecs]
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def _arrays(state: Mapping[str, Any]) -> dict[str, Array]:
    return {name: value for name, value in state.items() if is_array(value)}
