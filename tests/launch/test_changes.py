"""Changes of a job's hosts: wishes, ranks that SIGTERM tells to end, and the attempt that is prepared meanwhile."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import changing
import pytest
from changing import HOSTS, ChangingJob

from jobs import until
from mpitrain.launch.control import ask
from mpitrain.launch.kept import LEAVES, PREPARES, SAVES, STAYS
from mpitrain.launch.placement import Place
from mpitrain.launch.roster import launcher_name

job = changing.job  # a fixture: pytest finds it by this name


def test_a_host_leaves(job: ChangingJob) -> None:
    follows = "b leaves after the next copy of its state; then it continues on a, c"
    assert job.answer(leave=["b"]) == {"accepted": follows}
    assert job.answer(leave=["c"]) == {"refused": "another change is under way: b leaves"}
    change = job.taken()
    assert (change.text, change.hosts, change.now_on) == ("b leaves", HOSTS.without({"b"}), HOSTS.without({"b"}))
    assert job.changes.take() is None
    assert job.answer(leave=["c"]) == {"refused": "the job is being started again; try again in a moment"}


def test_a_host_joins(job: ChangingJob) -> None:
    follows = "d joins after the next copy of its state; then it continues on a, b, c, d"
    assert job.answer(join="d") == {"accepted": follows}
    (only,) = job.asked  # the check asks only the new host and this machine
    assert (only.hosts, only.addresses) == (("d",), {"a": "10.0.0.1", "d": "10.0.0.9"})
    change = job.taken()
    assert (change.joined, change.now_on.places[-1]) == (("d",), Place("d", 5, 2))
    assert change.hosts == change.now_on
    job.train(HOSTS.without({"b", "c"}))  # a host that is set aside comes back
    job.accept(join="b")
    change = job.taken()
    assert change.now_on.hosts == ("a", "b")
    assert sorted(change.hosts.hosts) == ["a", "b", "c"]


def test_hosts_join_and_leave_at_once(job: ChangingJob) -> None:
    follows = "a, b leave and d joins after the next copy of its state; then it continues on c, d"
    assert job.answer(leave=["a", "b"], join="d") == {"accepted": follows}
    change = job.taken()
    assert (change.joined, change.now_on.hosts, change.hosts.hosts) == (("d",), ("c", "d"), ("c", "d"))
    assert job.answer(leave=["c"]) == {"refused": "the job is being started again; try again in a moment"}


def test_what_is_refused(job: ChangingJob) -> None:
    few = "the job needs 2; `mpitrain kill` ends a job"
    for wish, why in (
        ({"leave": ["d"]}, "d is not a host of the job; its hosts are a, b, c"),
        ({"leave": ["a", "b"]}, f"only 1 of its hosts would be left, and {few}"),
        ({"leave": ["a", "b", "c"]}, f"no host would be left, and {few}"),
        ({"leave": ["a", "b", "c"], "join": "d"}, f"no host would be left, and {few}"),
        ({"join": "nowhere"}, "there is no host 'nowhere'"),
        ({"join": "other"}, "other: train.py differs"),
    ):
        assert job.answer(**wish) == {"refused": why}
    assert job.changes.take() is None


def test_only_in_the_first_run(job: ChangingJob, capsys: pytest.CaptureFixture[str]) -> None:
    for run, why in ((0, "does so now. If its training"), (2, "it is in run 2 of its script, and the hosts")):
        job.keepers.run = run
        for wish in ({"leave": ["b"]}, {"join": "d"}):
            assert why in job.answer(**wish)["refused"]
        assert job.changes.take() is None
        job.changes.begin(HOSTS, HOSTS)  # an attempt that begins has no run yet
    assert "none does so now" in job.answer(leave=["b"])["refused"]
    job.keepers.run = 1
    job.accept(leave=["b"])
    assert job.keepers.wish == PREPARES
    job.keepers.run = 2  # before the change is made
    until(lambda: job.keepers.wish == STAYS)
    said = "mpitrain: the training ended before the hosts of the job could change: b leaves\n"
    until(lambda: capsys.readouterr().err == said)
    assert job.changes.take() is None


def test_a_try_that_only_saves(job: ChangingJob) -> None:
    """It accepts no wish. Its ranks know by themselves what to do."""
    job.changes.take()
    job.changes.begin(HOSTS, HOSTS.without({"b", "c"}), "only a can take part")
    assert job.keepers.wish == STAYS
    assert job.answer(join="d") == {"refused": "the job only saves its state, because only a can take part"}
    assert not job.changes.is_open
    job.keepers.run = 1
    assert job.changes.take(has_left=True) is None
    job.train()
    job.accept(leave=["b"])


def test_a_wish_waits_for_what_is_about_to_begin(job: ChangingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.launch.changes._BEGIN_SECONDS", 60.0)
    job.changes.take()
    answers: list[dict[str, str]] = []
    asking = threading.Thread(target=lambda: answers.append(job.answer(leave=["b"])))
    asking.start()
    job.changes.begin(HOSTS, HOSTS)
    time.sleep(0.3)
    assert not answers
    job.keepers.run = 1
    asking.join(30)
    assert list(answers[0]) == ["accepted"]


def test_sigterm_to_a_rank_is_a_wish(job: ChangingJob) -> None:
    job.told(2)
    until(lambda: job.keepers.wish == PREPARES)
    change = job.taken()
    assert (change.text, change.now_on) == ("b leaves (SIGTERM told rank 2 to end)", HOSTS.without({"b"}))
    assert not change.is_end
    job.train()
    job.told(2, 3, 4)  # too few hosts would be left
    until(lambda: job.keepers.wish == SAVES)
    change = job.taken()
    assert (change.is_end, change.text) == (True, "SIGTERM told ranks 2,4 to end on b, c")


def test_sigterm_of_mpiexec_is_no_wish(job: ChangingJob) -> None:
    """A rank has failed, so mpiexec ends the others."""
    job.keepers.is_ending = True
    job.told(0, 1, 2)
    time.sleep(1)
    assert job.keepers.wish == STAYS
    assert job.changes.take() is None


@pytest.mark.parametrize("is_recent", [False, True])
def test_sigterm_while_a_change_is_under_way(job: ChangingJob, is_recent: bool) -> None:
    """When the ranks leave, the signal may be too recent for a wish. The launcher does not forget it."""
    job.accept(join="d")
    if is_recent:
        job.keepers.told = {2: time.monotonic()}
    else:
        job.told(2)
        until(lambda: "b" in job.changes._told)
    change = job.taken(has_left=is_recent)
    assert change.joined == ("d",)
    if not is_recent:
        job.keepers.told = {}
    job.changes.begin(change.hosts, change.now_on)
    assert not job.keepers.told
    assert job.keepers.wish == STAYS
    job.keepers.run = 1
    until(lambda: job.keepers.wish == PREPARES)
    assert job.taken().now_on.hosts == ("a", "c", "d")


def test_sigterm_while_a_host_that_would_join_is_asked(job: ChangingJob) -> None:
    asking = threading.Thread(target=ask, args=(launcher_name(os.getpid()), {"join": "slow"}))
    asking.start()
    job.told(2)
    until(lambda: job.keepers.wish == PREPARES)
    assert asking.is_alive()
    asking.join()


def test_sigterm_where_nothing_can_be_left(job: ChangingJob, capsys: pytest.CaptureFixture[str]) -> None:
    job.keepers.run = 0
    job.told(2)
    until(lambda: job.keepers.refuses)
    why = "the hosts of a job change in the first run of a Trainer, or loop with mt.keep, only; there is none now"
    until(lambda: f"SIGTERM told rank 2 to end, and {why}" in capsys.readouterr().err)
    assert job.changes.take() is None


def test_the_next_try_is_prepared_before_the_ranks_leave(job: ChangingJob) -> None:
    job.changes.look()
    assert not job.prepared
    following: Any = job.accept(leave=["b"])
    assert (following.hosts, following.cause) == (("a", "c"), "b leaves")
    job.changes.look()
    assert (following.looks, job.keepers.wish) == (1, PREPARES)
    following.is_ready = True
    job.changes.look()
    assert job.keepers.wish == LEAVES
    assert job.changes.take_next(job.taken()) is following
    assert not following.is_closed


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("wish", [{"leave": ["b"]}, {"join": "d"}])
def test_a_next_try_that_cannot_be_prepared(
    job: ChangingJob, wish: dict[str, Any], has_room: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host that fails does not join. A host leaves in any case. Without room for both tries, one ends first."""
    following: Any = job.accept(**wish)
    following.problem, following.has_room = "rank 6 failed", has_room
    job.changes.look()
    assert following.is_closed
    said, change = capsys.readouterr().err, job.changes.take()
    if "join" in wish and has_room:
        assert said == "mpitrain: the job continues as before, without d: rank 6 failed\n"
        assert [host for _, host in job.changes.bad] == ["d"]
        assert (change, job.keepers.wish) == (None, STAYS)
    else:
        assert job.changes.bad == []
        how = "It starts when this one has ended"
        assert said == f"mpitrain: the next attempt cannot start beside this one: rank 6 failed. {how}\n"
        assert job.keepers.wish == LEAVES
        assert job.changes.take_next(change) is None
    job.changes.look()
    assert len(job.prepared) == 1


