"""The tests on all ranks notice when the ranks do not run the same tests."""

from __future__ import annotations

from faults.outcome import failed
from jobs import VENVS, mpiexec, run_command

PYTHON = str(VENVS["mpich"] / "bin/python")


def test_ranks_that_run_different_tests() -> None:
    # Neither test makes a collective call itself.
    one, two = ([PYTHON, "-m", "tests.ranks", "-k", name] for name in ("test_wrong_options", "test_the_first_place"))
    job = run_command([*mpiexec(1), *one, ":", "-n", "1", *two])
    failed(job)
    assert "the ranks do not come to the end of the same test: " in job.stdout, job.output
