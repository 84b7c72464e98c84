"""A keeper of a test's own, which holds descriptors as those that the launcher starts do; and those of lost jobs."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from jobs import until
from mpitrain.launch.kept import KeeperLine, Kept
from mpitrain.launch.roster import kept


@contextmanager
def keeper() -> Iterator[str]:
    """The name of one that a thread serves until the end."""
    name = f"mpitrain-test-{secrets.token_hex(8)}"
    served, stop = Kept(name), threading.Event()

    def serve() -> None:
        while not stop.is_set():
            served.look()
            time.sleep(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield name
    finally:
        stop.set()
        thread.join()
        served.close()


def kept_id(folder: Path) -> str:
    """Wait until the launcher that was started in this folder is lost. Return the id of the last attempt of its job."""
    return str(_lost(folder)["estate"]["tries"][-1])


def drop_kept(folder: Path) -> None:
    """Wait for the same, and have the keeper end."""
    with closing(KeeperLine(_lost(folder)["keeper"])) as line:
        line.drop()


def _lost(folder: Path) -> dict[str, Any]:
    lost: list[dict[str, Any]] = []

    def is_lost() -> bool:
        lost[:] = [one for one in kept() if one["estate"]["folder"] == str(folder) and "lost_ms" in one]
        return bool(lost)

    until(is_lost, "no keeper has lost the launcher of this job")
    return lost[0]
