"""local_sgd: ranks train by themselves for some steps, and then go on from the mean of their parameters."""

from __future__ import annotations

from collections.abc import Callable

from mpitrain.exchange.exchange import Exchange, make_exchange
from mpitrain.strategies.rounds import Rounds
from mpitrain.world import World


class LocalSGD(Rounds):
    """Each rank makes `sync_every` steps of its own optimizer, on its own samples; then they meet in an *outer step*.

    There all ranks go on from the mean of their parameters, weighted by the samples that each has seen in this round.
    With sync_every=1 and plain SGD, it is Sync, to rounding. On one rank it is plain training, bit for bit. The state
    of the optimizer, such as momentum, stays with its rank. A rank without samples in a step makes this step with
    gradients of zeros, so that the schedules of all ranks stay together.

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
            warm_up: the first steps of the training are made as with Sync, so many.
            exchange: makes the object that computes means over ranks, for a World.

        Raises:
            ConfigError: a value is not allowed.
        """
        super().__init__(sync_every, warm_up=warm_up, exchange=exchange)
