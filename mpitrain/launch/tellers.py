"""Who tells a running job something: the wishes of `mpitrain tell`, `join` and `leave` come to one socket."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from mpitrain.launch.changes import Changes
from mpitrain.launch.events import say
from mpitrain.launch.orders import Orders, teller_name
from mpitrain.launch.roster import launcher_name
from mpitrain.launch.wishes import listen, serve

_LAST_SECONDS = 1.5


class Tellers:
    """Use this in `with`: inside, wishes are answered."""

    def __init__(self, orders: Orders, changes: Changes | None) -> None:
        """Without `changes`, the hosts of the job cannot change."""
        self._orders, self._changes = orders, changes
        self._listener: socket.socket | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Tellers:
        """Open the socket. If that cannot be, stderr says so: the job does not need it."""
        try:
            self._listener = listen(launcher_name(os.getpid()))
        except OSError as error:
            say(f"nobody can tell this job anything (mpitrain tell, join, leave): {error}")
            return self
        serves = self._listener, self._answer, self._stop
        self._thread = threading.Thread(target=serve, args=serves, name="wishes", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)  # a host may be asked, which takes longer
        if self._listener is not None:
            self._listener.close()

    def _answer(self, wish: Mapping[str, Any], user: int) -> Mapping[str, Any]:
        if "tell" in wish:
            return self._orders.answer(wish["tell"], teller_name(user, str(wish.get("from", ""))))
        if self._changes is None:
            text = "its hosts cannot change, because no keepers hold its state meanwhile"
            return {"refused": f"{text}; start the job with --restarts N"}
        return self._changes.answer(wish)
