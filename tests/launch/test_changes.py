"""Wishes to change the hosts of a running job: which are accepted, and how they reach the launcher."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jobs import until
from mpitrain.errors import ConfigError, LaunchError
from mpitrain.launch.changes import Changes
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import LEAVES, PREPARES, SAVES, STAYS
from mpitrain.launch.placement import Place, Placement
from mpitrain.launch.roster import launcher_name
from mpitrain.launch.verdict import Limits
from mpitrain.launch.wishes import ask

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
HOSTS = Placement((Place("a", 0, 2), Place("b", 2, 1), Place("c", 3, 2)), ADDRESSES, own="a")


def widen(placement: Placement, text: str) -> Placement:
    if text == "nowhere":
        raise ConfigError("there is no host 'nowhere'")
    places = (*placement.places, Place(text, placement.num_ranks, 2))
    return Placement(places, {**ADDRESSES, text: "10.0.0.9"}, placement.own)


class Asked:
    """Stands for the check of hosts that want to join."""

    def __init__(self) -> None:
        self.placements: list[Placement] = []

    def __call__(self, placement: Placement) -> None:
        self.placements.append(placement)
        if "slow" in placement.hosts:
            time.sleep(3)
        if "odd" in placement.hosts:
            raise RuntimeError("can't start new thread")
        if "other" in placement.hosts:
            raise LaunchError("other: train.py differs")


class NextTry:
    """Stands for a Successor. Its parts are set by a test."""

    def __init__(self) -> None:
        self.problem, self.has_room, self.is_ready, self.is_closed, self.looks = "", True, False, False, 0
        self.faulty: tuple[str, ...] = ()

    def look(self) -> None:
        self.looks += 1

    def close(self) -> None:
        self.is_closed = True


Prepared = list[tuple[tuple[str, ...], str, NextTry]]


@pytest.fixture(autouse=True)
def _no_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpitrain.launch.changes._BEGIN_SECONDS", 0.1)


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def prepared() -> Prepared:
    """What was prepared: where, why, and the try."""
    return []


@pytest.fixture
def changes(asked: Asked, keepers: Keepers, prepared: Prepared) -> Iterator[Changes]:
    def prepare(where: Placement, cause: str) -> Any:
        if "alone" in where.hosts:
            return None
        prepared.append((where.hosts, cause, NextTry()))
        return prepared[-1][2]

    with Changes(keepers, Limits(5, 2), widen, asked, prepare) as changes:
        changes.begin(HOSTS, HOSTS)
        keepers.run = 1
        yield changes


def test_a_host_leaves(changes: Changes) -> None:
    told = ask(launcher_name(os.getpid()), {"leave": ["b"]})
    assert told == {"accepted": "b leaves after the next copy of its state; then it goes on on a, c"}
    change = changes.take()
    assert change is not None
    assert change.text == "b leaves"
    assert change.hosts == change.now_on == HOSTS.without({"b"})
    assert changes.take() is None


def test_a_host_joins(changes: Changes, asked: Asked) -> None:
    told = ask(launcher_name(os.getpid()), {"join": "d"})
    assert told == {"accepted": "d joins after the next copy of its state; then it goes on on a, b, c, d"}
    # The check asks only the new host and this machine.
    assert [(one.hosts, dict(one.addresses)) for one in asked.placements] == [
        (("d",), {"a": "10.0.0.1", "d": "10.0.0.9"})
    ]
    change = changes.take()
    assert change is not None
    assert change.joined == ("d",)
    assert change.now_on.places[-1] == Place("d", 5, 2)
    assert change.hosts == change.now_on


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"leave": ["d"]}, "d is not a host of the job; its hosts are a, b, c"),
        (
            {"leave": ["a", "b"]},
            "only 1 of its hosts would be left, and --min-nodes is 2; `mpitrain kill` ends a job",
        ),
        ({"leave": ["a", "b", "c"]}, "no host would be left, and --min-nodes is 2; `mpitrain kill` ends a job"),
        ({"join": "nowhere"}, "there is no host 'nowhere'"),
        ({"join": "other"}, "other: train.py differs"),
    ],
)
def test_what_is_refused(changes: Changes, wish: dict[str, object], why: str) -> None:
    assert ask(launcher_name(os.getpid()), wish) == {"refused": why}
    assert changes.take() is None


def test_one_change_at_a_time(changes: Changes) -> None:
    assert "accepted" in changes.answer({"leave": ["b"]})
    assert changes.answer({"leave": ["c"]}) == {"refused": "another change is under way: b leaves"}
    assert changes.take() is not None
    assert changes.answer({"leave": ["c"]}) == {"refused": "the job is being started again; try again in a moment"}


def test_a_host_that_is_set_aside_comes_back(changes: Changes, keepers: Keepers) -> None:
    changes.begin(HOSTS, HOSTS.without({"b", "c"}))
    keepers.run = 1
    assert "accepted" in changes.answer({"join": "b"})
    change = changes.take()
    assert change is not None
    assert change.now_on.hosts == ("a", "b")
    assert sorted(change.hosts.hosts) == ["a", "b", "c"]


def test_a_job_without_keepers() -> None:
    assert ask(launcher_name(os.getpid()), {"leave": ["b"]}) == {
        "refused": "its hosts cannot change, because no keepers hold its state meanwhile; "
        "start the job with --restarts N"
    }


def test_a_message_that_makes_no_sense(changes: Changes, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not answer" in ask(launcher_name(os.getpid()), {"dance": 1})["refused"]
    assert "a request to change the hosts could not be answered" in capsys.readouterr().err
    assert "accepted" in ask(launcher_name(os.getpid()), {"leave": ["b"]})


def test_an_error_that_nobody_expects(changes: Changes, keepers: Keepers, capsys: pytest.CaptureFixture[str]) -> None:
    """A line says so, and the threads go on."""
    assert "does not answer" in ask(launcher_name(os.getpid()), {"join": "odd"})["refused"]
    assert 'could not be answered: RuntimeError("can\'t start new thread")' in capsys.readouterr().err
    assert "accepted" in ask(launcher_name(os.getpid()), {"leave": ["b"]})
    changes.take()
    changes.begin(HOSTS, HOSTS)
    keepers.run = 1
    said: list[str] = []
    told(keepers, 99)  # no rank of the job
    until(lambda: said.append(capsys.readouterr().err) or "may not change as they should: StopIteration" in said[-1])
    told(keepers, 2)
    until(lambda: keepers.wish == PREPARES)


@pytest.mark.parametrize(
    ("run", "why"), [(0, "does so now. If its training"), (2, "it is in run 2 of its script, and the hosts")]
)
def test_only_the_first_run_is_left(changes: Changes, keepers: Keepers, run: int, why: str) -> None:
    keepers.run = run
    for wish in ({"leave": ["b"]}, {"join": "d"}):
        assert why in changes.answer(wish)["refused"]
    assert changes.take() is None


def test_a_run_that_ends_before_the_change_is_made(
    changes: Changes, keepers: Keepers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "accepted" in changes.answer({"leave": ["b"]})
    assert keepers.wish == PREPARES
    keepers.run = 2
    until(lambda: keepers.wish == STAYS)
    said = "mpitrain: the training ended before the hosts of the job could change: b leaves\n"
    until(lambda: capsys.readouterr().err == said)
    assert changes.take() is None


def test_a_try_that_begins_has_no_run_yet(changes: Changes) -> None:
    changes.begin(HOSTS, HOSTS)
    assert "none does so now" in changes.answer({"leave": ["b"]})["refused"]


def told(keepers: Keepers, *ranks: int) -> None:
    """SIGTERM told these ranks to end some time ago."""
    keepers.told = dict.fromkeys(ranks, 0.0)


def test_sigterm_to_a_rank_is_a_wish(changes: Changes, keepers: Keepers) -> None:
    told(keepers, 2)
    until(lambda: keepers.wish == PREPARES)
    change = changes.take()
    assert change is not None
    assert (change.text, change.now_on) == ("b leaves (SIGTERM told rank 2 to end)", HOSTS.without({"b"}))
    assert not change.is_end


def test_sigterm_where_too_few_hosts_would_be_left(changes: Changes, keepers: Keepers) -> None:
    told(keepers, 2, 3, 4)
    until(lambda: keepers.wish == SAVES)
    change = changes.take()
    assert change is not None
    assert change.is_end
    assert change.text == "SIGTERM told ranks 2,4 to end on b, c"


def test_sigterm_of_mpiexec_is_no_wish(changes: Changes, keepers: Keepers) -> None:
    """A rank has failed, so mpiexec ends the others."""
    keepers.is_ending = True
    told(keepers, 0, 1, 2)
    time.sleep(1)
    assert keepers.wish == STAYS
    assert changes.take() is None


def test_sigterm_while_a_change_is_under_way(changes: Changes, keepers: Keepers) -> None:
    assert "accepted" in changes.answer({"join": "d"})
    told(keepers, 2)
    until(lambda: "b" in changes._told)
    change = changes.take()
    assert change is not None
    assert change.joined == ("d",)
    keepers.told = {}
    changes.begin(change.hosts, change.now_on)
    assert keepers.wish == STAYS
    keepers.run = 1
    until(lambda: keepers.wish == PREPARES)
    after = changes.take()
    assert after is not None
    assert after.now_on.hosts == ("a", "c", "d")


def test_sigterm_while_a_host_that_would_join_is_asked(changes: Changes, keepers: Keepers) -> None:
    asking = threading.Thread(target=ask, args=(launcher_name(os.getpid()), {"join": "slow"}))
    asking.start()
    told(keepers, 2)
    until(lambda: keepers.wish == PREPARES)
    assert asking.is_alive()
    asking.join()


def test_sigterm_just_before_the_ranks_have_left(changes: Changes, keepers: Keepers) -> None:
    """When the ranks leave, the signal is too fresh for a wish. It is not forgotten."""
    assert "accepted" in changes.answer({"join": "d"})
    keepers.told = {2: time.monotonic()}
    change = changes.take(has_left=True)
    assert change is not None
    changes.begin(change.hosts, change.now_on)
    assert not keepers.told
    keepers.run = 1
    until(lambda: keepers.wish == PREPARES)
    after = changes.take()
    assert after is not None
    assert after.now_on.hosts == ("a", "c", "d")


def test_sigterm_where_nothing_can_be_left(
    changes: Changes, keepers: Keepers, capsys: pytest.CaptureFixture[str]
) -> None:
    keepers.run = 0
    told(keepers, 2)
    until(lambda: keepers.refuses)
    why = "the hosts of a job change in the first run of a Trainer, or loop with mt.keep, only; there is none now"
    until(lambda: f"SIGTERM told rank 2 to end, and {why}" in capsys.readouterr().err)
    assert changes.take() is None


def test_the_next_try_is_prepared_before_the_ranks_leave(
    changes: Changes, keepers: Keepers, prepared: Prepared
) -> None:
    changes.look()
    assert not prepared
    assert "accepted" in changes.answer({"leave": ["b"]})
    changes.look()
    [(hosts, cause, successor)] = prepared
    assert (hosts, cause) == (("a", "c"), "b leaves")
    changes.look()
    assert (successor.looks, keepers.wish) == (1, PREPARES)
    successor.is_ready = True
    changes.look()
    assert keepers.wish == LEAVES
    assert changes.take_next(changes.take()) is successor  # type: ignore[comparison-overlap]
    assert not successor.is_closed


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("wish", [{"leave": ["b"]}, {"join": "d"}])
def test_a_next_try_that_cannot_be_prepared(
    changes: Changes,
    keepers: Keepers,
    prepared: Prepared,
    wish: dict[str, object],
    has_room: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A host that fails does not join. A host leaves in any case. Where there is no room for both, one ends first."""
    assert "accepted" in changes.answer(wish)
    changes.look()
    prepared[0][2].problem, prepared[0][2].has_room = "rank 6 failed", has_room
    changes.look()
    assert prepared[0][2].is_closed
    said = capsys.readouterr().err
    change = changes.take()
    if "join" in wish and has_room:
        assert said == "mpitrain: the job goes on as before, without d: rank 6 failed\n"
        assert [host for _, host in changes.bad] == ["d"]
        assert (change, keepers.wish) == (None, STAYS)
    else:
        assert changes.bad == []
        how = "It starts when this one has ended"
        assert said == f"mpitrain: the next try cannot start beside this one: rank 6 failed. {how}\n"
        assert keepers.wish == LEAVES
        assert change is not None
        assert changes.take_next(change) is None
    changes.look()
    assert len(prepared) == 1


