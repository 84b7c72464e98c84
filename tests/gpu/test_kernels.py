"""The kernels on a GPU, against NumPy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernel_cases import *  # noqa: F403 - the tests themselves


@pytest.fixture(scope="module")
def cupy() -> Any:
    """CuPy on a GPU that it can use."""
    module = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not module.is_available():
        pytest.skip("CuPy finds no GPU that it can use")
    return module
