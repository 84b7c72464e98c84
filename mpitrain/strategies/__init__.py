"""Strategies decide what ranks exchange, and when parameters change.

To add one: a file with a class that has the methods of Strategy, and a line below. It then inherits the contract tests
(tests/ranks/test_strategies.py), `make_strategy` and `--strategy` of examples/train.py.
"""

from __future__ import annotations

from collections.abc import Callable

from mpitrain.errors import ConfigError
from mpitrain.strategies.auto_sync import AutoSync
from mpitrain.strategies.diloco import DiLoCo
from mpitrain.strategies.local_sgd import LocalSGD
from mpitrain.strategies.parameter_server import ParameterServer
from mpitrain.strategies.pipeline import Pipeline
from mpitrain.strategies.sharded_sync import ShardedSync
from mpitrain.strategies.sparse_loco import SparseLoCo
from mpitrain.strategies.strategy import ServedStrategy, Strategy
from mpitrain.strategies.streaming_diloco import StreamingDiLoCo
from mpitrain.strategies.sync import Sync

__all__ = [
    "STRATEGIES",
    "AutoSync",
    "DiLoCo",
    "LocalSGD",
    "ParameterServer",
    "Pipeline",
    "ServedStrategy",
    "ShardedSync",
    "SparseLoCo",
    "Strategy",
    "StreamingDiLoCo",
    "Sync",
    "make_strategy",
]

# Each makes a new strategy with its defaults.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "sync": Sync,
    "auto": AutoSync,
    "sharded_sync": ShardedSync,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
    "streaming_diloco": StreamingDiLoCo,
    "sparse_loco": SparseLoCo,
    "parameter_server": ParameterServer,
    "pipeline": Pipeline,
}


def make_strategy(name: str) -> Strategy:
    """Return a new strategy of this name, with its defaults. Not collective. Give the same name on every rank.

    Raises:
        ConfigError: there is no strategy of this name.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"there is no strategy {name!r}; known: {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[name]()
