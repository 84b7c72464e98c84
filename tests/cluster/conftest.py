"""Beds are made of namespaces and containers, which takes root."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if HERE in item.path.parents and "bed" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="a bed of nodes needs root"))
