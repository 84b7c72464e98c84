"""The next try of a job is prepared before its ranks leave, and what happens when that fails."""

from __future__ import annotations

import time

import changing
import pytest
from changing import Prepared, told

from jobs import until
from mpitrain.launch.changes import Changes
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import LEAVES, PREPARES, STAYS

# Fixtures: pytest finds them by these names.
_no_long_wait, changes = changing._no_long_wait, changing.changes
asked, prepared = changing.asked, changing.prepared


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
    """No try is prepared for a job that has spares or runs on this machine alone."""
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
