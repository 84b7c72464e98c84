"""Fixtures that several tests of the launcher use."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from mpitrain.launch.agents import Agents
from mpitrain.launch.keepers import Keepers


@pytest.fixture
def keepers() -> Iterator[Keepers]:
    """Keepers of a job that runs only on host `a`."""
    with Agents("a") as agents, Keepers(agents, f"mpitrain-test-{secrets.token_hex(8)}") as keepers:
        yield keepers
