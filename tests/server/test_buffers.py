"""The buffers of a PyTorch module on a server: running statistics with stale answers, and notes that are none."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from mpitrain.adapters.accumulate import Accumulate
from mpitrain.errors import GradientError
from mpitrain.reducer.division import divide
from mpitrain.reducer.means import remarks_of
from mpitrain.server.gradients import GradientBuffer
from mpitrain.server.parameters import ParameterShard, Replica

torch = pytest.importorskip("torch")

NUM_WORKERS = 24
MEAN = 5.0


def a_module() -> Any:
    from mpitrain.adapters.torch_module import TorchModule

    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    return TorchModule(module, lambda module, batch: module(batch).square().mean(), optimizer)


class Stale:
    """A worker that answers with gradients of the parameters that it has pulled last."""

    def __init__(self, store: ParameterShard) -> None:
        self._store, self._adapter = store, Accumulate(a_module(), per_rank_batch=64)
        self._replica = Replica(self._adapter)
        self._buffer = GradientBuffer(divide(store.layout, 1), None, "a worker")

    def pull(self) -> None:
        self._replica.take(*self._store.since(self._replica.versions[0]))
        self._replica.load()

    def push(self, batch: numpy.ndarray) -> None:
        self._buffer.begin()
        self._adapter.loss_and_gradients(batch, self._buffer.take)
        unused, (flats,) = self._buffer.finish(1.0)
        gradients = dict(zip(self._store.layout.counts, [flat.copy() for flat in flats], strict=True))
        told = (tuple(unused), self._adapter.note())
        self._store.check_note(told[1])
        self._store.apply(gradients, remarks_of([told]), {}, self._store.version - self._replica.versions[0])
        self._store.note_changes()


def test_running_statistics_follow_the_batches_of_many_workers() -> None:
    """All of them answer in turn. With changes in full, the mean would swing more and more: the delay is too long."""
    server = Accumulate(a_module(), per_rank_batch=64)
    store = ParameterShard(server)
    workers = [Stale(store) for _ in range(NUM_WORKERS)]
    batch = numpy.random.default_rng(3).normal(MEAN, 1.0, (16, 2)).astype("float32")
    means, counts = [], []
    for worker in workers:
        worker.pull()
    for number in range(40 * NUM_WORKERS):
        worker = workers[number % NUM_WORKERS]
        worker.push(batch)
        worker.pull()
        means.append(numpy.array(server.parameters()["0.running_mean"]))
        counts.append(int(server.parameters()["0.num_batches_tracked"]))
    assert numpy.max(means) < 1.1 * MEAN + 1
    numpy.testing.assert_allclose(means[-1], batch.mean(0), rtol=0.05)
    assert counts == sorted(counts)
    assert counts[-1] >= 40


def test_an_older_note_does_not_replace_a_newer_one() -> None:
    server = a_module()
    store = ParameterShard(server)
    fast, slow = Stale(store), Stale(store)
    batch = numpy.ones((4, 2), "float32") * numpy.arange(4, dtype="float32")[:, None]
    slow.pull()
    for _ in range(3):
        fast.pull()
        fast.push(batch)
    slow.push(batch)
    assert int(server.parameters()["0.num_batches_tracked"]) == 3


@pytest.mark.parametrize(
    "note",
    [
        7,
        "text",
        ["0.num_batches_tracked"],
        (("0.num_batches_tracked", bytes(7)),),
        (("0.num_batches_tracked", "12345678"),),
        (("0.running_mean", bytes(8)),),
        (("nothing", bytes(8)),),
        (("0.num_batches_tracked", bytes(8), 1),),
    ],
)
def test_a_note_that_is_none(note: Any) -> None:
    """The server looks before anything is changed: half an update would be worse than none."""
    for adapter in (a_module(), Accumulate(a_module(), per_rank_batch=4)):
        store = ParameterShard(adapter)
        store.check_note(None)
        store.check_note((("0.num_batches_tracked", bytes(8)),))
        with pytest.raises(GradientError, match="no values of this module's buffers"):
            store.check_note(note)
