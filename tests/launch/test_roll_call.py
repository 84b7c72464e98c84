"""The file in which ranks sign, without any ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import run_job
from mpitrain.launch.roll_call import BEGUN, DONE, Signatures, sign


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An empty roll call."""
    path = tmp_path / "roll_call"
    path.touch()
    return path


def missing(path: Path) -> list[int]:
    signatures = Signatures()
    for line in path.read_text().splitlines():
        signatures.add(line, 0.0)
    return signatures.missing()


def test_who_is_missing(path: Path) -> None:
    for rank in (10, 9, 2):
        sign(str(path), BEGUN, rank)
    sign(str(path), DONE, 9)
    assert missing(path) == [2, 10]


def test_a_file_that_has_gone_is_not_made_anew(path: Path) -> None:
    path.unlink()
    sign(str(path), BEGUN, 0)
    assert not path.exists()


FORK = """
import os, sys
from mpitrain.launch.roll_call import BEGUN, DONE, sign
sign(sys.argv[1], BEGUN, 0)
child = os.fork()
if child == 0:
    sign(sys.argv[1], DONE, 0)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
if sys.argv[2] == "done":
    sign(sys.argv[1], DONE, 0)
"""


def test_a_forked_child_does_not_sign_for_its_rank(path: Path) -> None:
    for last, expected in (("", [0]), ("done", [])):
        job = run_job(None, FORK, str(path), last)
        assert job.code == 0, job.output
        assert missing(path) == expected
