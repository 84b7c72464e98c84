"""A profile that cannot be used: every rank ends, and says so once."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from faults.outcome import report_of
from jobs import VENVS, mpiexec, run_command, run_job

SOURCE = "import mpitrain as mt\nprint(f'went on with {mt.init().profile.origin}')"


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a profile that was measured here, with 2 ranks, by the remedy for a torn one."""
    path = tmp_path_factory.mktemp("profile") / "cluster.json"
    path.write_text("{")
    measure_again(path)
    return path.read_text()


def measure_again(path: Path) -> None:
    """Run the command that the refusal of a profile names, with the variable still set."""
    text = refused(path, "")
    command = shlex.split(text.partition("Measure again: ")[2])
    command[0] = str(VENVS["mpich"] / "bin/python")
    # The time of a measurement depends on the machine.
    job = run_command([command[0], "-m", "mpitrain", *command[1:]], timeout=300, env={"MPITRAIN_PROFILE": str(path)})
    assert job.code == 0, job.output


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster.json"


def refused(path: Path, message: str, ranks: int = 2) -> str:
    job = run_job(ranks, SOURCE, env={"MPITRAIN_PROFILE": str(path)})
    text = report_of(job, f"ConfigError: {message}").text
    assert job.stderr.count(f"the profile {path} ") == 1, job.output
    assert "went on" not in job.stdout, job.output
    assert "failed too" not in job.stderr, job.output
    return text


def remedy(path: Path) -> str:
    """The end of the message, for a job of 2 ranks on this machine."""
    return f". Measure again: mpitrain bench --hosts localhost -n 2 --save-profile {path}\n"


def test_the_remedy_for_a_missing_one(path: Path) -> None:
    measure_again(path)
    is_used(path)


def test_the_remedy_for_a_torn_one(path: Path, profile: str) -> None:
    """The tests below break this profile."""
    path.write_text(profile)
    is_used(path)


def is_used(path: Path) -> None:
    job = run_job(2, SOURCE, env={"MPITRAIN_PROFILE": str(path)})
    assert job.code == 0, job.output
    assert job.stdout.count(f"went on with {path}") == 2


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_torn(path: Path, profile: str, part: float) -> None:
    path.write_text(profile[: int(len(profile) * part)])
    assert refused(path, f"the profile {path} is damaged").endswith(remedy(path))


def test_of_another_cluster(path: Path, profile: str) -> None:
    content = json.loads(profile)
    content["fingerprint"]["hosts"] = ["elsewhere"]
    path.write_text(json.dumps(content))
    text = refused(path, f"the profile {path} is of another cluster: hosts ['elsewhere'], here ")
    assert text.endswith(remedy(path))


def test_of_another_number_of_ranks(path: Path, profile: str) -> None:
    path.write_text(profile)
    refused(path, f"the profile {path} is of another cluster: ranks_per_node [2], here [3]", ranks=3)


def test_missing(path: Path) -> None:
    text = refused(path, "rank 0 on ")
    assert "No such file" in text
    assert text.endswith(remedy(path))


def test_no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")
    text = refused(path, "rank 0 on ")
    assert "cannot be read: it is not text in UTF-8" in text
    assert text.endswith(remedy(path))


def test_on_one_rank_alone(path: Path, profile: str) -> None:
    """Like every setting, the profile must be the same on all ranks."""
    path.write_text(profile)
    python = [str(VENVS["mpich"] / "bin/python"), "-c", SOURCE]
    job = run_command([*mpiexec(1), "-env", "MPITRAIN_PROFILE", str(path), *python, ":", "-n", "1", *python])
    report_of(job, "MismatchError: ", f"profile='{path}'")
