"""Local updates: each rank trains on its own; once in many steps, an outer step exchanges the parameters.

LocalSGD, DiLoCo, StreamingDiLoCo and SparseLoCo are settings of one mechanism: fragments of the parameters, each with
an outer step every `sync_every` steps. outer_steps.py has the schedule and the state, fragments.py the exchange.
In between, ranks exchange only 80 bytes per step: samples, losses, and whether a gradient cannot be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy

from mpitrain.adapters.adapter import Adapter, LocalModel
from mpitrain.arrays import Array, is_device_array
from mpitrain.compression.quantised_top_k import MOST_BITS
from mpitrain.compression.top_k import BLOCK_VALUES, HIGHEST, LOWEST
from mpitrain.errors import ConfigError, everywhere
from mpitrain.measured_loss import OF_THE_PAPER, MeasuredLoss, in_python, local_updates_without_loss
from mpitrain.optim.optimizers import SGD, Optimizer, described
from mpitrain.reducer.alone import AloneExchange
from mpitrain.reducer.exchange import CompressedExchange, Exchange, make_exchange
from mpitrain.reducer.means import Means
from mpitrain.reducer.reducer import GradientReducer
from mpitrain.strategies.outer_steps import OuterSchedule, OuterSteps
from mpitrain.strategies.strategy import Strategy, applied, share_parameters, without_rounds
from mpitrain.world.world import World

# A rank's gradients are not sent, so there is no reason to cut them into buckets.
ONE_BUCKET = 2**62


class LocalUpdates(Strategy):
    """The common part of the strategies below, which describe the arguments; see Strategy."""

    def __init__(
        self,
        sync_every: int,
        *,
        warm_up: int = 0,
        exchange: Callable[[World], Exchange],
        outer: Optimizer | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        by_rank: bool = False,
    ) -> None:
        """`by_rank`: in an outer step, each rank sends its own values, also to the other ranks of its node."""
        self.schedule = OuterSchedule(type(self).__name__, sync_every, warm_up, fragments, delay, alpha)
        self._exchange, self._outer, self._by_rank = exchange, outer, by_rank
        self._outer_settings = described(outer)

    def outer_steps(self, world: World, model: LocalModel) -> OuterSteps:
        """Return the outer steps for a loop that makes its own optimizer steps, such as that of mpitrain.torch.prepare.

        Collective. Raises what OuterSteps raises.
        """
        return OuterSteps(world, model, self.schedule, self._outer, self._exchange, by_rank=self._by_rank)

    @property
    def warm_up(self) -> int:
        """The number of first steps of the training that are made as with Sync."""
        return self.schedule.warm_up

    @property
    def keeps_own_state(self) -> bool:
        """See Strategy: a message under way is also in this rank's parameters. In the warm-up, it is as with Sync."""
        return self.trains_alone

    @property
    def replicas_are_equal(self) -> bool:
        """See Strategy: False within a round."""
        return self._outer_steps.replicas_are_equal

    @property
    def trains_alone(self) -> bool:
        """See Strategy: the next step is not one of the warm-up."""
        return not self._left_to_warm_up

    @property
    def num_outer_steps(self) -> int:
        """See Strategy. Each fragment has its own."""
        return self._outer_steps.num_outer_steps

    @property
    def least_rounds(self) -> int:
        """The number of rounds with which a training was shown to lose nothing. With fewer, a warning is printed."""
        return min((row.rounds for row in self._shown()), default=0)

    def _shown(self) -> list[MeasuredLoss]:
        """The measured trainings with this strategy that lost nothing: those with its outer optimizer, if any."""
        rows = local_updates_without_loss(self.schedule.kind)
        return [row for row in rows if row.outer and _settings(row.outer) == self._outer_settings] or rows

    def doubt(self, steps: int) -> str:
        """See Strategy: the steps have fewer rounds than `least_rounds`."""
        warm_up, every, least = self.schedule.warm_up, self.schedule.sync_every, self.least_rounds
        rounds = max(0, steps - warm_up) // every
        if self._world.size == 1 or rounds >= least:
            return ""
        best = min(local_updates_without_loss(self.schedule.kind), key=lambda row: row.rounds, default=None)
        other = ""
        if best is not None and best.outer and _settings(best.outer) != self._outer_settings:
            other = f" With outer={in_python(best.outer)}, {best.rounds} rounds lost nothing."
        return (
            f"{self.schedule.kind}: {steps} steps are {rounds} rounds of sync_every={every}, after {warm_up} steps of "
            f"warm-up; it needs at least {least} rounds, since with fewer the loss was above that of mt.Sync.{other} "
            f"Make sync_every at most {max(1, (steps - warm_up) // least)}, train for at least "
            f"{warm_up + least * every} steps, or use mt.Sync()"
        )

    def begin(self, world: World, adapter: Adapter) -> None:
        """See Strategy. Every rank gets rank 0's parameters. Raises what OuterSteps raises."""
        self._world, self._scale = world, adapter.loss_scale
        self._outer_steps = self.outer_steps(world, adapter)
        self._left_to_warm_up = self.schedule.warm_up
        on_device = any(is_device_array(value) for value in adapter.parameters().values())
        make_reducer = partial(GradientReducer, world, adapter.layout, on_device=on_device)
        self._warm_up = make_reducer(exchange=self._exchange) if self._left_to_warm_up else None
        share_parameters(world, adapter)
        self._alone = AloneExchange(world)
        self._inner = make_reducer(exchange=lambda _: self._alone, bucket_bytes=ONE_BUCKET, threaded=False)

    def begin_step(self, weight: float) -> None:
        """See Strategy. See OuterSteps.begin_step."""
        if self.trains_alone:
            self._outer_steps.begin_step()
        self._weight = weight
        self._alone.loss_scale = self._scale.value if self._scale else 1.0
        self._reducer.begin(weight, self._alone.loss_scale)

    def on_gradient(self, index: int, gradient: Array | None) -> None:
        """See Strategy."""
        self._reducer.ready(index, gradient)

    def finish_step(self, adapter: Adapter, loss: float) -> tuple[Means, float]:
        """See Strategy. The loss is the mean over all ranks, each with the parameters that it has."""
        may_skip = self._scale is not None and self._scale.may_skip
        means = self._reducer.finish(loss, may_skip=may_skip, note=adapter.note())
        if not self.trains_alone:
            self._world.commit()
            rate = applied(adapter, self._reducer.flats, means, self._scale)
            self._left_to_warm_up -= 1
            return means, rate
        samples = (self._weight, means.weight) if means.is_finite else (0.0, 0.0)
        with self._outer_steps.around_update(*samples):
            rate = adapter.apply_gradients(self._inner.flats, means.remarks) if means.is_finite else 0.0
        if self._scale:  # not above: if an outer step fails, the scale must not change
            self._scale.update(skipped=not means.is_finite)
        return means, rate

    def end_run(self) -> None:
        """See Strategy. The round ends here; see OuterSteps.end_round."""
        self._outer_steps.end_round()

    def state(self) -> dict[str, Any]:
        """See Strategy: that of OuterSteps, and `warm_up` in that."""
        warm_up = {"warm_up": self._left_to_warm_up} if self._left_to_warm_up else {}
        return {**warm_up, **self._outer_steps.state()}

    def check(self, state: dict[str, Any]) -> None:
        """See Strategy. Raises what OuterSteps.check raises."""
        self._outer_steps.check(state)

    def restore(self, state: dict[str, Any]) -> None:
        """See Strategy. The state of Sync, {}, begins a round without a warm-up. Raises what `check` raises."""
        self._outer_steps.restore(state)
        self._left_to_warm_up = state.get("warm_up", 0) if self._warm_up else 0

    def own_state(self) -> dict[str, Any]:
        """See Strategy, and OuterSteps.own_state."""
        return self._outer_steps.own_state() if self.trains_alone else self._reducer.state()

    def restore_own(self, state: dict[str, Any]) -> None:
        """See Strategy, and OuterSteps.restore_own."""
        if self.trains_alone:
            self._outer_steps.restore_own(state)
        else:
            self._reducer.restore(without_rounds(state))

    def close(self) -> None:
        """See Strategy."""
        self._inner.close()
        self._outer_steps.close()
        if self._warm_up:
            self._warm_up.close()

    @property
    def _reducer(self) -> GradientReducer:
        """The reducer of the next step: in the warm-up it computes the means of all ranks, afterwards only this
        rank's."""
        return self._warm_up if self._warm_up and self._left_to_warm_up else self._inner


