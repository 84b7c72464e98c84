"""What does it cost in loss to send less? Plain data parallelism beside gradient compression and local updates.

    python benchmarks/low_communication.py --results runs.jsonl --rows plain one_worker int8 diloco:50
    python benchmarks/low_communication.py --results runs.jsonl --table

A row is `plain`, `one_worker`, the name of a compression, or a strategy with its `sync_every`: `local_sgd:50`,
`diloco:50`, `streaming_diloco:50`, `sparse_loco:30`. Settings may follow: `"diloco:50 rate=0.4 momentum=0.8 int=4"`.

stacked_gpt.py has the model and the text. All rows of a seed have the same initial parameters, learning rates, number
of steps and samples. A worker of local updates takes the batch that it takes in data parallelism, so all rows but
`one_worker` see the same tokens.

The workers are threads of one process, and one runs at a time. Each has a strategy, reducer and optimizer of the
package in a World of one rank. The exchange is `Joined`: the allreduce steps of the package add and code what all
workers send, over a `Mailbox` in place of MPI. `plain` is one rank with the whole batch.

A run is a line of the results, which is not made again. An interrupted run continues from a file beside them. The table
has the loss of 16,000 held-out characters in nats, and the mean of the differences from `plain` with the same seed,
with its interval of 95 % by Student's t.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from mpi4py import MPI

import mpitrain as mt
from mpitrain.allreduce.algorithm import AllreduceHandle
from mpitrain.allreduce.compressed import gathered_steps
from mpitrain.allreduce.direct import direct_steps
from mpitrain.allreduce.group import Group
from mpitrain.allreduce.low_rank import low_rank_steps
from mpitrain.collectives.shares import scale
from mpitrain.compression import make_codec
from mpitrain.compression.kernels import can_compile
from mpitrain.compression.power_sgd import Products, plan, rank_of
from mpitrain.job.worlds import make_world
from mpitrain.reducer.slot import Slot, Tensors
from mpitrain.strategies import Strategy
from mpitrain.strategies.local_updates import LocalUpdates
from stacked_gpt import StackedGpt

WORKERS = 4
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # by the number of seeds
KEY = ("steps", "width", "layers", "heads", "context", "batch", "rate", "seed", "row")


class Room:
    """What the workers share. Whoever holds the lock runs; `wait_for` lets others run until something is so."""

    def __init__(self, workers: int) -> None:
        self.workers, self.lock = workers, threading.Condition()
        self.letters: defaultdict[Any, deque[bytes]] = defaultdict(deque)
        self.works: defaultdict[Any, list[Iterator[Any]]] = defaultdict(list)
        self.exchanges, self.steps = [0] * workers, [0] * workers
        self.first = 0  # the steps made before an interruption
        self.problem: BaseException | None = None

    def wait_for(self, is_so: Any) -> None:
        self.lock.notify_all()
        self.lock.wait_for(lambda: is_so() or self.problem)
        if self.problem:
            raise SystemExit

    def meet(self, worker: int) -> None:
        """Wait until all workers have come here as often."""
        self.steps[worker] += 1
        mine = self.steps[worker]
        self.wait_for(lambda: min(self.steps) >= mine)


class Mailbox:
    """The two calls of a communicator that allreduce steps make. A message is copied when it is sent."""

    def __init__(self, room: Room, exchange: int, worker: int) -> None:
        self._letters, self._exchange, self._worker = room.letters, exchange, worker

    def Isend(self, values: numpy.ndarray, to: int, tag: int) -> Any:  # noqa: N802
        self._letters[self._exchange, self._worker, to, tag].append(values.tobytes())
        return SimpleNamespace(Test=lambda: True)

    def Irecv(self, into: numpy.ndarray, source: int, tag: int) -> Any:  # noqa: N802
        letters, missing = self._letters[self._exchange, source, self._worker, tag], [into]

        def test() -> bool:
            if missing and letters:
                missing.pop().view(numpy.uint8)[...] = numpy.frombuffer(letters.popleft(), numpy.uint8)
            return not missing

        return SimpleNamespace(Test=test)


class Joined:
    """An Exchange between the workers of a room."""

    may_overflow, division = False, ""

    def __init__(
        self, world: mt.World, room: Room, worker: int, codec: str = "none", decay: float = 1.0, warm_up: int = 0
    ) -> None:
        """`warm_up`: as of mt.Sync, which makes an exchange over MPI for these steps."""
        self._world, self._room, self._codec, self._decay, self._warm_up = world, room, codec, decay, warm_up
        self._number, self._calls = room.exchanges[worker], 0
        room.exchanges[worker] += 1
        group = Group(Mailbox(room, self._number, worker), tuple(range(room.workers)), worker)
        self._plain: Any = direct_steps(group)
        self._is_low_rank = codec.startswith("power_sgd")
        if self._is_low_rank:
            together: Any = SimpleNamespace(size=room.workers, print=world.print)
            self._steps: Any = low_rank_steps(together, self._plain, Products(can_compile()))
        else:
            coder = None if codec == "none" else make_codec(codec)
            self._steps = gathered_steps(group, coder) if coder and coder.gathered else direct_steps(group, coder)

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False, tensors: Tensors = ()) -> Slot:
        self._tensors = tensors
        return Slot(numpy.zeros(count, dtype), numpy.zeros(count, numpy.float32), factors={})

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        assert part.indices(slot.flat.size)[:2] == (0, slot.flat.size), "these models have one bucket"
        scale(slot.flat, share / self._room.workers)
        slot.fade(part, self._decay)
        self._calls += 1
        if self._calls <= self._warm_up:
            work = self._plain(slot.flat)
        elif self._is_low_rank:
            work = self._steps(slot.flat, slot.residual, plan(self._tensors, rank_of(self._codec)), slot.factors)
        else:
            work = self._steps(slot.flat, slot.residual)
        work = self._jointly(work, (self._number, self._calls))
        return AllreduceHandle(self._world, self._codec, slot.flat, work)

    def _jointly(self, work: Iterator[Any], key: tuple[int, int]) -> Iterator[None]:
        """The worker that comes last does the work of all."""
        works = self._room.works[key]
        works.append(work)
        if len(works) < self._room.workers:
            self._room.wait_for(lambda: key not in self._room.works)
        while works:
            works[:] = [one for one in works if next(one, self) is not self]
        self._room.works.pop(key, None)
        yield from ()

    def reset(self) -> None:
        """See Exchange. Nothing asks for it here."""


def strategy_of(row: str, room: Room, worker: int) -> Strategy:
    name, *settings = row.split()
    kind, _, every = name.partition(":")
    given = {key: float(value) for key, _, value in (one.partition("=") for one in settings)}
    joined = partial(partial, Joined, room=room, worker=worker)
    if kind not in ("local_sgd", "diloco", "streaming_diloco", "sparse_loco"):
        codec = "none" if kind in ("plain", "one_worker") else name
        return mt.Sync(joined(codec=codec, warm_up=int(given.pop("warm_up", 0)) - room.first))
    outer, more, codec, decay = mt.optim.SGD(1.0), {}, "none", 1.0  # an outer SGD(1.0) is LocalSGD
    if "diloco" in kind:
        momentum = given.pop("momentum", 0.9)
        outer = mt.optim.SGD(given.pop("rate", 0.7), momentum=momentum, nesterov=momentum > 0)
    if kind == "streaming_diloco":
        more = {
            "fragments": int(given.pop("fragments", 4)),
            "delay": int(given.pop("delay", 1)),
            "alpha": given.pop("alpha", 0.0),
        }
    if kind == "sparse_loco":
        codec, decay = f"top_k:{given.pop('density', 1 / 64)}:{int(given.pop('bits', 2))}", given.pop("decay", 0.95)
    if "int" in given:
        codec = f"int{int(given.pop('int'))}"
    warm_up = int(given.pop("warm_up", 0))
    assert not given, f"{row}: there is no setting {', '.join(given)}"
    return LocalUpdates(int(every), warm_up=warm_up, exchange=joined(codec=codec, decay=decay), outer=outer, **more)


def train(options: argparse.Namespace, row: str, state: Path) -> dict[str, Any]:
    """Return the loss of each step, the mean of the workers; and by step, the loss of held-out text."""
    room = Room(1 if row in ("plain", "one_worker") else WORKERS)
    models = StackedGpt(options, room.workers, WORKERS * options.batch // (1 if row == "plain" else WORKERS))
    losses, tested, saved = pickle.loads(state.read_bytes()) if state.exists() else (numpy.zeros(options.steps), {}, {})
    room.first = first = max(tested, default=0)

    def work(worker: int) -> None:
        adapter, strategy = models.adapters[worker], strategy_of(row, room, worker)
        strategy.begin(make_world(MPI.COMM_SELF), adapter)
        if first:
            own, shared, model = pickle.loads(saved[worker])
            adapter.restore(model)
            strategy.restore(shared)
            strategy.restore_own(own)
        for step in range(first, options.steps):
            strategy.begin_step(options.batch)
            loss = adapter.loss_and_gradients(step, strategy.on_gradient)
            strategy.finish_step(adapter, loss)
            losses[step] += loss / room.workers
            room.meet(worker)
            if (step + 1) % options.save == 0 and step + 1 < options.steps:
                saved[worker] = pickle.dumps((strategy.own_state(), strategy.state(), adapter.state()))
                room.meet(worker)
                if worker == 0:
                    tested[step + 1] = models.held_out_loss()
                    state.with_suffix(".new").write_bytes(pickle.dumps((losses, tested, saved)))
                    state.with_suffix(".new").rename(state)
                    print(f"# {row}: held-out loss after step {step + 1}: {tested[step + 1]:.4f}", flush=True)
                room.meet(worker)
        strategy.end_run()

    def thread(worker: int) -> None:
        with room.lock:
            try:
                work(worker)
            except BaseException as error:
                room.problem = room.problem or error
                raise
            finally:
                room.lock.notify_all()

    threads = [threading.Thread(target=thread, args=(worker,)) for worker in range(room.workers)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if room.problem:
        raise room.problem
    tested[options.steps] = models.held_out_loss()
    return {"losses": losses.round(5).tolist(), "tested": tested}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Rows of equal settings; each is compared with `plain`."""
    lines = ["| row | seeds | training loss, last tenth | held-out loss | difference |", "| --- " * 5 + "|"]
    found = {(run["row"], run["seed"]): list(run["tested"].values())[-1] for run in runs}
    for row in dict.fromkeys(run["row"] for run in runs):
        last = [statistics.fmean(run["losses"][-run["steps"] // 10 :]) for run in runs if run["row"] == row]
        its = {seed: value for (of_row, seed), value in found.items() if of_row == row}
        apart = [value - found["plain", seed] for seed, value in its.items() if ("plain", seed) in found]
        text = f"{statistics.fmean(apart):+.4f}" if apart else ""
        if len(apart) > 1:
            text += f" ± {T95[len(apart)] * statistics.stdev(apart) / len(apart) ** 0.5:.4f}"
        lines.append(
            f"| {row} | {len(its)} | {statistics.fmean(last):.4f} | {statistics.fmean(its.values()):.4f} | {text} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="a file of JSON lines")
    parser.add_argument("--rows", nargs="*", default=["plain", "one_worker", "int8", "diloco:50"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--table", action="store_true", help="train nothing; print what is in the file")
    for name, value in (("steps", 3000), ("width", 128), ("layers", 2), ("heads", 4), ("context", 64), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=4e-3, help="the highest of AdamW")
    parser.add_argument("--save", type=int, default=500, help="after so many steps each")
    options = parser.parse_args()
    runs = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    if options.table:
        for kind in dict.fromkeys(tuple(run[name] for name in KEY[:-2]) for run in runs):
            print(", ".join(f"{name} {value}" for name, value in zip(KEY, kind, strict=False)))
            print(f"\n{table([run for run in runs if tuple(run[name] for name in KEY[:-2]) == kind])}\n")
        return
    torch.set_num_threads(1)
    mt.init()
    for seed, row in ((seed, row) for seed in options.seeds for row in options.rows):
        options.seed, options.row = seed, row
        key = {name: getattr(options, name) for name in KEY}
        if any(all(run[name] == value for name, value in key.items()) for run in runs):
            continue
        state = options.results.with_name("-".join(str(value) for value in key.values()).replace(" ", "-") + ".state")
        began = time.process_time()
        run = {**key, **train(options, row, state)}
        run |= {"cpu_seconds": round(time.process_time() - began, 1), "load": os.getloadavg()[0]}
        with options.results.open("a") as file:
            file.write(json.dumps(run) + "\n")
        state.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
