"""A training that counts its samples, and a server with workers in threads of one process.

The model is one number for each sample. A step adds 1 / m to the numbers of its m samples, whatever the parameters are.
So after a run the parameters say how often each sample was in an update. All values are exact.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

import mpitrain as mt
from mpitrain.job.role import Role
from mpitrain.job.start import the_job
from mpitrain.serve.keys import WorkerKey, keys_of

NUM_SAMPLES, BATCH, JOB = 24, 8, 4

_TEMPORARY = tempfile.TemporaryDirectory()
_FOLDER = Path(_TEMPORARY.name)  # of the keys

# Each with the number of samples of its updates.
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "sync": ({"mode": "sync"}, BATCH),
    "sync, small jobs": ({"mode": "sync", "job_samples": 2}, BATCH),
    "sync, backup": ({"mode": "sync", "backup": 1}, BATCH),
    "async": ({"mode": "async", "job_samples": JOB}, JOB),
    "bounded": ({"mode": "bounded", "staleness": 1, "job_samples": JOB}, JOB),
}


def counting(parameters: Any, batch: Any, on_gradient: Any) -> float:
    gradient = numpy.zeros_like(parameters["count"])
    numpy.subtract.at(gradient, batch, 1 / len(batch))
    on_gradient("count", gradient)
    return float(batch.mean())


def parts(strategy: Any, function: Any = counting, *, batch: int = BATCH) -> Callable[[mt.World], mt.Parts]:
    def build(world: mt.World) -> mt.Parts:
        data = mt.ArrayData(world, numpy.arange(NUM_SAMPLES), global_batch=batch, seed=5)
        model = mt.ArrayFunction(function, {"count": numpy.zeros(NUM_SAMPLES)}, mt.Sgd(1.0))
        return mt.Parts(model, strategy, data)

    return build


def expected_counts(position: dict[str, Any], samples_of_update: int) -> numpy.ndarray:
    """The parameters after a run, by its position in the data: each sample once an epoch, without those left over."""
    data = mt.ArrayData(mt.init(), numpy.arange(NUM_SAMPLES), global_batch=BATCH, seed=5)
    counts = numpy.full(NUM_SAMPLES, float(position["epoch"]))
    counts[data.read(position["epoch"], 0, position["cursor"])] += 1
    for epoch, begin, end in position.get("left", []):
        counts[data.read(epoch, begin, end)] -= 1
    return counts / samples_of_update


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def worker_key() -> WorkerKey:
    return keys_of(_FOLDER / "server").worker


@contextmanager
def playing(kind: Any, address: str, num_workers: int = 0) -> Iterator[None]:
    """Inside, this process has a role; a Trainer made inside keeps it."""
    job, server = the_job(), _FOLDER / "server"
    worker = _FOLDER / "worker"
    if not worker.exists():  # threads read it
        worker.write_text(worker_key().text)
    key = server if kind == "server" else worker
    before, job.role = job.role, Role(kind, (address,), str(key), num_workers=num_workers)
    try:
        yield
    finally:
        job.role = before


class WorkerThreads:
    """Workers of a server, each a Trainer in a thread. Their errors are kept."""

    def __init__(self) -> None:
        self.errors: dict[int, BaseException] = {}
        self.threads: list[threading.Thread] = []

    def start(self, address: str, builds: Sequence[Any]) -> None:
        for build in builds:
            number = len(self.threads)
            with playing("worker", address):
                trainer = mt.Trainer(build)
            self.threads.append(threading.Thread(target=self._run, args=(number, trainer), daemon=True))
            self.threads[-1].start()

    def _run(self, number: int, trainer: mt.Trainer) -> None:
        try:
            trainer.run()
        except SystemExit as end:
            assert end.code == 0
        except BaseException as error:
            self.errors[number] = error
            print(f"worker thread {number}: {type(error).__name__}: {error}")

    def end(self) -> None:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def train_served(
    build: Any, worker_builds: Sequence[Any], hooks: Sequence[mt.Hook], restore: dict[str, Any] | None = None
) -> tuple[mt.Trainer, WorkerThreads]:
    """Run a server in this thread, with workers in others. Return what it has trained, and the workers."""
    address = free_address()
    with playing("server", address, len(worker_builds)):
        trainer = mt.Trainer(build, hooks)
    if restore is not None:
        trainer.restore(restore)
    workers = WorkerThreads()
    workers.start(address, worker_builds)
    try:
        trainer.run()
    finally:
        workers.end()
    return trainer, workers