class LocalSGD(LocalUpdates):
    """Each rank makes `sync_every` steps of its own optimizer, on its own samples; an *outer step* follows.

    In the outer step, all ranks continue from the mean of their parameters, weighted by the samples that each has used
    in this round. With sync_every=1 and plain SGD, it is Sync, to rounding. On one rank it is plain training, bit for
    bit. The state of the optimizer, such as momentum, stays with its rank. A rank without samples in a step makes this
    step with gradients of zeros, so that the schedules of all ranks stay in step.

    Between outer steps the parameters differ from rank to rank. Compare, evaluate and export at multiples of
    `sync_every`. A run ends with an outer step.

    Source: Stich, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767 (2018), algorithm 1; weights by
    samples as in McMahan et al., arXiv 1602.05629 (2016).
    """

    def __init__(
        self, sync_every: int = 10, *, warm_up: int = 0, exchange: Callable[[World], Exchange] = make_exchange
    ) -> None:
        """Give the same values on all ranks.

        Args:
            sync_every: steps of a round, at least 1.
            warm_up: the number of first steps of the training that are made as with Sync.
            exchange: a function of a World that returns the object which computes means over ranks.

        Raises:
            ConfigError: a value is not allowed.
        """
        super().__init__(sync_every, warm_up=warm_up, exchange=exchange)


