"""The kernels on a GPU, against NumPy."""

from __future__ import annotations

from typing import Any

import pytest

CUPY = pytest.importorskip("cupy", reason="CuPy is not installed")
if not CUPY.is_available():
    pytest.skip("CuPy finds no GPU that it can use", allow_module_level=True)

from tests.kernel_cases import *  # noqa: E402, F403 - the tests themselves


@pytest.fixture(scope="module")
def cupy() -> Any:
    return CUPY
