"""A training that counts its samples, and servers with workers in threads of one process.

The model is one number for each sample. A step adds 1 / m to the numbers of its m samples, whatever the parameters are.
So after a run the parameters say how often each sample was in an update. All values are exact.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

import mpitrain as mt
from free_ports import free_addresses
from mpitrain.job.start import the_job
from mpitrain.role import Role
from mpitrain.server.security import WorkerKey, keys_of

NUM_SAMPLES, BATCH, JOB = 24, 8, 4
_TEMPORARY = tempfile.TemporaryDirectory()
_FOLDER = Path(_TEMPORARY.name)  # of the keys

# A training in a process of its own. Each update adds 1 / 4 to the numbers of its 4 samples. The last line says where
# the run stands.
COUNTING_SCRIPT = """
import json, os, sys, time
import numpy
import mpitrain as mt

folder, last, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

def counting(parameters, batch, on_gradient):
    time.sleep(seconds)
    gradient = numpy.zeros_like(parameters["count"])
    numpy.subtract.at(gradient, batch, 1 / len(batch))
    on_gradient("count", gradient)
    return 1.0

def build(world):
    data = mt.data.ArrayData(world, numpy.arange(24), global_batch=4, seed=5)
    model = mt.ArrayFunction(counting, {"count": numpy.zeros(24)}, mt.optim.SGD(1.0))
    return mt.Parts(model, mt.ParameterServer(MODE), data)

class Tell(mt.Hook):
    ends_run = True

    def after_step(self, trainer, step):
        if step.number % 10 == 0:
            print("step", step.number, flush=True)
        if step.number == last or os.path.exists(folder + "/stop"):
            trainer.last_step = step.number

trainer = mt.Trainer(build, [Tell(), mt.Checkpoint(folder, steps=5, keep=2)])
trainer.run()
counts = trainer.adapter.parameters()["count"]
print("end", json.dumps([(4 * counts).tolist(), trainer.data.state(), trainer.step_number]), flush=True)
"""

# Each with the number of samples of its updates.
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "sync": ({"mode": "sync"}, BATCH),
    "sync, small jobs": ({"mode": "sync", "unit_samples": 2}, BATCH),
    "sync, backup": ({"mode": "sync", "backup": 1}, BATCH),
    "async": ({"mode": "async", "unit_samples": JOB}, JOB),
    "bounded": ({"mode": "bounded", "staleness": 1, "unit_samples": JOB}, JOB),
}


def counting(parameters: Any, batch: Any, on_gradient: Any) -> float:
    gradient = numpy.zeros_like(parameters["count"])
    numpy.subtract.at(gradient, batch, 1 / len(batch))
    on_gradient("count", gradient)
    return float(batch.mean())


def parts(strategy: Any, function: Any = counting, *, batch: int = BATCH) -> Callable[[mt.World], mt.Parts]:
    def build(world: mt.World) -> mt.Parts:
        data = mt.data.ArrayData(world, numpy.arange(NUM_SAMPLES), global_batch=batch, seed=5)
        model = mt.ArrayFunction(function, {"count": numpy.zeros(NUM_SAMPLES)}, mt.optim.SGD(1.0))
        return mt.Parts(model, strategy, data)

    return build


def expected_counts(position: dict[str, Any], samples_of_update: int) -> numpy.ndarray:
    """The parameters after a run, by its position in the data: each sample once an epoch, without those left over."""
    data = mt.data.ArrayData(mt.init(), numpy.arange(NUM_SAMPLES), global_batch=BATCH, seed=5)
    counts = numpy.full(NUM_SAMPLES, float(position["epoch"]))
    counts[data.read(position["epoch"], 0, position["cursor"])] += 1
    for epoch, begin, end in position.get("left", []):
        counts[data.read(epoch, begin, end)] -= 1
    return counts / samples_of_update


def check_counts(output: str) -> int:
    """Check that each sample counts once in what a server with COUNTING_SCRIPT has printed. Return its steps."""
    found = re.search("end (.*)\n", output)
    assert found, output
    counts, position, steps = json.loads(found[1])
    left = sum(end - begin for _, begin, end in position.get("left", []))
    assert position["epoch"] * NUM_SAMPLES + position["cursor"] - left == 4 * steps
    assert counts == expected_counts(position, 1).tolist()
    return int(steps)


def worker_key() -> WorkerKey:
    return keys_of(_FOLDER / "server").worker


@contextmanager
def playing(kind: Any, *addresses: str, num_workers: int = 0, num_servers: int = 1, number: int = 0) -> Iterator[None]:
    """Inside, this process has a role; a Trainer made inside keeps it."""
    job, server = the_job(), _FOLDER / "server"
    worker = _FOLDER / "worker"
    if not worker.exists():  # threads read it
        worker.write_text(worker_key().text)
    key = worker if kind == "worker" else server
    numbers = {"num_workers": num_workers, "num_servers": num_servers, "number": number}
    job.has_served = False  # a process has one run; a test makes several in one
    before, job.role = job.role, Role(kind, addresses, str(key), **numbers)  # type: ignore[arg-type]
    try:
        yield
    finally:
        job.role = before


class WorkerThreads:
    """Workers of a server, and further servers, each a Trainer in a thread. Their errors are kept."""

    def __init__(self) -> None:
        self.errors: dict[int, BaseException] = {}
        self.threads: list[threading.Thread] = []

    def start(self, address: str, builds: Sequence[Any]) -> None:
        """Start workers. The first server tells them of the others."""
        for build in builds:
            with playing("worker", address, num_servers=0):
                self._start(mt.Trainer(build))

    def start_shards(self, addresses: Sequence[str], builds: Sequence[Any]) -> None:
        """Start the servers besides the first one, which has the first address."""
        for number, (address, build) in enumerate(zip(addresses[1:], builds, strict=True), 1):
            with playing("shard", address, addresses[0], num_servers=len(addresses), number=number):
                self._start(mt.Trainer(build))

    def _start(self, trainer: mt.Trainer) -> None:
        self.threads.append(threading.Thread(target=self._run, args=(len(self.threads), trainer), daemon=True))
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
    build: Any,
    worker_builds: Sequence[Any],
    hooks: Sequence[mt.Hook],
    restore: dict[str, Any] | None = None,
    shard_builds: Sequence[Any] = (),
) -> tuple[mt.Trainer, WorkerThreads]:
    """Run a server in this thread, with workers and further servers in others.

    Return what it has trained, and the others, the workers first.
    """
    num_servers = 1 + len(shard_builds)
    addresses = free_addresses(num_servers)
    with playing("server", addresses[0], num_workers=len(worker_builds), num_servers=num_servers):
        trainer = mt.Trainer(build, hooks)
    if restore is not None:
        trainer.restore(restore)
    others = WorkerThreads()
    others.start(addresses[0], worker_builds)
    others.start_shards(addresses, shard_builds)
    try:
        trainer.run()
    finally:
        others.end()
    return trainer, others