class DiLoCo(LocalUpdates):
    """As LocalSGD, with an *outer optimizer*, which moves the common parameters in an outer step.

    Its gradient is the mean, over ranks, of the parameters at the beginning of the round minus those at its end.

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105
    (2023), algorithm 1. The defaults are the paper's: 500 steps, and Nesterov momentum of 0.9 with a rate of 0.7. They
    suit trainings of several hundred rounds. With about 60, `outer=SGD(1.0, momentum=0.8, nesterov=True)` was better.
    """

    def __init__(
        self,
        sync_every: int = 500,
        *,
        outer: Optimizer | None = None,
        warm_up: int = 0,
        exchange: Callable[[World], Exchange] = make_exchange,
    ) -> None:
        """Give the same values on all ranks.

        Args:
            sync_every, warm_up, exchange: see LocalSGD.
            outer: the outer optimizer; default: `SGD(0.7, momentum=0.9, nesterov=True)`. `SGD(1.0)` gives LocalSGD. Its
                weight decay has no effect, and its clip_norm applies to each fragment and dtype separately.

        Raises:
            ConfigError: a value is not allowed.
        """
        super().__init__(sync_every, warm_up=warm_up, exchange=exchange, outer=outer or _nesterov(OF_THE_PAPER))


def _nesterov(outer: Sequence[float]) -> Optimizer:
    rate, momentum = outer
    return SGD(rate, momentum=momentum, nesterov=True)


def _settings(outer: Sequence[float]) -> str:
    return described(_nesterov(outer))


class StreamingDiLoCo(LocalUpdates):
    """As DiLoCo, but one fragment of the parameters at a time, which spreads the network load.

    The parameters are cut, in their order, into fragments of equal numbers of elements. Each fragment has an outer step
    once in `sync_every` steps, and the outer steps of the fragments are spread evenly over a round. A fragment is sent
    while the next `delay` steps compute. Then a rank continues from `alpha` times its own values, and 1 - alpha times
    the common ones. The replicas are equal only at the end of a run.

    Source: Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512 (2025), algorithm 2;
    the delay has the value of the paper. Its alpha is 0.5, with which a small model lost 0.1 nats, and nothing with 0
    (benchmarks/low_communication.py). For its 4-bit exchange, set MPITRAIN_COMPRESSION=int4.
    """

    def __init__(
        self,
        sync_every: int = 100,
        *,
        fragments: int = 4,
        delay: int = 1,
        alpha: float = 0.0,
        outer: Optimizer | None = None,
        warm_up: int = 0,
        exchange: Callable[[World], Exchange] = make_exchange,
    ) -> None:
        """Give the same values on all ranks.

        Args:
            sync_every, outer, warm_up, exchange: see DiLoCo.
            fragments: the number of fragments, 1 to the number of trained elements. If a round has fewer steps, some
                are sent at once.
            delay: the steps during which a fragment travels, 0 to `sync_every`. 0: the ranks wait for it.
            alpha: the share of a rank's own values, at least 0 and below 1; 0 if the delay is 0.

        Raises:
            ConfigError: a value is not allowed.
        """
        super().__init__(
            sync_every,
            warm_up=warm_up,
            exchange=exchange,
            outer=outer or _nesterov(OF_THE_PAPER),
            fragments=fragments,
            delay=delay,
            alpha=alpha,
        )


