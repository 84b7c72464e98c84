"""What is exchanged, and when parameters change."""

from mpitrain.strategies.strategy import Strategy
from mpitrain.strategies.sync import Sync

STRATEGIES = {"sync": Sync}

__all__ = ["STRATEGIES", "Strategy", "Sync"]
