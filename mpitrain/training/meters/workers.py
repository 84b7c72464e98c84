"""What the workers of a server do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.serve.ledger import ServerLedger
from mpitrain.training.meters.meter import Meter, Reading

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer


class Workers(Meter):
    """`workers`: the number that is there. The others are over the updates of the row, in a job with a server.

    `waiting_share`: the share of the workers' time in which they had no job; a wait counts when it has ended.
    `staleness`, `largest_staleness`: of the gradients. `pulled_bytes`, `pushed_bytes`: of parameters and gradients, by
    all workers, for each update.
    """

    reads_model = False

    def __init__(self) -> None:
        self._steps = 0
        self._ledger = ServerLedger()
        self._note()

    def _note(self) -> None:
        """Note the tallies: the next row begins."""
        workers = self._ledger.workers
        self._bytes_in, self._bytes_out = self._ledger.bytes_in, self._ledger.bytes_out
        self._worked = sum(one.seconds for one in workers)
        self._waited = sum(one.waited_seconds for one in workers)
        self._staleness = self._ledger.staleness.copy()
        self._steps = 0

    def start(self, trainer: Trainer) -> str:
        """See Meter."""
        return "" if trainer.served else "it has no workers"

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Meter."""
        assert trainer.served is not None
        if trainer.served.ledger is not self._ledger:  # the server has begun, or begun again from another state
            self._ledger = ServerLedger()
            self._note()
            self._ledger = trainer.served.ledger
        self._steps += 1

    def read(self, trainer: Trainer) -> dict[str, Reading]:
        """See Meter."""
        if not self._steps:
            return {}
        ledger = self._ledger
        readings = {
            "workers": float(sum(one.is_here for one in ledger.workers)),
            "pulled_bytes": (ledger.bytes_out - self._bytes_out) / self._steps,
            "pushed_bytes": (ledger.bytes_in - self._bytes_in) / self._steps,
        }
        waited = sum(one.waited_seconds for one in ledger.workers) - self._waited
        worked = sum(one.seconds for one in ledger.workers) - self._worked
        if waited + worked > 0:
            readings["waiting_share"] = waited / (waited + worked)
        if staleness := ledger.staleness - self._staleness:  # none if the updates were skipped
            readings["staleness"] = sum(value * count for value, count in staleness.items()) / staleness.total()
            readings["largest_staleness"] = float(max(staleness))
        self._note()
        return {name: Reading(value, over_ranks="root") for name, value in readings.items()}