class SparseLoCo(LocalUpdates):
    """As LocalSGD, but in an outer step a rank sends only a few of its values, and keeps the rest for later ones.

    In round t, with the common parameters c, the parameters w of this rank after `sync_every` steps, its share s of the
    samples of the round, and the values e that it has kept:

        e = decay x e + s x (c - w)
        sent = of each 4096 values of e the largest, a part `density` of them, rounded to `bits` bits
        e = e - sent
        c = c - the sum of what all ranks have sent

    So the outer optimizer is SGD with a rate of 1 and without momentum; the kept values take the place of momentum.
    With equal shares, e is that of the source divided by the number of ranks, and c is the same.

    Each rank sends its values to every other rank, also inside a node; compression/quantised_top_k.py has the format.
    The bytes grow with the number of ranks. On one rank nothing is sent, and it is plain training, bit for bit. The
    rest of e at the end of a run is not in the parameters, but it is in a checkpoint.

    Source: Sarfi, Therien, Lidin and Belilovsky, Communication Efficient LLM Pre-training with SparseLoCo, arXiv
    2508.15706 (2025). The defaults are those of the authors' code (github.com/tplr-ai/templar, version 2.1.3: 30 inner
    steps, 64 of 4096, 4 bins, momentum_decay 0.95, outer_learning_rate 1). Unlike in that code, blocks are 4096 values
    of the flat parameters, not of one tensor, and ranks are weighted by their samples.
    """

    def __init__(self, sync_every: int = 30, *, density: float = 1 / 64, bits: int = 2, decay: float = 0.95) -> None:
        """Give the same values on all ranks.

        Args:
            sync_every: see LocalSGD.
            density: the fraction of the values that a rank sends, 1/4096 to 0.5. A block sends at least one.
            bits: of each value that is sent, its sign included, 1 to 4.
            decay: the factor of what a rank has kept, at each outer step, 0 to 1. 0: what is not sent is lost. 1:
                nothing is lost.

        Raises:
            ConfigError: a value is not allowed.
        """
        if not isinstance(density, (int, float)) or not LOWEST <= density <= HIGHEST:
            raise ConfigError(
                f"SparseLoCo: density={density!r}; it must be a number from {LOWEST:.5f} (one of "
                f"{BLOCK_VALUES} values) to {HIGHEST}"
            )
        if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= MOST_BITS:
            raise ConfigError(f"SparseLoCo: bits={bits!r}; it must be an int from 1 to {MOST_BITS}")
        if not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise ConfigError(f"SparseLoCo: decay={decay!r}; it must be a number from 0 to 1")
        self._codec, self._density, self._decay = f"top_k:{float(density)}:{bits}", float(density), float(decay)
        super().__init__(sync_every, exchange=self._make_exchange, by_rank=True)

    @property
    def least_rounds(self) -> int:
        """See LocalUpdates: after this many rounds, the number of sent values equals the number of parameters."""
        return math.ceil(1 / self._density)

    def outer_steps(self, world: World, model: LocalModel) -> OuterSteps:
        """See LocalUpdates.

        Raises:
            MismatchError: the ranks differ in the arguments or in the model. Raised on every rank.
            ConfigError: on several ranks: a parameter is not float32; the model has buffers that change by a mean; the
                World's compression is a codec; or its reduction is exact. Raised on every rank.
        """
        values, num_buffers = model.parameters(), getattr(model, "num_buffers", 0)
        names = [parameter.name for parameter in model.layout]
        others = [f"{name} is {values[name].dtype}" for name in names if values[name].dtype != numpy.float32]
        buffers, compression = names[len(names) - num_buffers :], world.config.compression
        settings = f"SparseLoCo({self._codec}, decay={self._decay}), compression {compression}"
        world.agree("begin", [settings, f"buffers: {buffers}", f"not float32: {others}"])
        problem = ""
        if compression not in ("none", "auto"):
            problem = f"compression={compression}: it has its own wire format. Leave compression out, or use mt.DiLoCo"
        elif world.config.reduction == "exact":
            problem = (
                "reduction=exact: it accumulates each rank's kept values in float32. Use reduction=plain, or mt.DiLoCo"
            )
        elif buffers:
            problem = (
                f"it sends only the largest values, and the model has {num_buffers} buffers whose mean all ranks need, "
                f"such as {buffers[0]}. Use layers without running means, or mt.DiLoCo"
            )
        elif others:
            problem = f"it sends float32, and {others[0]}. Make all parameters float32, or use mt.DiLoCo"
        if problem and world.size > 1:
            raise everywhere(ConfigError(f"SparseLoCo: {problem}"))
        if compression == "auto" and world.size > 1:
            world.print(f"mpitrain: compression auto: none; SparseLoCo sends its values as {self._codec}")
        return super().outer_steps(world, model)

    def _make_exchange(self, world: World) -> Exchange:
        if world.size == 1:
            return make_exchange(world, compression="none")
        return CompressedExchange(world, self._codec, self._decay)
