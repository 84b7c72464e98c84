"""One outcome for all ranks, as in tests/ranks. Without JAX every test is skipped."""

from __future__ import annotations

import os

import pytest

# Two devices, so that arrays may lie on the second one, or on both. JAX reads it at its first array.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

from tests.ranks.conftest import pytest_runtest_makereport, shared, world

__all__ = ["pytest_runtest_makereport", "shared", "world"]

jax = pytest.importorskip("jax", reason="JAX is not installed")
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
