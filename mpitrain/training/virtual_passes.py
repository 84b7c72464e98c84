"""The passes of a step with virtual ranks: each rank computes its virtual ranks one after the other.

    global batch of 12, 4 virtual ranks      0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
    on 2 ranks                               rank 0: 0, then 1     rank 1: 2, then 3
    on 3 ranks                               rank 0: 0, then 1     rank 1: 2     rank 2: 3

A pass sees nothing of the number of ranks: its samples, its random numbers, its weight and the model are the same
wherever it is computed. So are its gradients, if the same kernels compute them (probe.py). The strategy adds up the
gradients of all passes exactly (mpitrain/exchange/summands.py).

Source: EasyScale, Li et al., EasyScale: Elastic Training with Consistent Accuracy and Improved Utilization on GPUs,
SC 2023.
"""

from __future__ import annotations

import math

from mpitrain.adapters.adapter import seeded_of
from mpitrain.exchange.trees import aligned_copy
from mpitrain.strategies.sync import Sync
from mpitrain.strategies.virtual_ranks import VirtualRanks
from mpitrain.training.data.prefetch import cut_into
from mpitrain.training.parts import Parts
from mpitrain.training.probe import probe
from mpitrain.tree import Tree, leaves, num_samples, rebuild
from mpitrain.world import World


class VirtualPasses:
    """The passes of this rank's virtual ranks in each step of a Trainer, in one World.

    Attributes:
        non_finite_loss: the first loss of this step that is NaN or infinity, of a virtual rank with samples; 0: none.
    """

    def __init__(self, world: World, parts: Parts, strategy: Sync, virtual: VirtualRanks) -> None:
        """Collective: the data is cut into virtual ranks from now on.

        Raises:
            ConfigError: the data, or the adapter, cannot be used with these virtual ranks. Raised on every rank.
        """
        self._world = world
        self._strategy, self._virtual = strategy, virtual
        with world.together("prepare virtual ranks"):
            self._adapter = seeded_of(parts.adapter)
            self._adapter.seeded(virtual.key(0, 0))  # one around another asks that one
        self._samples = cut_into(parts.data, virtual.number)
        self._own = virtual.of_rank(world)
        self._is_probed = False

    def compute(self, batch: Tree, step: int) -> float:
        """Begin the step of this number, and hand in the gradients of all passes. Return the loss of the last one.

        Collective. `batch` has the samples of this rank. Before the first step in this World, the probe is made.

        Raises:
            GradientError: ranks do not compute the same bits of the same samples. Raised on every rank.
        """
        places = (slice(place * self._samples, (place + 1) * self._samples) for place in range(len(self._own)))
        parts = [_copied(batch, place) for place in places]
        if not self._is_probed:
            key = self._virtual.key(step, 0)
            first = _copied(self._world.broadcast(parts[0]), slice(None))
            self._strategy.places.add(self._world, probe(self._world, self._adapter, first, key))
            self._is_probed = True
        self._strategy.begin_step([num_samples(part) for part in parts])
        loss = self.non_finite_loss = 0.0
        for number, part in zip(self._own, parts, strict=True):
            with self._adapter.seeded(self._virtual.key(step, number)):
                loss = self._adapter.loss_and_gradients(part, self._strategy.on_gradient)
            if not self.non_finite_loss and num_samples(part) and not math.isfinite(loss):
                self.non_finite_loss = loss
            if number != self._own[-1]:
                self._strategy.next_pass(self._adapter, loss)
        return loss


def passes_of(world: World, parts: Parts) -> VirtualPasses | None:
    """Return the passes that the strategy asks for; None: one pass over all samples of the rank. Collective."""
    strategy = parts.strategy
    if isinstance(strategy, Sync) and strategy.virtual:
        return VirtualPasses(world, parts, strategy, strategy.virtual)
    return None


def _copied(batch: Tree, part: slice) -> Tree:
    """Return these samples of a batch in new memory.

    A kernel may round otherwise where an array begins at another place of a cache line, and the place of a virtual rank
    in the batch of its rank depends on the number of ranks.
    """
    values = (leaf[part] for _, leaf in leaves(batch))
    return rebuild(batch, lambda: aligned_copy(next(values)))
