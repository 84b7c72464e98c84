"""The exchange configurations that a plan compares, and how a user selects each of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.compression import CODECS, factory_of
from mpitrain.measured_loss import (
    OF_THE_PAPER,
    CodecLoss,
    MeasuredLoss,
    in_python,
    local_updates_without_loss,
    loss_with,
    rounds_without_loss,
    without_loss,
)

# The remark in a table about the loss with a codec; see loss_with.
_WARNINGS: dict[CodecLoss, str] = {
    "none": "",
    "rare": "compare the loss",
    "costs": "costs loss",
    "not measured": "loss not measured",
}
# Without halving_doubling: on 2 to 8 measured hosts it was never the fastest, and as it polls, its processor time says
# little about its work.
_ALGORITHMS = ("ring", "direct")
_ON_ONE_NODE, _WITH_SEVERAL_RANKS_ON_A_NODE = "shared_memory", "hierarchical"
_BUCKETS_MIB = (1, 16)


@dataclass(frozen=True)
class ExchangeWay:
    """One exchange configuration.

    Attributes:
        algorithm: of the sums; "auto" with a codec, which decides by itself.
        codec: between nodes; "none": no codec.
        bucket_mib: of gradients; None: that of a job without the setting.
        sync_every: steps of a round of local updates; 1: each step is exchanged.
        outer: rate and Nesterov momentum of the outer optimizer of mt.DiLoCo; (): the local updates are mt.LocalSGD.
        servers: of mt.ParameterServer("sync"); 0: all ranks are equal.
    """

    algorithm: str = "ring"
    codec: str = "none"
    bucket_mib: float | None = None
    sync_every: int = 1
    outer: tuple[float, ...] = ()
    servers: int = 0

    @property
    def is_safe(self) -> bool:
        """Whether the loss is that of a training of one rank, as far as was measured."""
        return loss_with(self.codec) == "none" and self.sync_every == 1

    @property
    def is_exact(self) -> bool:
        """Whether every step exchanges all gradients in full."""
        return self.codec == "none" and self.sync_every == 1 and not self.servers

    def loss(self, steps: int | None) -> MeasuredLoss | None:
        """What shows that a training of so many steps loses nothing; None: nothing does. See without_loss."""
        if self.sync_every > 1:
            return rounds_without_loss("DiLoCo", self.sync_every, self.outer, steps)
        return without_loss(self.codec, steps)

    @property
    def warning(self) -> str:
        """The warning in a table about the loss; "": none."""
        if self.sync_every == 1:
            return _WARNINGS[loss_with(self.codec)]
        row = self.loss(None)
        return f"no loss with {row.rounds} rounds" if row else _WARNINGS["costs"]

    @property
    def strategy(self) -> str:
        """The strategy in Python that the script needs for it; "": mt.Sync()."""
        if self.servers:
            return 'mt.ParameterServer("sync")'
        if self.sync_every == 1:
            return ""
        if not self.outer:
            return f"mt.LocalSGD({self.sync_every})"
        if self.outer == OF_THE_PAPER:  # the default
            return f"mt.DiLoCo(sync_every={self.sync_every})"
        return f"mt.DiLoCo(sync_every={self.sync_every}, outer={in_python(self.outer)})"

    @property
    def is_setting(self) -> bool:
        """Whether a variable chooses it. Otherwise the script does."""
        return self.sync_every == 1 and not self.servers

    def __str__(self) -> str:
        if self.servers:
            return f"{self.servers} server{'s' * (self.servers > 1)}"
        if self.sync_every > 1:
            return f"{'DiLoCo' if self.outer else 'LocalSGD'}({self.sync_every})"
        name = self.algorithm if self.codec == "none" else self.codec
        return name if self.bucket_mib is None else f"{name}, {self.bucket_mib:g} MiB"

    def bytes_sent(self, num_bytes: int, num_nodes: int) -> float:
        """The bytes that a node sends in a step; with servers, a worker."""
        if num_nodes == 1:
            return 0.0
        if self.servers:
            return float(num_bytes)
        if self.codec == "none":
            return 2 * (num_nodes - 1) / num_nodes * num_bytes / self.sync_every
        coder = factory_of(self.codec)(False)
        times = num_nodes - 1 if coder.gathered else 2 * (num_nodes - 1) / num_nodes
        return times * coder.wire_bytes(num_bytes // 4)

    def command(self, num_ranks: int, launch: Sequence[str], profile: str, script: Sequence[str]) -> str:
        """The command that runs the script with this configuration.

        Args:
            num_ranks: how many ranks run; one needs no settings.
            launch: options of `mpitrain run`.
            profile: the file with the costs of the cluster; "": there is none.
            script: with its arguments.
        """
        settings = {"MPITRAIN_PROFILE": profile} if profile and num_ranks > 1 else {}
        if num_ranks > 1:
            settings |= self.settings()
        words = ["mpitrain", "run", *launch, *([f"--servers={self.servers}"] if self.servers else []), *script]
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), shlex.join(words)])

    def settings(self) -> dict[str, str]:
        """The variables that choose it; {}: the script does."""
        if not self.is_setting:
            return {}
        coded = self.codec != "none"
        settings = {"MPITRAIN_COMPRESSION": self.codec} if coded else {"MPITRAIN_ALGORITHM": self.algorithm}
        if self.bucket_mib is not None:
            settings["MPITRAIN_BUCKET_MIB"] = f"{self.bucket_mib:g}"
        return settings

    def advice(self) -> str:
        """The change that the script needs for it; "": none."""
        return f"strategy {self.strategy} in the script" if self.strategy else ""


def way_of_settings(algorithm: str, bucket_mib: float, codec: str) -> ExchangeWay:
    """The configuration of a job with these settings; 0 MiB: none is set."""
    return ExchangeWay("auto" if codec != "none" else algorithm, codec, bucket_mib or None)


def plain_ways(num_ranks: int, ranks_per_node: int) -> list[ExchangeWay]:
    """Every step exchanged in full, by each algorithm."""
    if num_ranks <= ranks_per_node:
        return [ExchangeWay(_ON_ONE_NODE)]
    return [ExchangeWay(name) for name in (_ALGORITHMS if ranks_per_node == 1 else (_WITH_SEVERAL_RANKS_ON_A_NODE,))]


def coded_ways(measured: Sequence[str]) -> list[ExchangeWay]:
    """Every step with a codec. `measured`: the codecs whose time is known; other ones are left out."""
    return [ExchangeWay("auto", codec) for codec in CODECS if codec in measured]


def resized_ways(way: ExchangeWay) -> list[ExchangeWay]:
    """The same configuration with other bucket sizes."""
    return [ExchangeWay(way.algorithm, way.codec, bucket_mib) for bucket_mib in _BUCKETS_MIB]


def other_ways(plain: ExchangeWay, num_ranks: int, ranks_per_node: int) -> list[ExchangeWay]:
    """Local updates by the algorithm of a plain way, and servers where at least two workers are left.

    They train differently, so only the user can choose them. The local updates are those that have lost nothing.
    """
    rounds = [
        ExchangeWay(plain.algorithm, sync_every=row.sync_every, outer=row.outer)
        for row in local_updates_without_loss("DiLoCo")
    ]
    return [*rounds, *([ExchangeWay(servers=1)] if num_ranks > 2 and ranks_per_node == 1 else [])]
