"""The file in which ranks sign, without any ranks."""

from __future__ import annotations

from jobs import run_job
from mpitrain.launch.roll_call import BEGUN, DONE, RollCall, sign


def test_who_is_missing() -> None:
    with RollCall() as roll_call:
        for rank in (10, 9, 2):
            sign(str(roll_call.path), BEGUN, rank)
        sign(str(roll_call.path), DONE, 9)
        assert roll_call.missing() == [2, 10]
        assert not roll_call.is_gone


def test_a_file_that_has_gone() -> None:
    with RollCall() as roll_call:
        roll_call.path.unlink()
        sign(str(roll_call.path), BEGUN, 0)
        assert roll_call.missing() == []
        assert roll_call.is_gone


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


def test_a_forked_child_does_not_sign_for_its_rank() -> None:
    with RollCall() as roll_call:
        job = run_job(None, FORK, str(roll_call.path), "")
        assert job.code == 0, job.output
        assert roll_call.missing() == [0]
        job = run_job(None, FORK, str(roll_call.path), "done")
        assert job.code == 0, job.output
        assert roll_call.missing() == []
