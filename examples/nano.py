"""Data-parallel training in one file, with mpi4py and NumPy alone: what mpitrain is built of, small enough to read.

    mpiexec -n 4 python examples/nano.py --epochs 4 --checkpoint nano.npz

1. An agreement. Before ranks exchange data, each sends a hash of what it is about to do. If hashes differ, all ranks
   raise an error. Without it, ranks that disagree wait for ever, or add up the wrong numbers.
2. A ring allreduce in place. No rank sends more than 2 (n - 1) / n of the data, whatever the number n of ranks.
3. Buckets. The backward pass computes the last layer's gradient first. It is sent while the other layers compute.
4. A mean weighted by samples, so n ranks compute what one process would, also in the smaller last batch of an epoch.
5. A checkpoint without ranks: parameters by name, and one position in the data. It loads on any number of ranks.

The package computes the same bits (tests/ranks/test_nano.py). It adds waits that say who is waited for, networks of
several speeds, GPUs, compression, recovery from failures, and more.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
from mpi4py import MPI

Arrays = dict[str, numpy.ndarray]


# 1. An agreement.
def agree(comm: MPI.Comm, call: str, number: float = 0.0) -> list[float]:
    """Return the `number` of every rank. Raise RuntimeError on every rank if the ranks make different calls."""
    digest = hashlib.blake2b(call.encode(), digest_size=8).digest()
    records = numpy.empty(comm.size, [("call", "u8"), ("number", "f8")])
    own = numpy.array([(int.from_bytes(digest, "little"), number)], records.dtype)
    comm.Allgather([own, MPI.BYTE], [records, MPI.BYTE])
    if (records["call"] != records["call"][0]).any():  # all ranks see the same records, so all come here, or none
        calls = comm.allgather(call)
        rank = next(rank for rank, other in enumerate(calls) if other != calls[0])
        raise RuntimeError(f"rank {rank}: {calls[rank]}; rank 0: {calls[0]}; all ranks must make the same calls")
    return records["number"].tolist()


# 2. A ring allreduce in place.
def part_of(length: int, rank: int, size: int) -> slice:
    """The part of `length` things that belongs to a rank: contiguous; sizes differ by one at most, the larger first."""
    share, rest = divmod(length, size)
    return slice(rank * share + min(rank, rest), (rank + 1) * share + min(rank + 1, rest))


def ring_sum(comm: MPI.Comm, flat: numpy.ndarray) -> Iterator[None]:
    """Replace `flat` by its sum over ranks. Each `next()` looks whether messages have come, and never waits.

    The array has a segment for each rank. In the first half, a segment travels once around the ring, and each rank adds
    its own values: then rank r has the whole sum of segment r. In the second half, the sums travel around the ring.
    Each segment is added up in one order and then copied, so all ranks end with the same bits.
    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009) 117-124.
    """
    rank, size = comm.rank, comm.size
    left, right = (rank - 1) % size, (rank + 1) % size
    segments = [flat[part_of(flat.size, index, size)] for index in range(size)]
    arrived = numpy.empty_like(segments[0])  # the first segment is the largest
    for first, adds in ((rank - 1, True), (rank, False)):
        for step in range(size - 1):
            leaving, target = segments[(first - step) % size], segments[(first - step - 1) % size]
            place = arrived[: target.size] if adds else target
            requests = [comm.Irecv(place, left), comm.Isend(leaving, right)]
            while not MPI.Request.Testall(requests):
                yield
            if adds:
                numpy.add(target, place, out=target)


# 3 and 4. Buckets, and a mean weighted by samples.
class Reducer:
    """Turns the gradients of the ranks into their sample-weighted mean, while the backward pass computes.

    Gradients lie in one flat buffer, of which buckets are parts. Buckets start in one order, whatever the order of the
    gradients, and are added up one after the other: messages never mix.
    """

    def __init__(self, comm: MPI.Comm, parameters: Arrays, bucket_bytes: int) -> None:
        self.comm = comm
        dtype = next(iter(parameters.values())).dtype
        self.flat = numpy.empty(sum(value.size for value in parameters.values()), dtype)
        self.gradients = views(self.flat, parameters)
        self.layout = ", ".join(f"{name} {value.dtype}{value.shape}" for name, value in parameters.items())
        # From the last parameter to the first, as a backward pass computes them; each of at least `bucket_bytes`.
        self.buckets: list[tuple[set[str], slice]] = []
        names: set[str] = set()
        begin = end = self.flat.size
        for name, value in reversed(parameters.items()):
            names.add(name)
            begin -= value.size
            if (end - begin) * dtype.itemsize >= bucket_bytes or begin == 0:
                self.buckets.append((names, slice(begin, end)))
                names, end = set(), begin

    def begin(self, num_samples: int) -> None:
        """Begin a step in which this rank has so many samples. Collective."""
        self.samples = agree(self.comm, f"a step with {self.layout}", num_samples)
        self.missing, self.started = set(self.gradients), 0
        self.flat[...] = 0.0  # what a rank without samples, or without a gradient, sends
        self.sums: deque[Iterator[None]] = deque()

    def ready(self, name: str, gradient: numpy.ndarray) -> None:
        """Take in a final gradient of the mean loss over this rank's samples, and advance what is being sent."""
        self.gradients[name][...] = gradient
        self.missing.discard(name)
        while self.started < len(self.buckets) and not self.buckets[self.started][0] & self.missing:
            self.start()
        self.drive()

    def start(self) -> None:
        """Multiply the next bucket by this rank's share of the samples, and begin to add it up over the ranks."""
        part = self.flat[self.buckets[self.started][1]]
        part *= self.samples[self.comm.rank] / sum(self.samples)
        self.sums.append(ring_sum(self.comm, part))
        self.started += 1

    def drive(self) -> bool:
        """Advance the oldest sum. Return whether all are done."""
        while self.sums:
            if next(self.sums[0], "done") is None:
                return False
            self.sums.popleft()
        return True

    def finish(self, loss: float) -> float:
        """Wait until `gradients` are the means, and return the mean loss. A rank without one is an error on all."""
        own = self.samples[self.comm.rank]
        missing = self.missing if own else set()  # a rank without samples computes nothing, and takes part all the same
        while self.started < len(self.buckets):
            self.start()
        while not self.drive():  # here the package reports who is waited for, and on which line that rank is
            pass
        problem = f"no gradient of {min(missing)}" if missing else f"a loss of {loss}"
        losses = agree(self.comm, "end of a step", numpy.nan if missing else own * loss if own else 0.0)
        if not numpy.isfinite(losses).all():
            rank = numpy.flatnonzero(~numpy.isfinite(losses))[0]
            problem = self.comm.allgather(problem)[rank]
            raise RuntimeError(f"rank {rank} has {problem}; no rank has changed its parameters")
        return sum(losses) / sum(self.samples)


