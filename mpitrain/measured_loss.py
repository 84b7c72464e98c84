"""What it costs in loss to send less, as measured: the one table of the project.

From it come the remarks and the advice of `mpitrain plan`, the codecs of `compression=auto` and of `network=`, and the
warning of local updates on too few rounds. docs/how-to/low-communication.md quotes it. To add a measurement, add a row.

A row is the difference in loss from plain data-parallel training with the same seeds, samples and learning rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

CodecLoss = Literal["none", "rare", "costs", "not measured"]

# A difference is known only from so many seeds on.
_LEAST_SEEDS = 3
# The interval of a row without loss ends below this, in nats. Compression is held to more than local updates, because
# `auto` and `network=` choose it in place of the user.
_MOST_OF_CODECS, _MOST_OF_LOCAL_UPDATES = 0.005, 0.025

_LOG = "benchmarks/log/2026-12.md"
_OLDER_LOG = "benchmarks/log/2026-11.md"
# Rate and Nesterov momentum of outer optimizers: the default of DiLoCo, and what suited 60 rounds better.
OF_THE_PAPER, OF_FEW_ROUNDS = (0.7, 0.9), (1.0, 0.8)


@dataclass(frozen=True)
class MeasuredLoss:
    """One row of the table.

    Attributes:
        way: a compression with its setting, such as "power_sgd:4", or the class of a strategy of local updates.
        mean: the difference in nats, the mean of the seeds.
        interval: half of its interval of 95 %, in nats; None: one seed has none.
        sync_every: of local updates; 0: gradients are exchanged in every step.
        outer: rate and Nesterov momentum of the outer optimizer of local updates; (): it has none.
        warm_up: plain steps at the beginning.
        seeds, steps, parameters, workers: of the trainings.
        of: which loss.
        hazard: a fault that the trainings did not show; "": none is known.
        source: the log that has the measurement.
    """

    way: str
    mean: float
    interval: float | None = None
    seeds: int = 1
    sync_every: int = 0
    outer: tuple[float, ...] = ()
    warm_up: int = 0
    steps: int = 3000
    parameters: int = 109_376
    workers: int = 4
    of: str = "held-out loss"
    hazard: str = ""
    source: str = _LOG

    @property
    def rounds(self) -> int:
        """The number of rounds of local updates; 0: there are none."""
        return (self.steps - self.warm_up) // self.sync_every if self.sync_every else 0

    @property
    def length(self) -> int:
        """What a training needs as many of: rounds of local updates, else steps."""
        return self.rounds or self.steps

    @property
    def is_certain(self) -> bool:
        """Whether there were enough seeds."""
        return self.interval is not None and self.seeds >= _LEAST_SEEDS

    @property
    def costs_nothing(self) -> bool:
        """Whether enough seeds have shown that the loss is that of plain training, within the limits above."""
        if self.interval is None or not self.is_certain or self.hazard:
            return False
        most = _MOST_OF_LOCAL_UPDATES if self.sync_every else _MOST_OF_CODECS
        return self.mean - self.interval <= 0 and self.mean + self.interval <= most

    @property
    def difference(self) -> str:
        """The difference with its interval, for users: `-0.000 ± 0.023`."""
        return f"{self.mean:+.3f}" if self.interval is None else f"{self.mean:+.3f} ± {self.interval:.3f}"

    def __str__(self) -> str:
        plain = f", the first {self.warm_up} uncompressed" if self.warm_up and not self.sync_every else ""
        rounds = f", {self.rounds} rounds" if self.sync_every else ""
        return (
            f"{self.of} {self.difference} nats ({self.workers} workers, {shown_millions(self.parameters)} parameters, "
            f"{self.steps} steps{plain}{rounds}, {self.seeds} seed{'s' * (self.seeds > 1)})"
            f"{self.hazard and f'; {self.hazard}'}"
        )


def _of_400_steps(row: MeasuredLoss) -> MeasuredLoss:
    return replace(row, steps=400, parameters=234_720, source=_OLDER_LOG)


def _of_60_steps(row: MeasuredLoss) -> MeasuredLoss:
    return replace(row, steps=60, parameters=234_720, workers=2, of="training loss", source=_OLDER_LOG)


# A decoder with AdamW. Rows of 3,000 steps: `benchmarks/low_communication.py`.
TABLE: tuple[MeasuredLoss, ...] = (
    _of_60_steps(MeasuredLoss("bf16", 0.0009, 0.0013, 8)),
    MeasuredLoss("bf16", -0.0008),
    _of_400_steps(MeasuredLoss("fp16", -0.0002, 0.0012, 5, hazard="it overflows from 65520 on")),
    _of_60_steps(MeasuredLoss("int8", 0.0576, 0.1174, 8)),
    MeasuredLoss("int8", -0.0003, 0.0052, 3),
    _of_400_steps(MeasuredLoss("int4", 0.0017, 0.0218, 5)),
    MeasuredLoss("int4", 0.0022),
    _of_400_steps(MeasuredLoss("top_k:0.01", 0.9199, 0.0118, 5)),
    MeasuredLoss("top_k:0.01", 0.0714, warm_up=1000),
    MeasuredLoss("top_k:0.1", 0.0197, warm_up=1000),
    _of_400_steps(MeasuredLoss("power_sgd:4", 0.1418, 0.0297, 5)),
    MeasuredLoss("power_sgd:4", 0.0608, warm_up=100),
    MeasuredLoss("power_sgd:4", 0.0283, warm_up=1000),
    MeasuredLoss("power_sgd:4", 0.0165, warm_up=1500),
    MeasuredLoss("power_sgd:8", 0.0234, warm_up=500),
    MeasuredLoss("power_sgd:8", 0.0145, 0.0024, 3, warm_up=1000),
    _of_400_steps(MeasuredLoss("LocalSGD", 0.2107, 0.0222, 5, sync_every=10)),
    MeasuredLoss("DiLoCo", -0.0018, 0.01446, 3, sync_every=10, outer=OF_THE_PAPER),
    MeasuredLoss("DiLoCo", 0.0238, sync_every=10, outer=OF_FEW_ROUNDS),
    MeasuredLoss("DiLoCo", 0.0969, sync_every=50, outer=OF_THE_PAPER),
    MeasuredLoss("DiLoCo", -0.0003, 0.0233, 3, sync_every=50, outer=OF_FEW_ROUNDS),
    MeasuredLoss("DiLoCo", 0.0452, sync_every=50, outer=OF_FEW_ROUNDS, parameters=917_952),
    MeasuredLoss("DiLoCo", -0.0209, sync_every=30, outer=OF_FEW_ROUNDS),
    MeasuredLoss("DiLoCo", 0.0598, sync_every=100, outer=OF_FEW_ROUNDS),
    MeasuredLoss("DiLoCo", 0.1627, sync_every=200, outer=OF_FEW_ROUNDS),
    MeasuredLoss("DiLoCo", 0.0603, 0.0471, 3, sync_every=200, outer=OF_FEW_ROUNDS, steps=12_000),
    MeasuredLoss("DiLoCo", 0.0298, sync_every=200, outer=OF_FEW_ROUNDS, steps=12_000, warm_up=2000),
    MeasuredLoss("StreamingDiLoCo", -0.0147, 0.0176, 3, sync_every=50, outer=OF_FEW_ROUNDS),
    _of_400_steps(MeasuredLoss("SparseLoCo", 0.2917, 0.0162, 5, sync_every=10)),
    MeasuredLoss("SparseLoCo", 0.1773, sync_every=10),
    MeasuredLoss("SparseLoCo", 0.3046, sync_every=30),
)


def loss_with(compression: str) -> CodecLoss:
    """What is known of the loss with a compression, "none" among them.

    Returns:
        "none": no measured training has lost anything. "rare": some have, or it is not certain. "costs": all have.
        "not measured": there is no row.
    """
    if compression == "none":
        return "none"
    rows = list(_rows_of(compression))
    if not rows:
        return "not measured"
    certain = [row for row in rows if row.is_certain]
    if certain and all(row.costs_nothing and not row.warm_up for row in certain):
        return "none"
    return "rare" if any(row.mean <= (row.interval or 0.0) for row in certain) else "costs"


def without_loss(compression: str, steps: int | None = None) -> MeasuredLoss | None:
    """The longest measured training with a compression, from its first step on, that lost nothing; None: there is none.

    Args:
        compression: its name, with its setting.
        steps: of the user's training, about which a longer measured one shows nothing. None: not known.
    """
    return _longest([row for row in _rows_of(compression) if not row.warm_up], steps)


def rounds_without_loss(
    strategy: str, sync_every: int, outer: tuple[float, ...], steps: int | None = None
) -> MeasuredLoss | None:
    """The same for local updates: the class of a strategy, the steps of a round, and the outer optimizer."""
    settings = strategy, sync_every, outer, 0
    rows = [row for row in TABLE if (row.way, row.sync_every, row.outer, row.warm_up) == settings]
    return _longest(rows, None if steps is None else steps // sync_every)


def local_updates_without_loss(strategy: str) -> list[MeasuredLoss]:
    """A measured training without loss for each setting of a class of local updates that has one."""
    settings = dict.fromkeys((row.sync_every, row.outer) for row in TABLE if row.way == strategy)
    return [row for one in settings if (row := rounds_without_loss(strategy, *one))]


def losses_of_other_sizes(good: MeasuredLoss) -> list[MeasuredLoss]:
    """The rows with the settings of this one and other numbers of parameters, as long, that lost something."""

    def settings(row: MeasuredLoss) -> MeasuredLoss:
        return replace(row, mean=0.0, interval=None, seeds=0, parameters=0)

    same = [row for row in TABLE if settings(row) == settings(good)]
    return [row for row in same if row.parameters != good.parameters and not row.costs_nothing]


def loss_in_words(compression: str, sync_every: int) -> str:
    """The measured loss of a compression, or of local updates with rounds of so many steps, for users."""
    if sync_every > 1:
        rows = [row for row in local_updates_without_loss("DiLoCo") if row.sync_every == sync_every]
        known = f"mt.DiLoCo(sync_every={sync_every}, outer={in_python(rows[0].outer)}): {rows[0]}" if rows else ""
        return known or f"rounds of {sync_every} steps: none of them is known to lose nothing"
    if loss_with(compression) == "not measured":
        return f"{compression}: the loss was not measured"
    row = without_loss(compression) or max(_rows_of(compression), key=lambda row: (row.is_certain, row.steps))
    return f"{row.way}: {row}"


def _longest(rows: Sequence[MeasuredLoss], length: int | None) -> MeasuredLoss | None:
    """The longest row that lost nothing. One of at least its length that lost something contradicts it."""
    lossy = max((row.length for row in rows if row.is_certain and not row.costs_nothing), default=0)
    good = [row for row in rows if row.costs_nothing and row.length > lossy]
    good = [row for row in good if length is None or row.length <= length]
    return max(good, key=lambda row: (row.length, row.parameters), default=None)


def in_python(outer: tuple[float, ...]) -> str:
    """The outer optimizer with this rate and Nesterov momentum, as a script makes it."""
    rate, momentum = outer
    return f"mt.optim.SGD({rate}, momentum={momentum}, nesterov=True)"


def shown_millions(parameters: int) -> str:
    """A number of parameters for users: `0.11 M`, `25 M`, `512`."""
    if parameters < 1e4:
        return str(parameters)
    return f"{parameters / 1e6:.3g} M" if parameters >= 1e6 else f"{parameters / 1e6:.2g} M"


def _rows_of(compression: str) -> Iterator[MeasuredLoss]:
    """The rows of a compression: of the same setting, or, if there are none, of all settings."""
    kind = compression.partition(":")[0]
    rows = [row for row in TABLE if not row.sync_every and row.way.partition(":")[0] == kind]
    same = [row for row in rows if row.way == compression]
    yield from same or rows
