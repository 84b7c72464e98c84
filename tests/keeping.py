"""A keeper of a test's own: it holds descriptors as those that the launcher starts do."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpitrain.launch.kept import Kept


@contextmanager
def keeper() -> Iterator[str]:
    """The name of one that a thread serves until the end."""
    name = f"mpitrain-test-{secrets.token_hex(8)}"
    kept, stop = Kept(name), threading.Event()

    def serve() -> None:
        while not stop.is_set():
            kept.look()
            time.sleep(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield name
    finally:
        stop.set()
        thread.join()
        kept.close()
