"""One outcome for all ranks, as in tests/ranks. Without a GPU every test is skipped."""

from __future__ import annotations

import pytest

from tests.ranks.conftest import pytest_runtest_makereport, shared, world

from .transports import transport

__all__ = ["pytest_runtest_makereport", "shared", "transport", "world"]


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Skip every test if there is no GPU."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not cupy.is_available():
        pytest.skip("CuPy finds no GPU that it can use")
