"""The supervisor carries out what the policy says. The attempts only say how they ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from history import ABC, names, widen

from jobs import until
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.launch import events, policy
from mpitrain.launch.ending import Ended
from mpitrain.launch.events import Limits, Pause
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import LEAVES, PREPARES, SAVES, STAYS
from mpitrain.launch.placement import Placement
from mpitrain.launch.supervisor import Supervisor
from mpitrain.watching.rank_record import RankRecord

DONE = Ended(0)


def killed(rank: int, step: int) -> Ended:
    records = {number: RankRecord(number, pid=1000 + number, first_step=1, facts={"step": step}) for number in range(5)}
    said = f"process rank {rank} with PID 1 on node b exited on\nsignal 9 (K)"
    return Ended(137, mpiexec_said=said, records=records)


def left(step: int) -> Ended:
    return Ended(0, records={0: RankRecord(0, facts={"step": step}, left_step=step)}, left=(step, 1.0))


class Beside:
    """A stand-in for a Successor. The test sets its attributes."""

    def __init__(self, job: Job, where: str, cause: str) -> None:
        self.job, self.where, self.cause = job, where, cause
        self.problem, self.has_room, self.is_ready, self.is_closed = "", True, False, False
        self.faulty: tuple[str, ...] = ()

    def look(self) -> None:
        pass

    def to_end(self, meanwhile: Callable[[], None]) -> Ended:
        meanwhile()
        return self.job.end(self.job.next_attempts.pop(0))

    def close(self) -> None:
        self.is_closed = True


Attempt = Ended | LaunchError | Callable[["Job"], Ended]


class Job:
    """A job whose attempts end as the test says, or do what it says."""

    def __init__(self, keepers: Keepers, limits: Limits, *attempts: Attempt, **how: Any) -> None:
        self.keepers, self.attempts = keepers, list(attempts)
        self.ran: list[tuple[str, str]] = []  # where each ran, and why it followed
        self.compared: list[Placement] = []
        self.beside: list[Beside] = []
        self.next_attempts: list[Attempt] = []  # of those that take over
        state = policy.begin(limits, ABC)
        check, prepare = self._check, self._prepare
        self.supervisor = Supervisor(state, self._run, keepers, widen=self._widen, check=check, prepare=prepare, **how)

    def _run(self, where: Placement, pause: Pause | None) -> Ended:
        self.ran.append((names(where), pause.cause if pause else ""))
        return self.end(self.attempts.pop(0))

    def end(self, attempt: Attempt) -> Ended:
        if isinstance(attempt, LaunchError):
            raise attempt
        return attempt if isinstance(attempt, Ended) else attempt(self)

    def _widen(self, placement: Placement, text: str) -> Placement:
        if text == "nowhere":
            raise ConfigError("there is no host 'nowhere'")
        return widen(placement, text)

    def _check(self, placement: Placement) -> None:
        self.compared.append(placement)
        if "other" in placement.hosts:
            raise LaunchError("other: train.py differs")
        if "odd" in placement.hosts:
            raise RuntimeError("can't start new thread")
        if "slow" in placement.hosts:
            time.sleep(1)

    def _prepare(self, where: Placement, cause: str) -> Any:
        if "alone" in where.hosts:
            return None
        self.beside.append(Beside(self, names(where), cause))
        return self.beside[-1]

    def to_end(self) -> int:
        with self.supervisor:
            return self.supervisor.to_end()

    def looks(self, test: Callable[[], object]) -> None:
        """The attempt runs until this holds."""
        until(lambda: self.supervisor.look() or test())

    def train(self) -> None:
        self.keepers.run = 1
        self.looks(lambda: self.supervisor.state.run == 1)

    def answer(self, **request: Any) -> dict[str, str]:
        """Somebody asks for a change. The attempt goes on meanwhile."""
        answers: list[dict[str, str]] = []
        asking = threading.Thread(target=lambda: answers.append(self.supervisor.answer(request)))
        asking.start()
        self.looks(lambda: not asking.is_alive())
        self.supervisor.look()
        return answers[0]


def test_attempts_and_why_they_follow(keepers: Keepers, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(keepers, Limits(5), killed(2, 7), DONE)
    assert job.to_end() == 0
    assert job.ran == [("abc", ""), ("abc", "rank 2 on b was killed by signal 9")]
    assert capsys.readouterr().err.splitlines() == [
        "mpitrain: attempt 1 of 6 failed at step 7: rank 2 on b was killed by signal 9; starting again on a, b, c",
        "mpitrain: attempt 2 of 6 succeeded",
    ]
    assert Job(keepers, Limits(5), Ended(130, is_interrupted=True)).to_end() == 130
    assert Job(keepers, Limits(), DONE, code=lambda code: 138).to_end() == 138
    error = LaunchError("the code differs")
    with pytest.raises(LaunchError) as raised:
        Job(keepers, Limits(5), killed(2, 7), error).to_end()
    assert raised.value is error


def test_what_an_end_tells_the_policy() -> None:
    job = Job(None, Limits(None), Ended(1, lost=("b",), records={0: RankRecord(0, first_step=5, facts={"step": 9})}))  # type: ignore[arg-type]
    taken: list[events.Event] = []
    take = job.supervisor.take
    job.supervisor.take = lambda event: taken.append(event) or take(event)  # type: ignore[method-assign]
    assert job.to_end() == 1
    (failed,) = [event for event in taken if isinstance(event, events.Failed)]
    failure = failed.failure
    assert (failure.cause, failure.first, failure.step, failure.lost) == ("b fell silent", 5, 9, ("b",))
    assert failure.when == failure.failed_at == failed.at
    assert not failed.has_checkpoint


def test_the_next_attempt_takes_over(keepers: Keepers) -> None:
    """It is prepared in the main thread, and not started again. After it has failed, another one starts."""

    def leave(job: Job) -> Ended:
        job.train()
        assert list(job.answer(leave=["b"])) == ["accepted"]
        (beside,) = job.beside
        assert (beside.where, beside.cause, keepers.wish) == ("ac", "b leaves", PREPARES)
        beside.is_ready = True
        job.looks(lambda: keepers.wish == LEAVES)
        return left(7)

    def join(job: Job) -> Ended:
        """In its turn, it has the next one beside it."""
        job.train()
        assert list(job.answer(join="d")) == ["accepted"]
        job.beside[1].is_ready = True
        job.looks(lambda: keepers.wish == LEAVES)
        return left(9)

    job = Job(keepers, Limits(1), leave, DONE)
    job.next_attempts = [join, killed(0, 12)]
    assert job.to_end() == 0
    assert job.ran == [("abc", ""), ("acd", "rank 0 on a was killed by signal 9")]
    assert keepers.wish == STAYS
    assert [(beside.where, beside.is_closed) for beside in job.beside] == [("ac", False), ("acd", False)]
    assert not job.next_attempts


@pytest.mark.parametrize("problem", ["rank 6 failed", ""])
def test_a_next_attempt_that_is_not_needed(keepers: Keepers, problem: str) -> None:
    """It fails; or the present one does."""

    def join(job: Job) -> Ended:
        job.train()
        assert list(job.answer(join="d")) == ["accepted"]
        job.beside[0].problem = problem
        if problem:
            job.looks(lambda: keepers.wish == STAYS)
            assert job.supervisor.state.change is None
        return killed(0, 7)

    job = Job(keepers, Limits(1), join, DONE)
    assert job.to_end() == 0
    assert job.beside[0].is_closed
    assert job.ran[1][0] == ("abc" if problem else "abcd")


def test_no_next_attempt_beside_this_one(keepers: Keepers) -> None:
    def join(job: Job) -> Ended:
        job.train()
        job.answer(join="alone")
        assert keepers.wish == LEAVES
        return left(7)

    job = Job(keepers, Limits(1), join, DONE)
    assert job.to_end() == 0
    assert job.ran[1] == ("abcalone", "alone joins")


def test_requests(keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are answered while the attempt runs, and also while a host is asked that would join."""
    monkeypatch.setattr("mpitrain.launch.supervisor._BEGIN_SECONDS", 0.1)

    def ask(job: Job) -> Ended:
        assert "none does so now" in job.answer(leave=["b"])["refused"]
        job.train()
        assert job.answer(join="nowhere") == {"refused": "there is no host 'nowhere'"}
        assert job.answer(join="other") == {"refused": "other: train.py differs"}
        asking = threading.Thread(target=job.supervisor.answer, args=({"join": "slow"},))
        asking.start()
        until(lambda: job.compared[-1].hosts == ("slow",))
        keepers.told = {2: time.monotonic() - 2.0}
        job.looks(lambda: keepers.wish == PREPARES)
        assert asking.is_alive()
        asking.join()
        assert job.beside[-1].where == "ac"
        return killed(0, 7)

    job = Job(keepers, Limits(1), ask, DONE)
    job.to_end()
    # Only the new host and this machine are asked.
    assert (job.compared[0].hosts, list(job.compared[0].addresses)) == (("other",), ["a", "other"])


