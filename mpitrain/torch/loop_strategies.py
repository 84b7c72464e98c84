"""Which strategies can train in a loop of the user's own, which steps the optimizer itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.errors import ConfigError, everywhere
from mpitrain.reducer.exchange import make_exchange
from mpitrain.strategies.local_updates import LocalUpdates
from mpitrain.strategies.strategy import Strategy, check_planned
from mpitrain.strategies.sync import AutoSync, Sync
from mpitrain.strategies.virtual_ranks import VirtualRanks, check_virtual_ranks
from mpitrain.world.world import World


def check_strategy(world: World, strategy: object, options: Sequence[str], *, has_weight: bool) -> None:
    """Check the argument `strategy` of prepare(). `options` are the names of the given options that are for Sync only.

    Collective.

    Raises:
        MismatchError: the ranks gave other strategies or options. Raised on every rank.
        ConfigError: prepare() does not take the strategy, or not together with these options. Raised on every rank.
    """
    if isinstance(strategy, LocalUpdates):
        kind = str(strategy.schedule)
    elif isinstance(strategy, str | type):
        kind = repr(strategy)
    else:
        kind = "Sync" if strategy is None else type(strategy).__name__
    virtual = virtual_ranks_of(strategy)
    coded = [name for name in options if name in ("compression", "network", "algorithm")]
    given = [*options, *["weight"] * has_weight]
    world.agree("prepare a model", [f"strategy={kind}", f"options {', '.join(given) or 'none'}"])
    problem = ""
    if strategy is not None and not isinstance(strategy, Sync | LocalUpdates):
        problem = (
            f"strategy={kind}: prepare() takes mt.Sync() and local updates, such as mt.LocalSGD() and "
            "mt.DiLoCo(). All other strategies make the steps of the optimizer themselves, as your loop does: use them "
            "with mt.Trainer and mt.TorchModule"
        )
    elif isinstance(strategy, AutoSync):
        problem = (
            "mt.AutoSync(): prepare() makes one exchange, and cannot change it while the loop trains. Use mt.Trainer "
            "with mt.TorchModule, or name the codec in the argument compression, or the rate of the links in network"
        )
    elif "network" in options and len(coded) > 1:
        problem = (
            f"{' and '.join(coded)} together: network chooses the compression, which has its own algorithm. Give "
            "network alone, or leave it out"
        )
    elif virtual and coded:
        problem = (
            f"{', '.join(coded)} together with virtual_ranks={virtual.number}: gradients of virtual ranks are added up "
            "exactly. Leave out one of the two"
        )
    elif virtual and has_weight:
        problem = (
            f"weight= together with virtual_ranks={virtual.number}: virtual ranks are weighted by samples. Leave out "
            "one of the two"
        )
    elif isinstance(strategy, LocalUpdates) and options:
        problem = (
            f"{', '.join(options)} together with {kind}: these are for gradients of every step, and with local updates "
            "none is sent. Leave them out. For the outer step, set MPITRAIN_COMPRESSION and MPITRAIN_ALGORITHM, or "
            "give exchange= to the strategy"
        )
    elif isinstance(strategy, LocalUpdates | Sync) and strategy.warm_up:
        problem = f"{kind}: prepare() has no warm-up. Leave warm_up out, or train with mt.Trainer and mt.TorchModule"
    elif isinstance(strategy, Sync) and strategy.exchange is not make_exchange and options:
        problem = f"{', '.join(options)} together with an exchange of Sync: give one of the two"
    if problem:
        raise everywhere(ConfigError(problem))
    if isinstance(strategy, Strategy):
        check_planned(world, strategy)
    if virtual and isinstance(strategy, Sync):
        check_virtual_ranks(world, virtual, has_own_exchange=strategy.exchange is not make_exchange)


def virtual_ranks_of(strategy: object) -> VirtualRanks | None:
    """Return the virtual ranks that a strategy asks for; None: there are none."""
    return strategy.virtual if isinstance(strategy, Sync) else None


def check_optimizer(world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer can train with local updates. Not collective.

    Raises:
        ConfigError: a trained parameter is not in the optimizer.
    """
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in given:
            raise ConfigError(
                f"{world.name()}: {name} is trained (requires_grad) but not in the optimizer. With local updates, one "
                "optimizer has all trained parameters, because an outer step follows its step: give the parameter to "
                "it, or freeze the parameter with requires_grad_(False)"
            )
