"""Rounds: ranks train by themselves, and exchange their parameters once in a round of many steps.

    step           1   2   3  ...  sync_every     sync_every + 1
    rank 0         ──────────────────┐  outer  ┌──────────────
    rank 1         ──────────────────┴─ step ──┴──────────────

In between, ranks send each other only 80 bytes a step: samples, losses, and whether a gradient cannot be used. The
parameters may be cut into fragments, each with its own outer step, which may arrive some steps later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from mpitrain.adapters.adapter import Adapter
from mpitrain.adapters.fits import check_fits
from mpitrain.arrays import Array, is_device_array
from mpitrain.cuda.staging import like
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.exchange.alone import AloneExchange
from mpitrain.exchange.exchange import Exchange
from mpitrain.exchange.means import Means
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.strategies.fragments import Fragment, cut
from mpitrain.strategies.of_rounds import ROUND
from mpitrain.strategies.sync import Sync
from mpitrain.training.optimizers import Optimizer, described
from mpitrain.world import World

# A rank's gradients go nowhere, so there is no reason to cut them into buckets.
_ONE_BUCKET = 2**62


class Rounds:
    """The common part of LocalSGD, DiLoCo and StreamingDiLoCo, which describe the arguments; see Strategy."""

    def __init__(
        self,
        sync_every: int,
        *,
        warm_up: int,
        exchange: Callable[[World], Exchange],
        outer: Optimizer | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
    ) -> None:
        counts = {"sync_every": (sync_every, 1), "warm_up": (warm_up, 0), "fragments": (fragments, 1)}
        for name, (value, least) in counts.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{type(self).__name__}: {name}={value!r}; it must be an int of at least {least}")
        if not isinstance(delay, int) or isinstance(delay, bool) or not 0 <= delay <= sync_every:
            raise ConfigError(
                f"{type(self).__name__}: delay={delay!r}; it must be an int from 0 to sync_every={sync_every}, as a "
                "fragment must arrive before it is sent again"
            )
        if not 0 <= alpha < 1 or (alpha and not delay):
            raise ConfigError(
                f"{type(self).__name__}: alpha={alpha!r}; it must be at least 0 and below 1, and 0 without a delay"
            )
        self._sync_every, self._warm_up, self._exchange, self._outer = sync_every, warm_up, exchange, outer
        self._num_fragments, self._delay, self._alpha = fragments, delay, float(alpha)

    @property
    def keeps_own_state(self) -> bool:
        """See Strategy: what is under way is in this rank's parameters too. In the warm-up, it is as with Sync."""
        return not self._is_warming_up

    @property
    def replicas_are_equal(self) -> bool:
        """See Strategy: False within a round."""
        return not any(fragment.is_apart or fragment.flying for fragment in self._fragments)

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy. Every rank gets rank 0's parameters.

        Raises:
            MismatchError: the ranks differ in the arguments or in the model. Raised on every rank.
            ConfigError: there are more fragments than trained elements. Raised on every rank.
        """
        self._world, self._adapter, self._scale = world, adapter, adapter.loss_scale
        arguments = (self._sync_every, self._warm_up, self._num_fragments, self._delay, self._alpha)
        names = "sync_every", "warm_up", "fragments", "delay", "alpha"
        said = ", ".join(f"{name}={value}" for name, value in zip(names, arguments, strict=True))
        outer = described(self._outer) if self._outer else "none"
        world.agree("begin", [f"{type(self).__name__}({said})", f"outer optimizer {outer}"])
        parts = cut(adapter, self._num_fragments)
        self._sync = Sync(self._exchange) if self._warm_up else None
        if self._sync:
            self._sync.begin(world, adapter)
        elif world.size > 1:
            adapter.load_parameters(world.sync(adapter.parameters()))
        self._alone = AloneExchange(world)
        on_device = any(is_device_array(value) for value in adapter.parameters().values())
        self._inner = GradientReducer(
            world,
            adapter.layout,
            exchange=lambda _: self._alone,
            bucket_bytes=_ONE_BUCKET,
            threaded=False,
            on_device=on_device,
        )
        # The fragments are sent one after the other, at equal distances in the round, the last one at its end.
        self._fragments = [
            Fragment(world, adapter, pieces, -(-self._sync_every * number // len(parts)), self._outer, self._exchange)
            for number, pieces in enumerate(parts, 1)
        ]
        self._left_to_warm_up = self._warm_up
        self._steps = 0  # of the present round

    def begin_step(self, weight: float) -> None:
        """See Strategy. Fragments that are sent with a delay start here, from what the ranks have committed."""
        if self._is_warming_up:
            assert self._sync
            self._sync.begin_step(weight)
            return
        if self.replicas_are_equal and not self._is_plain:
            for fragment in self._fragments:
                fragment.note()
        if self._delay:
            for fragment in self._due(self._steps or self._sync_every):
                fragment.start(self._delay)
        self._weight = weight
        self._alone.loss_scale = self._scale.value if self._scale else 1.0
        self._inner.begin(weight, self._alone.loss_scale)

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """See Strategy."""
        if self._is_warming_up:
            assert self._sync
            self._sync.on_gradient(index, gradient)
        else:
            self._inner.ready(index, gradient)

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """See Strategy. The loss is the mean over all ranks, each with the parameters that it has."""
        if self._is_warming_up:
            assert self._sync
            made = self._sync.finish_step(adapter, loss)
            self._left_to_warm_up -= 1
            return made
        may_skip = self._scale is not None and self._scale.may_skip
        means = self._inner.finish(loss, may_skip=may_skip, note=adapter.note())
        for fragment in self._fragments:
            fragment.steps_left -= 1
        arriving = [fragment for fragment in self._fragments if fragment.flying and not fragment.steps_left]
        for fragment in arriving:
            fragment.finish()
        if self._is_plain:
            self._world.commit()
            rate = self._apply(means)
        elif due := [] if self._delay else self._due(self._steps + 1):
            rate = self._apply_and_meet(means, due)
        else:
            self._world.commit()
            rate = self._apply(means)
            self._count(means)
        for fragment in arriving:
            fragment.update(self._alpha)
        self._steps = 0 if self._is_plain else (self._steps + 1) % self._sync_every
        if self._scale:
            self._scale.update(skipped=not means.is_finite)
        return means, rate

    def end_run(self) -> None:
        """See Strategy. The round ends here, with all that is under way."""
        if self.replicas_are_equal:
            return
        for fragment in self._fragments:
            fragment.finish()
            fragment.forget()
            fragment.start(0)
            fragment.finish()
        self._world.commit()
        for fragment in self._fragments:
            if fragment.flying:
                fragment.update(0.0)
            elif fragment.is_apart:  # all steps since its last outer step were skipped
                fragment.go_back()
        self._steps = 0

    @property
    def _is_plain(self) -> bool:
        """One rank trains, and begins no round, since its end would change nothing."""
        return self._world.size == 1 and self._outer is None and self.replicas_are_equal

    @property
    def _is_warming_up(self) -> bool:
        return self._left_to_warm_up > 0

    def _due(self, steps: int) -> list[Fragment]:
        """The fragments that are sent when so many steps of a round have been made."""
        return [fragment for fragment in self._fragments if fragment.offset == steps]

    def _apply(self, means: Means) -> float:
        return self._adapter.apply_gradients(self._inner.flats, means.remarks) if means.is_finite else 0.0

    def _count(self, means: Means, times: float = 1.0) -> None:
        if means.is_finite:
            for fragment in self._fragments:
                fragment.count(times * self._weight, times * means.weight)

    def _apply_and_meet(self, means: Means, due: Sequence[Fragment]) -> float:
        """Make the last step before an outer step, and the outer step, with one commit. Return the learning rate."""
        # Only a rank that may have to make this step again needs to go back to where it stood.
        before = deepcopy(self._adapter.state()) if self._world.committer is not None else None
        try:
            self._count(means)
            rate = self._apply(means)
            for fragment in due:
                fragment.start(0)
            for fragment in due:
                fragment.finish()
            self._world.commit()
        except Exception:
            if before is not None:
                self._adapter.restore(before)
                self._count(means, -1.0)
            raise
        for fragment in due:
            fragment.update(0.0)
        return rate

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """See Strategy: `outer` if there is an outer optimizer, `round` in the middle of one, `warm_up` in that."""
        state: dict[str, Any] = {}
        if self._is_warming_up:
            state["warm_up"] = self._left_to_warm_up
        if self._outer:
            state["outer"] = {
                str(number): {str(dtype): deepcopy(one.state()) for dtype, one in fragment.optimizers.items()}
                for number, fragment in enumerate(self._fragments)
            }
        if self._steps or not self.replicas_are_equal:
            state["round"] = {
                "steps": self._steps,
                "sync_every": self._sync_every,
                "delay": self._delay,
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
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """See Strategy. A state of Sync, {}, begins a round, without a warm-up.

        Raises:
            CheckpointError: the state belongs to other parameters, other fragments, or a longer round.
        """
        begun: Mapping[str, Any] = state.get("round", {})
        steps, samples = begun.get("steps", 0), begun.get("samples", [0.0] * len(self._fragments))
        outer = state.get("outer", {})
        if not steps < self._sync_every or len(samples) != len(self._fragments):
            raise CheckpointError(
                f"the checkpoint was made after {steps} steps of a round, with {len(samples)} fragments; this strategy "
                f"has sync_every={self._sync_every} and fragments={len(self._fragments)}: go on with sync_every above "
                f"{steps} and fragments={len(samples)}"
            )
        kinds = {str(number): {str(dtype) for dtype in one.optimizers} for number, one in enumerate(self._fragments)}
        if outer and {number: set(of_number) for number, of_number in outer.items()} != kinds:
            raise CheckpointError(
                "the checkpoint has the state of another outer optimizer, or of other fragments; go on with the "
                "strategy that has made it"
            )
        if "parameters" in begun:
            check_fits("parameters of the last outer step", begun["parameters"], self._origin())
        for number, fragment in enumerate(self._fragments):
            for dtype, optimizer in fragment.optimizers.items() if outer else ():
                optimizer.restore(outer[str(number)][str(dtype)])
            for piece, origin in zip(fragment.pieces, fragment.origins, strict=True) if begun else ():
                origin[...] = like(piece.of(begun["parameters"]), origin)
            fragment.finish()
            fragment.flying = None
            fragment.samples, fragment.all_samples = 0.0, samples[number]
            fragment.is_apart = bool(begun and begun["apart"][number])
            if arrived := begun.get("arrived", {}).get(str(number)):
                fragment.arrive((0.0, arrived["samples"]), arrived["steps_left"], arrived["means"])
                if (begun["sync_every"], begun["delay"]) != (self._sync_every, self._delay):
                    fragment.forget()
        self._left_to_warm_up = state.get("warm_up", 0) if self._sync else 0
        self._steps = steps

    def own_state(self) -> dict[str, Any]:
        """See Strategy: parameters and optimizer of this rank, and what they add to the outer steps: `residual`.

        What is under way arrives first, so that the state is complete.
        """
        if self._is_warming_up:
            assert self._sync
            return self._sync.own_state()
        if not self._world.control.is_broken:
            for fragment in self._fragments:
                fragment.finish()
        if self._world.size == 1 and all(fragment.is_idle for fragment in self._fragments):
            return {}
        samples = [[one.samples, one.flying[0] if one.flying else 0.0] for one in self._fragments]
        state: dict[str, Any] = {"place": self._place(), "local": self._adapter.state(), "samples": samples}
        for number, fragment in enumerate(self._fragments):
            for key, part in fragment.own_state().items():
                named = state.setdefault(key, {})
                named |= {f"{ROUND}{number}/{name}": value for name, value in part.items()}
        return state

    def restore_own(self, state: dict[str, Any]) -> None:
        """See Strategy. With other ranks than before, all begin with the parameters of the last outer step.

        What the ranks before had learned since then goes into the next outer step.

        Raises:
            CheckpointError: the state belongs to other parameters.
        """
        if self._is_warming_up:
            assert self._sync
            self._sync.restore_own(state)
            return
        is_same_rank = "local" in state
        if is_same_rank:
            self._adapter.restore(state["local"])
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

    def close(self) -> None:
        """See Strategy."""
        self._inner.close()
        for fragment in self._fragments:
            if not self._world.control.is_broken:
                fragment.finish()
            fragment.close()
        if self._sync:
            self._sync.close()

    def _origin(self) -> dict[str, Array]:
        """Return a copy of the parameters of the last outer step, by name."""
        values = self._adapter.parameters()
        origin = {parameter.name: values[parameter.name].copy() for parameter in self._adapter.layout}
        for fragment in self._fragments:
            for piece, value in zip(fragment.pieces, fragment.origins, strict=True):
                piece.of(origin)[...] = value
        return origin

    def _place(self) -> str:
        """A text that is equal if each rank can go on with its own state."""
        codecs = [fragment.place() for fragment in self._fragments]
        rounds = self._num_fragments, self._sync_every, self._delay
        parts = [type(self).__name__, self._world.node_ranks, rounds, codecs]
        return hashlib.sha256(repr(parts).encode()).hexdigest()