def test_a_request_waits_for_what_is_about_to_begin(keepers: Keepers) -> None:
    def begin(job: Job) -> Ended:
        answers: list[dict[str, str]] = []
        asking = threading.Thread(target=lambda: answers.append(job.supervisor.answer({"leave": ["b"]})))
        asking.start()
        time.sleep(0.3)
        assert not answers
        job.train()
        asking.join()
        assert list(answers[0]) == ["accepted"]
        return DONE

    assert Job(keepers, Limits(1), begin).to_end() == 0


def test_ranks_that_sigterm_has_told(keepers: Keepers) -> None:
    def save(job: Job) -> Ended:
        job.train()
        keepers.told = dict.fromkeys((0, 2, 3), time.monotonic() - 2.0)
        job.looks(lambda: keepers.wish == SAVES)
        return left(7)

    def refuse(job: Job) -> Ended:
        keepers.told = {0: time.monotonic() - 2.0}
        job.looks(lambda: keepers.refuses)
        return killed(0, 7)

    assert Job(keepers, Limits(1), save).to_end() == 143
    keepers.run = 0
    assert Job(keepers, Limits(1), refuse, DONE).to_end() == 0


def test_a_host_joins_a_job_that_waits(keepers: Keepers, capsys: pytest.CaptureFixture[str]) -> None:
    """Two hosts are lost. One joins, which is not enough. With the next one, the job starts again at once."""
    answers: list[dict[str, str]] = []

    def join() -> None:
        until(lambda: job.supervisor.waits_for)
        waits.append(job.supervisor.waits_for)
        answers.extend(job.supervisor.answer({"join": host}) for host in ("nowhere", "other", "d", "e"))

    waits: list[str] = []
    lost = Ended(1, lost=("b", "c"), records=killed(0, 7).records)
    job = Job(keepers, Limits(1, 3), lost, DONE)
    joining = threading.Thread(target=join)
    joining.start()
    assert job.to_end() == 0
    joining.join()
    assert waits[0].startswith("b, c until ")
    assert job.supervisor.waits_for == keepers.estate.get("waits", "") == ""
    assert answers == [
        {"refused": "there is no host 'nowhere'"},
        {"refused": "other: train.py differs"},
        {"accepted": "d joins; it still waits for b, c"},
        {"accepted": "e joins; it starts again"},
    ]
    assert [where for where, _ in job.ran] == ["abc", "ade"]
    assert "mpitrain: e joins; starting again on a, d, e with 6 ranks, without b, c" in capsys.readouterr().err


def test_a_state_that_nobody_has(
    keepers: Keepers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpitrain.launch.lost_wait.WAIT_SECONDS", 0.1)
    job = Job(keepers, Limits(1, 3), Ended(1, lost=("c",), records=killed(0, 7).records), killed(0, 0))
    assert job.to_end() == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last == (
        "mpitrain: no host has the state in memory; the same command continues from the newest checkpoint, if any"
    )


def test_an_error_while_it_looks(keepers: Keepers, capsys: pytest.CaptureFixture[str]) -> None:
    """The job can train without it."""

    def look(job: Job) -> Ended:
        job.train()
        job.answer(leave=["b"])
        job.beside[0].look = lambda: 1 / 0  # type: ignore[method-assign]
        job.supervisor.look()
        job.supervisor.look()
        return DONE

    assert Job(keepers, Limits(1), look).to_end() == 0
    assert capsys.readouterr().err.count("the hosts of the job may not change as they should: ZeroDivisionError") == 1
