"""diloco: ranks train by themselves for many steps, and then an outer optimizer moves what they have in common."""

from __future__ import annotations

from collections.abc import Callable

from mpitrain.exchange.exchange import Exchange, make_exchange
from mpitrain.strategies.rounds import Rounds
from mpitrain.training.optimizers import Optimizer, Sgd
from mpitrain.world import World


class DiLoCo(Rounds):
    """As LocalSGD, with an *outer optimizer*, which moves the common parameters in an outer step.

    Its gradient is the mean, over ranks, of the parameters at the beginning of the round minus those at its end.

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105
    (2023), algorithm 1. The defaults are the paper's: 500 steps, and Nesterov momentum of 0.9 with a rate of 0.7.
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
            outer: the outer optimizer; default: `Sgd(0.7, momentum=0.9, nesterov=True)`. `Sgd(1.0)` gives LocalSGD. Its
                weight decay, if any, applies to nothing, and its clip_norm to each fragment and dtype by itself.

        Raises:
            ConfigError: a value is not allowed.
        """
        super().__init__(sync_every, warm_up=warm_up, exchange=exchange, outer=outer or nesterov())


def nesterov() -> Optimizer:
    """Return the outer optimizer of the papers."""
    return Sgd(0.7, momentum=0.9, nesterov=True)
