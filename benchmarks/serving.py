"""A server and its workers in the threads and ranks of a benchmark. Each Trainer gets a role of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mpitrain as mt
from mpitrain.job.start import the_job
from mpitrain.role import Role
from mpitrain.server.security import keys_of

Build = Callable[[mt.World], mt.Parts]


@dataclass(frozen=True)
class Place:
    """Where a server listens, as HOST:PORT, and where its workers find it; with the folder of the keys.

    `plain`: the interface of connections without encryption.
    """

    listens: str
    address: str
    folder: Path
    plain: str

    def trainer(self, kind: Literal["server", "worker"], build: Build, hooks: Sequence[mt.Hook] = (), num: int = 0):  # type: ignore[no-untyped-def]
        """A Trainer with this role. A server waits for `num` workers before the first job goes out."""
        job = the_job()
        before = job.role, job.everyone
        address, key = (self.listens, "server") if kind == "server" else (self.address, "worker")
        job.role, job.everyone = Role(kind, (address,), str(self.folder / key), plain=self.plain, num_workers=num), None
        try:
            return mt.Trainer(build, hooks)
        finally:
            job.role, job.everyone = before


def make_place(folder: Path, host: str = "", plain: str = "") -> Place:
    """A place with a free port, and new keys. `host`: by which workers on other hosts know this one."""
    (folder / "worker").write_text(keys_of(folder / "server").worker.text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    return Place(f"{'*' if host else '127.0.0.1'}:{port}", f"{host or '127.0.0.1'}:{port}", folder, plain)


def start_workers(place: Place, builds: Sequence[Build]) -> list[threading.Thread]:
    """Start workers, each in a thread, with a connection of its own."""
    trainers = [place.trainer("worker", build) for build in builds]
    threads = [threading.Thread(target=trainer.run) for trainer in trainers]  # run() ends the thread by SystemExit
    for thread in threads:
        thread.start()
    return threads