def views(flat: numpy.ndarray, like: Arrays) -> Arrays:
    """Arrays of the shapes of `like`, one after the other in the memory of `flat`."""
    ends = numpy.cumsum([value.size for value in like.values()])
    return {
        name: flat[end - value.size : end].reshape(value.shape)
        for (name, value), end in zip(like.items(), ends, strict=True)
    }


# 5. A Trainer with checkpoints.
# model(parameters, x, y, ready) returns the mean loss, and calls ready(name, gradient) as soon as a gradient is final.
Model = Callable[[Arrays, numpy.ndarray, numpy.ndarray, Callable[[str, numpy.ndarray], None]], float]


class Trainer:
    """Stochastic gradient descent with momentum. Every rank has the whole data, and uses its part of every batch."""

    rate, momentum, global_batch, bucket_bytes, seed = 0.1, 0.9, 64, 64 * 1024, 0

    def __init__(self, comm: MPI.Comm, model: Model, parameters: Arrays, x: numpy.ndarray, y: numpy.ndarray) -> None:
        self.comm, self.model, self.x, self.y = comm, model, x, y
        self.reducer = Reducer(comm, parameters, self.bucket_bytes)
        self.flat = numpy.concatenate([value.ravel() for value in parameters.values()])
        comm.Bcast(self.flat)  # all replicas begin with the same bits, and every step keeps them equal
        self.parameters = views(self.flat, parameters)
        self.velocity = numpy.zeros_like(self.flat)
        velocities = views(self.velocity, parameters)
        self.state = self.parameters | {f"velocity.{name}": value for name, value in velocities.items()}
        self.epoch = self.cursor = 0  # the cursor counts the samples of all ranks in this epoch

    def step(self) -> float:
        """Train on the next global batch. Return its mean loss, the same on every rank. Collective."""
        # A permutation drawn from (seed, epoch) is the same on all ranks, and no rank has to keep it in a checkpoint.
        order = numpy.random.default_rng((self.seed, self.epoch)).permutation(len(self.x))
        batch = order[self.cursor : self.cursor + self.global_batch]
        own = batch[part_of(len(batch), self.comm.rank, self.comm.size)]
        self.reducer.begin(len(own))
        loss = self.model(self.parameters, self.x[own], self.y[own], self.reducer.ready) if len(own) else 0.0
        mean = self.reducer.finish(loss)
        self.velocity *= self.momentum
        self.velocity += self.reducer.flat
        self.flat -= self.velocity * self.rate
        self.cursor += len(batch)
        if self.cursor == len(self.x):
            self.epoch, self.cursor = self.epoch + 1, 0
        return mean

    def save(self, path: Path) -> None:
        """Write a checkpoint: whole, or not at all. Collective; rank 0 writes."""

        def write() -> None:
            with path.with_name(f"{path.name}.unfinished").open("wb") as file:
                numpy.savez(file, **self.state, position=numpy.array([self.epoch, self.cursor]))
                file.flush()
                os.fsync(file.fileno())
            Path(file.name).replace(path)  # a rename is atomic: readers see the old file or the new one

        on_root(self.comm, write)

    def load(self, path: Path) -> None:
        """Resume where a checkpoint was written, on any number of ranks. Collective; rank 0 reads."""
        position = numpy.zeros(2, numpy.int64)

        def read() -> None:
            with numpy.load(path) as file:
                for name, value in [*self.state.items(), ("position", position)]:
                    value[...] = file[name]

        on_root(self.comm, read)
        for array in (self.flat, self.velocity, position):
            self.comm.Bcast(array)
        self.epoch, self.cursor = map(int, position)


