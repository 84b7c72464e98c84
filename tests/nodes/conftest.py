"""Fixtures of the test beds' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpitrain.errors import LaunchError
from testbed import Bed, build, up
from testbed.host import require_kernel

from .beds import new_name, traces


@pytest.fixture(scope="session")
def image() -> str:
    """The image of the nodes. Its first build on a machine takes about a minute."""
    try:
        require_kernel(full=False, delay=True)
    except LaunchError as error:
        pytest.skip(str(error))
    return build(say=print)


@pytest.fixture(scope="package")
def bed(image: str) -> Iterator[Bed]:
    """A fast bed of two nodes, for tests that undo their faults."""
    with up(2, name=new_name()) as bed:
        yield bed
    assert traces(bed.name) == []


@pytest.fixture
def healthy(bed: Bed) -> Iterator[Bed]:
    """The same bed, healed after the test."""
    yield bed
    for node in bed.names:
        bed.heal(node)
        assert bed.faults(node) == {}
