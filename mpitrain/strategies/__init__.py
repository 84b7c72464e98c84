"""Strategies decide what ranks exchange, and when parameters change.

To add one: a file with a subclass of Strategy, and a line below. It then inherits the contract tests
(tests/ranks/test_strategies.py), `make_strategy` and `--strategy` of examples/train.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.strategies.strategy import ServedStrategy, Strategy

__all__ = ["STRATEGIES", "ServedStrategy", "Strategy", "make_strategy"]

# The class of each strategy, with its file. A file is loaded when its strategy is made: only one needs the server code.
STRATEGIES: dict[str, str] = {
    "sync": "sync.Sync",
    "auto": "sync.AutoSync",
    "sharded_sync": "sharded_sync.ShardedSync",
    "local_sgd": "local_updates.LocalSGD",
    "diloco": "local_updates.DiLoCo",
    "streaming_diloco": "local_updates.StreamingDiLoCo",
    "sparse_loco": "local_updates.SparseLoCo",
    "parameter_server": "parameter_server.ParameterServer",
    "pipeline": "pipeline.Pipeline",
}


def make_strategy(name: str, **arguments: Any) -> Strategy:
    """Return a new strategy of this name. Not collective. Give the same values on every rank.

    `arguments` are those of its class; all others have their defaults.

    Raises:
        ConfigError: there is no strategy of this name, or an argument is not allowed.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"there is no strategy {name!r}; known: {', '.join(sorted(STRATEGIES))}")
    file, _, strategy = STRATEGIES[name].partition(".")
    made: Strategy = getattr(import_module(f"mpitrain.strategies.{file}"), strategy)(**arguments)
    return made