@pytest.mark.parametrize(("faulty", "bad"), [(("a",), []), (("a", "d"), ["d"]), ((), ["d"])])
def test_who_is_blamed_for_a_next_try_that_fails(
    changes: Changes, keepers: Keepers, prepared: Prepared, faulty: tuple[str, ...], bad: list[str]
) -> None:
    """Not the host that would join, if another one is the cause."""
    assert "accepted" in changes.answer({"join": "d"})
    changes.look()
    prepared[0][2].problem, prepared[0][2].faulty = "it has failed", faulty
    changes.look()
    assert (keepers.wish, [host for _, host in changes.bad]) == (STAYS, bad)


def test_a_next_try_that_fails_when_the_ranks_leave(changes: Changes, keepers: Keepers, prepared: Prepared) -> None:
    """The ranks have heard that they leave. So another try must follow."""
    assert "accepted" in changes.answer({"join": "d"})
    changes.look()
    prepared[0][2].is_ready = True
    changes.look()
    prepared[0][2].problem = "rank 6 failed"
    changes.look()
    assert keepers.wish == LEAVES
    change = changes.take()
    assert change is not None
    assert changes.take_next(change) is None
    assert prepared[0][2].is_closed


def test_a_next_try_that_is_never_ready(
    changes: Changes, keepers: Keepers, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(keepers, 2)
    until(lambda: keepers.wish == PREPARES)
    changes.look()
    changes.look()
    assert keepers.wish == PREPARES
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    changes.look()
    assert keepers.wish == LEAVES
    assert prepared[0][2].is_closed


def test_no_next_try_beside_this_one(changes: Changes, keepers: Keepers, prepared: Prepared) -> None:
    """One that has spares, or runs on this machine alone."""
    assert "accepted" in changes.answer({"join": "alone"})
    changes.look()
    assert (prepared, keepers.wish) == ([], LEAVES)


def test_a_change_that_is_dropped(changes: Changes, keepers: Keepers, prepared: Prepared) -> None:
    assert "accepted" in changes.answer({"leave": ["b"]})
    changes.look()
    keepers.run = 2
    until(lambda: keepers.wish == STAYS)
    changes.look()
    assert prepared[0][2].is_closed
    keepers.run = 1
    assert "accepted" in changes.answer({"leave": ["c"]})
    changes.look()
    assert prepared[1][:2] == (("a", "b"), "c leaves")


def test_a_try_that_fails_beside_the_next(changes: Changes, prepared: Prepared) -> None:
    assert "accepted" in changes.answer({"leave": ["b"]})
    changes.look()
    prepared[0][2].is_ready = True
    assert changes.take() is not None
    assert changes.take_next(None) is None  # the ranks have not left
    assert prepared[0][2].is_closed


def test_a_try_that_only_saves(changes: Changes, keepers: Keepers) -> None:
    """It saves as soon as it has begun to train, and accepts no wish."""
    changes.take()
    changes.begin(HOSTS, HOSTS.without({"b", "c"}), "only a can take part")
    assert keepers.wish == STAYS
    assert changes.answer({"join": "d"}) == {"refused": "the job only saves its state, because only a can take part"}
    assert not changes.is_open
    keepers.run = 1
    until(lambda: keepers.wish == SAVES)
    change = changes.take(has_left=True)
    assert change is not None
    assert (change.text, change.is_end) == ("only a can take part", True)
    changes.begin(HOSTS, HOSTS)
    keepers.run = 1
    assert "accepted" in changes.answer({"leave": ["b"]})


def test_a_wish_waits_for_what_is_about_to_begin(
    changes: Changes, keepers: Keepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpitrain.launch.changes._BEGIN_SECONDS", 60.0)
    changes.take()
    answers: list[dict[str, str]] = []
    asking = threading.Thread(target=lambda: answers.append(changes.answer({"leave": ["b"]})))
    asking.start()
    changes.begin(HOSTS, HOSTS)
    time.sleep(0.3)
    assert not answers
    keepers.run = 1
    asking.join(30)
    assert list(answers[0]) == ["accepted"]
