"""Wishes to change the hosts of a running job: which are accepted, and how they reach the launcher."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import changing
import pytest
from changing import HOSTS, Asked, told

from jobs import until
from mpitrain.launch.changes import Changes, Tellers
from mpitrain.launch.control import ask
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import PREPARES, STAYS
from mpitrain.launch.orders import Orders
from mpitrain.launch.placement import Place
from mpitrain.launch.roster import launcher_name
from mpitrain.watching.rank_record import RankRecord

# Fixtures: pytest finds them by these names.
_no_long_wait, changes = changing._no_long_wait, changing.changes
asked, prepared = changing.asked, changing.prepared


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
    with Tellers(Orders(), None):
        answer = ask(launcher_name(os.getpid()), {"leave": ["b"]})
    why = "its hosts cannot change, because no keepers hold its state meanwhile; start the job with --restarts N"
    assert answer == {"refused": why}


def test_the_stacks_of_many_ranks() -> None:
    """They have more bytes than a message of a socket, and than its buffer."""
    lines = [f"rank {rank} on a runs" + "\u00fc" * 1000 for rank in range(500)]

    class Many:
        def records(self) -> dict[int, RankRecord]:
            return {0: RankRecord(0)}

        def lost(self) -> set[int]:
            return set()

        def give(self, order: Mapping[str, Any]) -> None:
            pass

        def stacks(self) -> list[str]:
            return lines

    orders = Orders()
    orders.lead(Many())
    with Tellers(orders, None):
        answer = ask(launcher_name(os.getpid()), {"tell": {"kind": "stacks"}, "from": "lab1"})
    assert answer == {"accepted": "\n".join(lines)}


def test_the_name_of_the_socket_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """The job goes on."""
    with Tellers(Orders(), None), Tellers(Orders(), None):
        said = capsys.readouterr().err
    assert "nobody can tell this job anything (mpitrain tell, join, leave): " in said
    assert "Address already in use" in said


def test_a_message_that_makes_no_sense(changes: Changes, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not answer" in ask(launcher_name(os.getpid()), {"dance": 1})["refused"]
    assert "a request of `mpitrain tell`, `join` or `leave` could not be answered" in capsys.readouterr().err
    assert "accepted" in ask(launcher_name(os.getpid()), {"leave": ["b"]})


def test_an_error_that_nobody_expects(changes: Changes, keepers: Keepers, capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher prints a line about the error, and its threads go on."""
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


def test_a_try_that_only_saves(changes: Changes, keepers: Keepers) -> None:
    """It accepts no wish. Its ranks know by themselves what to do."""
    changes.take()
    changes.begin(HOSTS, HOSTS.without({"b", "c"}), "only a can take part")
    assert keepers.wish == STAYS
    assert changes.answer({"join": "d"}) == {"refused": "the job only saves its state, because only a can take part"}
    assert not changes.is_open
    keepers.run = 1
    assert changes.take(has_left=True) is None
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