@pytest.mark.parametrize(("faulty", "bad"), [(("a",), []), (("a", "d"), ["d"]), ((), ["d"])])
def test_who_is_blamed_for_a_next_try_that_fails(job: ChangingJob, faulty: tuple[str, ...], bad: list[str]) -> None:
    """The host that would join is not blamed if another host is the cause."""
    following: Any = job.accept(join="d")
    following.problem, following.faulty = "it has failed", faulty
    job.changes.look()
    assert (job.keepers.wish, [host for _, host in job.changes.bad]) == (STAYS, bad)


def test_a_next_try_that_fails_when_the_ranks_leave(job: ChangingJob) -> None:
    """The ranks have heard that they leave. So another attempt must follow."""
    following: Any = job.accept(join="d")
    following.is_ready = True
    job.changes.look()
    following.problem = "rank 6 failed"
    job.changes.look()
    assert job.keepers.wish == LEAVES
    assert job.changes.take_next(job.taken()) is None
    assert following.is_closed


def test_a_next_try_that_is_never_ready(job: ChangingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.told(2)
    until(lambda: job.keepers.wish == PREPARES)
    job.changes.look()
    job.changes.look()
    assert job.keepers.wish == PREPARES
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    job.changes.look()
    assert job.keepers.wish == LEAVES
    assert job.prepared[0].is_closed


def test_a_next_try_that_is_not_needed(job: ChangingJob) -> None:
    """The change is dropped; or the present try fails before its ranks leave."""
    dropped: Any = job.accept(leave=["b"])
    job.keepers.run = 2
    until(lambda: job.keepers.wish == STAYS)
    job.changes.look()
    assert dropped.is_closed
    job.keepers.run = 1
    following: Any = job.accept(leave=["c"])
    assert (following.hosts, following.cause) == (("a", "b"), "c leaves")
    following.is_ready = True
    job.taken()
    assert job.changes.take_next(None) is None
    assert following.is_closed


def test_no_next_try_beside_this_one(job: ChangingJob) -> None:
    """No attempt is prepared for a job that has spares or runs on this machine alone."""
    assert job.accept(join="alone") is None
    assert job.keepers.wish == LEAVES
