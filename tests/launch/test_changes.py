"""Changes of a job's hosts: wishes, ranks that SIGTERM tells to end, and the next try that is prepared meanwhile."""

from __future__ import annotations

import os
import threading
import time

import changing
import pytest
from changing import HOSTS, Asked, Prepared, taken, told, train

from jobs import until
from mpitrain.launch.changes import Changes
from mpitrain.launch.control import ask
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import LEAVES, PREPARES, SAVES, STAYS
from mpitrain.launch.placement import Place
from mpitrain.launch.roster import launcher_name

# Fixtures: pytest finds them by these names.
asked, prepared, changes = changing.asked, changing.prepared, changing.changes


def test_a_host_leaves(changes: Changes) -> None:
    follows = "b leaves after the next copy of its state; then it goes on on a, c"
    assert changes.answer({"leave": ["b"]}) == {"accepted": follows}
    assert changes.answer({"leave": ["c"]}) == {"refused": "another change is under way: b leaves"}
    change = taken(changes)
    assert (change.text, change.hosts, change.now_on) == ("b leaves", HOSTS.without({"b"}), HOSTS.without({"b"}))
    assert changes.take() is None
    assert changes.answer({"leave": ["c"]}) == {"refused": "the job is being started again; try again in a moment"}


def test_a_host_joins(changes: Changes, asked: Asked) -> None:
    follows = "d joins after the next copy of its state; then it goes on on a, b, c, d"
    assert changes.answer({"join": "d"}) == {"accepted": follows}
    # The check asks only the new host and this machine.
    (only,) = asked.placements
    assert (only.hosts, only.addresses) == (("d",), {"a": "10.0.0.1", "d": "10.0.0.9"})
    change = taken(changes)
    assert (change.joined, change.now_on.places[-1]) == (("d",), Place("d", 5, 2))
    assert change.hosts == change.now_on


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"leave": ["d"]}, "d is not a host of the job; its hosts are a, b, c"),
        ({"leave": ["a", "b"]}, "only 1 of its hosts would be left, and --min-nodes is 2; `mpitrain kill` ends a job"),
        ({"leave": ["a", "b", "c"]}, "no host would be left, and --min-nodes is 2; `mpitrain kill` ends a job"),
        ({"join": "nowhere"}, "there is no host 'nowhere'"),
        ({"join": "other"}, "other: train.py differs"),
    ],
)
def test_what_is_refused(changes: Changes, wish: dict[str, object], why: str) -> None:
    assert changes.answer(wish) == {"refused": why}
    assert changes.take() is None


def test_only_in_the_first_run(changes: Changes, keepers: Keepers, capsys: pytest.CaptureFixture[str]) -> None:
    for run, why in ((0, "does so now. If its training"), (2, "it is in run 2 of its script, and the hosts")):
        keepers.run = run
        for wish in ({"leave": ["b"]}, {"join": "d"}):
            assert why in changes.answer(wish)["refused"]
        assert changes.take() is None
        changes.begin(HOSTS, HOSTS)  # a try that begins has no run yet
    assert "none does so now" in changes.answer({"leave": ["b"]})["refused"]
    keepers.run = 1
    assert "accepted" in changes.answer({"leave": ["b"]})
    assert keepers.wish == PREPARES
    keepers.run = 2  # before the change is made
    until(lambda: keepers.wish == STAYS)
    said = "mpitrain: the training ended before the hosts of the job could change: b leaves\n"
    until(lambda: capsys.readouterr().err == said)
    assert changes.take() is None


def test_a_host_that_is_set_aside_comes_back(changes: Changes, keepers: Keepers) -> None:
    train(changes, keepers, HOSTS.without({"b", "c"}))
    assert "accepted" in changes.answer({"join": "b"})
    change = taken(changes)
    assert change.now_on.hosts == ("a", "b")
    assert sorted(change.hosts.hosts) == ["a", "b", "c"]


def test_a_try_that_only_saves(changes: Changes, keepers: Keepers) -> None:
    """It accepts no wish. Its ranks know by themselves what to do."""
    changes.take()
    changes.begin(HOSTS, HOSTS.without({"b", "c"}), "only a can take part")
    assert keepers.wish == STAYS
    assert changes.answer({"join": "d"}) == {"refused": "the job only saves its state, because only a can take part"}
    assert not changes.is_open
    keepers.run = 1
    assert changes.take(has_left=True) is None
    train(changes, keepers, HOSTS)
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


def test_sigterm_to_a_rank_is_a_wish(changes: Changes, keepers: Keepers) -> None:
    told(keepers, 2)
    until(lambda: keepers.wish == PREPARES)
    change = taken(changes)
    assert (change.text, change.now_on) == ("b leaves (SIGTERM told rank 2 to end)", HOSTS.without({"b"}))
    assert not change.is_end
    train(changes, keepers, HOSTS)
    told(keepers, 2, 3, 4)  # too few hosts would be left
    until(lambda: keepers.wish == SAVES)
    change = taken(changes)
    assert (change.is_end, change.text) == (True, "SIGTERM told ranks 2,4 to end on b, c")


def test_sigterm_of_mpiexec_is_no_wish(changes: Changes, keepers: Keepers) -> None:
    """A rank has failed, so mpiexec ends the others."""
    keepers.is_ending = True
    told(keepers, 0, 1, 2)
    time.sleep(1)
    assert keepers.wish == STAYS
    assert changes.take() is None


@pytest.mark.parametrize("is_recent", [False, True])
def test_sigterm_while_a_change_is_under_way(changes: Changes, keepers: Keepers, is_recent: bool) -> None:
    """When the ranks leave, the signal may be too recent for a wish. The launcher does not forget it."""
    assert "accepted" in changes.answer({"join": "d"})
    if is_recent:
        keepers.told = {2: time.monotonic()}
    else:
        told(keepers, 2)
        until(lambda: "b" in changes._told)
    change = taken(changes, has_left=is_recent)
    assert change.joined == ("d",)
    if not is_recent:
        keepers.told = {}
    changes.begin(change.hosts, change.now_on)
    assert not keepers.told
    assert keepers.wish == STAYS
    keepers.run = 1
    until(lambda: keepers.wish == PREPARES)
    assert taken(changes).now_on.hosts == ("a", "c", "d")


def test_sigterm_while_a_host_that_would_join_is_asked(changes: Changes, keepers: Keepers) -> None:
    asking = threading.Thread(target=ask, args=(launcher_name(os.getpid()), {"join": "slow"}))
    asking.start()
    told(keepers, 2)
    until(lambda: keepers.wish == PREPARES)
    assert asking.is_alive()
    asking.join()


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
    """A host that fails does not join. A host leaves in any case. Without room for both tries, one ends first."""
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
    """The host that would join is not blamed if another host is the cause."""
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
    assert changes.take_next(taken(changes)) is None
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


def test_a_next_try_that_is_not_needed(changes: Changes, keepers: Keepers, prepared: Prepared) -> None:
    """The change is dropped; or the present try fails before its ranks leave."""
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
    prepared[1][2].is_ready = True
    taken(changes)
    assert changes.take_next(None) is None
    assert prepared[1][2].is_closed


def test_no_next_try_beside_this_one(changes: Changes, keepers: Keepers, prepared: Prepared) -> None:
    """No try is prepared for a job that has spares or runs on this machine alone."""
    assert "accepted" in changes.answer({"join": "alone"})
    changes.look()
    assert (prepared, keepers.wish) == ([], LEAVES)
