"""One who watches a launcher: when a look is due, and who is sent away. The clock is the test's."""

from __future__ import annotations

import json
import socket

from mpitrain.launch.live_watcher import LiveWatcher


def test_who_says_or_reads_nothing_is_sent_away() -> None:
    """The clock is the test's."""
    near, far = socket.socketpair()
    with near, far:
        watcher = LiveWatcher(near, 100.0)
        far.sendall(b'{"wat')
        watcher.receive(105.0)
        watcher.judge(110.0)
        assert not watcher.is_closed
        watcher.judge(110.1)
        assert watcher.is_closed
        assert "no request has come within 10 s" in json.loads(far.makefile().readline())["error"]
    near, far = socket.socketpair()
    with near, far:
        watcher = LiveWatcher(near, 100.0)
        far.sendall(b'{"watch": 0.5, "version": 1}\n')
        watcher.receive(100.0)
        look = b"x" * (1 << 20) + b"\n"  # more than a socket holds
        watcher.look(look, 100.0)
        watcher.look(b"another\n", 100.5)  # it has not taken the one before, so it misses this one
        watcher.judge(110.0)
        assert (watcher.has_unsent, watcher.is_closed) == (True, False)
        watcher.judge(110.1)
        assert watcher.is_closed
        watcher.close()
        assert look.startswith(far.makefile("rb").read())


def test_looks_are_due_at_whole_multiples() -> None:
    """So many watchers have one look together. A clock of the test's."""
    near, far = socket.socketpair()
    with near, far:
        watcher = LiveWatcher(near, 100.3)
        far.sendall(b'{"watch": 0.5, "version": 1}\n')
        watcher.receive(100.3)
        assert (watcher.due, watcher.asked) == (100.3, 100.3)
        for now, due in ((100.3, 100.5), (100.5, 101.0), (103.7, 104.0)):
            watcher.look(b"look\n", now)
            assert watcher.due == due
        far.sendall(b'{"look": 1, "version": 1}\n')
        watcher.receive(104.0)
        watcher.look(b"last\n", 104.0)
        assert (watcher.due, watcher.is_closed) == (None, True)
