"""The bed of the fault matrix: four nodes that the playbooks have set up, healthy before and after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mpitrain.testbed import find, up
from mpitrain.testbed.bed import Bed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if "bed" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="a bed of nodes needs root"))


@pytest.fixture(scope="session")
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    """TEST_BED names a developer's own one, which stays."""
    given = os.environ.get("TEST_BED")
    if given:
        yield find(given)
        return
    with up(name=f"faults{os.getpid()}", snapshot=request.getfixturevalue("provisioned")) as bed:
        yield bed
