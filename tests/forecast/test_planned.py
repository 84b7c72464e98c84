"""Strategies that `mpitrain plan` measures, and those that it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import mpitrain as mt
from mpitrain.errors import ConfigError
from mpitrain.strategies.strategy import check_planned


def test_only_sync_without_virtual_ranks() -> None:
    planned: Any = SimpleNamespace(watch=object(), name=lambda: "rank 0 on here")
    other: Any = SimpleNamespace(watch=None)
    check_planned(planned, mt.Sync())
    for strategy, kind in [
        (mt.Sync(virtual_ranks=4), r"mt\.Sync\(virtual_ranks=4\)"),
        (mt.LocalSGD(10), "LocalSGD"),
        (mt.ShardedSync(), "ShardedSync"),
    ]:
        check_planned(other, strategy)
        with pytest.raises(ConfigError, match=f"rank 0 on here: mpitrain plan found the strategy {kind}; allowed is "):
            check_planned(planned, strategy)
