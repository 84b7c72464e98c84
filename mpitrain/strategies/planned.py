"""Which strategies `mpitrain plan` can measure: on one rank, each step must be a whole step of the training."""

from __future__ import annotations

from mpitrain.errors import ConfigError
from mpitrain.strategies.sync import Sync
from mpitrain.world import World


def check_planned(world: World, strategy: object) -> None:
    """Check the strategy of a script that is planned. Without `mpitrain plan`, any will do.

    Raises:
        ConfigError: it is not mt.Sync, or has virtual ranks.
    """
    if world.watch is None or (isinstance(strategy, Sync) and not strategy.virtual):
        return
    kind = (
        f"mt.Sync(virtual_ranks={strategy.virtual.number})" if isinstance(strategy, Sync) and strategy.virtual else ""
    )
    raise ConfigError(
        f"{world.name()}: mpitrain plan found the strategy {kind or type(strategy).__name__}; allowed is mt.Sync "
        "without virtual ranks, because a plan is made of its steps. Plan the script with mt.Sync(). The plan also has "
        "rows for mt.LocalSGD and mt.ParameterServer"
    )
