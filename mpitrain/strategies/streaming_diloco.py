"""streaming_diloco: DiLoCo in fragments, which travel while the next steps compute."""

from __future__ import annotations

from collections.abc import Callable

from mpitrain.exchange.exchange import Exchange, make_exchange
from mpitrain.strategies.diloco import nesterov
from mpitrain.strategies.rounds import Rounds
from mpitrain.training.optimizers import Optimizer
from mpitrain.world import World


class StreamingDiLoCo(Rounds):
    """As DiLoCo, for one fragment of the parameters at a time, so that the network has less to do at once.

    The parameters are cut, in their order, into fragments of equally many elements. Each fragment has an outer step
    once in `sync_every` steps, and the outer steps of the fragments are spread evenly over a round. A fragment is sent
    while the next `delay` steps compute. Then a rank goes on from `alpha` times its own values, and 1 - alpha times the
    common ones. The replicas are equal at the end of a run only.

    Source: Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512 (2025), algorithm 2;
    alpha and the delay have the values of the paper. For its 4-bit exchange, set MPITRAIN_COMPRESSION=int4.
    """

    def __init__(
        self,
        sync_every: int = 100,
        *,
        fragments: int = 4,
        delay: int = 1,
        alpha: float = 0.5,
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
            outer=outer or nesterov(),
            fragments=fragments,
            delay=delay,
            alpha=alpha,
        )
