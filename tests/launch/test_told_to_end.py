"""SIGTERM tells ranks to end. The launcher takes the signal as a wish that their hosts leave the job."""

from __future__ import annotations

import os
import threading
import time

import changing
import pytest
from changing import HOSTS, told

from jobs import until
from mpitrain.launch.changes import Changes
from mpitrain.launch.control import ask
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import PREPARES, SAVES, STAYS
from mpitrain.launch.roster import launcher_name

# Fixtures: pytest finds them by these names.
_no_long_wait, changes = changing._no_long_wait, changing.changes
asked, prepared = changing.asked, changing.prepared


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
    """When the ranks leave, the signal is too recent for a wish. The launcher does not forget it."""
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
