"""One outcome for all ranks, as in tests/ranks. Without a GPU every test is skipped."""

from __future__ import annotations

import pytest

from mpitrain import World
from mpitrain.cuda.device import bind
from tests.ranks.conftest import pytest_runtest_makereport, shared, world

from .transports import transport

__all__ = ["pytest_runtest_makereport", "shared", "transport", "world"]


@pytest.fixture(scope="session", autouse=True)
def gpu(world: World) -> None:
    """Skip every test if there is no GPU. Otherwise let each rank compute on its own GPU, whichever test is first."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not cupy.is_available():
        pytest.skip("CuPy finds no GPU that it can use")
    bind(world)