def on_root(comm: MPI.Comm, work: Callable[[], None]) -> None:
    """Let rank 0 work. Raise its error on every rank: one that continued alone would wait for ever."""
    problem = ""
    if comm.rank == 0:
        try:
            work()
        except (OSError, KeyError, ValueError) as error:
            problem = f"rank 0: {error}"
    if problem := comm.bcast(problem):
        raise RuntimeError(problem)


# An example: two spirals, which a small network learns to tell apart.
def spirals(count: int = 1000) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Points (count, 2) in float32, and the spiral, 0 or 1, on which each lies."""
    rng = numpy.random.default_rng(1)
    y = rng.integers(2, size=count)
    angle = rng.uniform(0.5, 3 * numpy.pi, count)
    x = numpy.stack([numpy.cos(angle + y * numpy.pi), numpy.sin(angle + y * numpy.pi)], axis=1) * angle[:, None] / 5
    return x.astype("float32"), y


def initial(width: int = 64) -> Arrays:
    """Parameters of a network with two hidden layers."""
    rng, parameters = numpy.random.default_rng(2), {}
    for layer, (rows, columns) in enumerate(pairwise([2, width, width, 2])):
        parameters[f"weight{layer}"] = (rng.normal(size=(rows, columns)) / numpy.sqrt(rows)).astype("float32")
        parameters[f"bias{layer}"] = numpy.zeros(columns, "float32")
    return parameters


def network(parameters: Arrays, x: numpy.ndarray, y: numpy.ndarray, ready: Callable[[str, Any], None]) -> float:
    """The mean cross-entropy over the samples. Gradients become ready from the last layer to the first."""
    depth, inputs = len(parameters) // 2, [x]
    for layer in range(depth):
        x = inputs[-1] @ parameters[f"weight{layer}"] + parameters[f"bias{layer}"]
        inputs.append(numpy.tanh(x) if layer < depth - 1 else x)
    scores = inputs.pop()
    odds = numpy.exp(scores - scores.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    loss = -numpy.log(odds[range(len(y)), y]).mean(dtype="float64")
    odds[range(len(y)), y] -= 1
    slope = odds / numpy.float32(len(y))
    for layer in reversed(range(depth)):
        ready(f"bias{layer}", slope.sum(axis=0))
        ready(f"weight{layer}", inputs[layer].T @ slope)
        if layer:
            slope = slope @ parameters[f"weight{layer}"].T * (1 - inputs[layer] ** 2)
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, help="written after each epoch; if it is there, training resumes")
    options, comm = parser.parse_args(), MPI.COMM_WORLD
    trainer = Trainer(comm, network, initial(), *spirals())
    if options.checkpoint and comm.bcast(options.checkpoint.exists()):
        trainer.load(options.checkpoint)
    while trainer.epoch < options.epochs:
        epoch, losses = trainer.epoch, []
        while trainer.epoch == epoch:
            losses.append(trainer.step())
        if comm.rank == 0:
            print(f"epoch {epoch + 1}: mean loss {numpy.mean(losses):.4f} on {comm.size} ranks", flush=True)
        if options.checkpoint:
            trainer.save(options.checkpoint)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)  # the other ranks may wait for this one
