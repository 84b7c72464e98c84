"""What does it cost in loss to send less? Plain data parallelism beside gradient compression and local updates.

    python benchmarks/low_communication.py --results runs.jsonl --rows plain "one worker" int8 "diloco:50"
    python benchmarks/low_communication.py --results runs.jsonl --table

A row is `plain`, `one worker`, the name of a compression, or a strategy with its `sync_every`, such as `local_sgd:50`,
`diloco:50`, `streaming:50` and `sparse_loco:30`. Settings may follow: `"diloco:50 rate=0.4 momentum=0.8 warm_up=500"`.

The model is the decoder of losses.py on Jane Austen's novels (public domain; scripts/get-data austen), by PyTorch. All
rows of a seed have the same samples, initial parameters, learning rates and number of steps. A worker of local updates
takes the batch that it takes in data parallelism, so all rows but `one worker` see the same tokens.

The workers are threads of one process, of which one runs at a time. Each has the strategy, reducer and optimizer of the
package, in a World of one rank. Only the messages are not MPI's: `Mailbox` passes them between the threads, and the
allreduce steps of the package add and code them. `plain` is one rank with the whole batch. A run is a line of the
results, and continues from a file beside them if it was interrupted. --table compares each row with `plain`, seed by
seed; losses.py says what the interval is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from losses import interval
from mpi4py import MPI
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention

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

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from datasets import load_text
from models import gpt

WORKERS = 4


class Turns:
    """Lets one of several threads run at a time, in the order of their numbers."""

    def __init__(self, count: int) -> None:
        self._running, self._now, self._changed = list(range(count)), 0, threading.Condition()
        self.problem: BaseException | None = None

    def wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._now == number or self.problem)
        if self.problem:
            raise SystemExit

    def pass_on(self, number: int, *, is_last: bool = False) -> None:
        with self._changed:
            after = [one for one in self._running if one > number] or self._running
            self._now = after[0]
            if is_last:
                self._running.remove(number)
            self._changed.notify_all()
        if not is_last:
            self.wait(number)


class Mailbox:
    """The two calls of a communicator that allreduce steps make, between threads. A message is copied when sent."""

    def __init__(self, letters: dict[tuple[int, int, int], deque[bytes]], number: int) -> None:
        self._letters, self._number = letters, number

    def Isend(self, values: numpy.ndarray, to: int, tag: int) -> Any:
        self._letters[self._number, to, tag].append(values.tobytes())
        return SimpleNamespace(Test=lambda: True)

    def Irecv(self, into: numpy.ndarray, source: int, tag: int) -> Any:
        letters, missing = self._letters[source, self._number, tag], [into]

        def test() -> bool:
            if missing and letters:
                missing.pop().view(numpy.uint8)[...] = numpy.frombuffer(letters.popleft(), numpy.uint8)
            return not missing

        return SimpleNamespace(Test=test)


class Room:
    """What the workers of a run share."""

    def __init__(self, workers: int) -> None:
        self.workers, self.turns = workers, Turns(workers)
        self.letters: list[Any] = []  # of each exchange, in the order made
        self.made = [0] * workers
        self.works: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)
        self.steps_done = [0] * workers

    def letters_of(self, worker: int) -> tuple[int, dict[Any, Any]]:
        """Return the number of this worker's next exchange, and its messages."""
        number = self.made[worker]
        self.made[worker] += 1
        if number == len(self.letters):
            self.letters.append(defaultdict(deque))
        return number, self.letters[number]

    def meet(self, worker: int) -> None:
        """Wait until all workers have made as many steps."""
        self.steps_done[worker] += 1
        while min(self.steps_done) < self.steps_done[worker]:
            self.turns.pass_on(worker)


class Joined:
    """An Exchange between the workers of a room; each has its own, in a World of one rank."""

    may_overflow, division = False, ""

    def __init__(self, world: mt.World, room: Room, worker: int, codec: str, decay: float = 1.0) -> None:
        self._world, self._room, self._worker, self._codec, self._decay = world, room, worker, codec, decay
        self._number, letters = room.letters_of(worker)
        self._calls = 0
        group = Group(Mailbox(letters, worker), tuple(range(room.workers)), worker)
        self._is_low_rank = codec.startswith("power_sgd")
        if codec == "none":
            self._steps: Any = direct_steps(group)
        elif self._is_low_rank:
            together: Any = SimpleNamespace(size=room.workers, print=world.print)
            self._steps = low_rank_steps(together, direct_steps(group), Products(can_compile()))
        else:
            coder = make_codec(codec)
            self._steps = (gathered_steps if coder.gathered else direct_steps)(group, coder)

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False, tensors: Tensors = ()) -> Slot:
        self._tensors = tensors
        return Slot(numpy.zeros(count, dtype), numpy.zeros(count, numpy.float32), factors={})

    def mean(self, slot: Slot, part: slice, share: float) -> AllreduceHandle:
        flat, residual = slot.flat[part], slot.residual[part]  # type: ignore[index]
        scale(flat, share / self._room.workers)
        slot.fade(part, self._decay)
        if self._is_low_rank:
            assert flat.size == slot.flat.size  # one bucket
            work = self._steps(flat, residual, plan(self._tensors, rank_of(self._codec)), slot.factors)
        else:
            work = self._steps(flat, residual)
        self._calls += 1
        return AllreduceHandle(self._world, self._codec, flat, self._jointly(work, (self._number, self._calls)))

    def _jointly(self, work: Iterator[Any], key: tuple[int, int]) -> Iterator[None]:
        """Let the worker that comes last do the work of all."""
        works = self._room.works[key]
        works.append(work)
        while len(works) < self._room.workers:
            self._room.turns.pass_on(self._worker)
        active = self._room.works.pop(key, [])
        while active:
            active = [one for one in active if next(one, works) is not works]
        yield from ()

    def reset(self) -> None:
        """Nothing is forgotten in these runs."""


def strategy_of(row: str, room: Room, worker: int) -> Strategy:
    """Return the strategy of a row, for one of the workers."""
    name, *settings = row.split()
    kind, _, every = name.partition(":")
    given = {key: float(value) for key, _, value in (one.partition("=") for one in settings)}

    def whole(key: str, default: int) -> int:
        return int(given.pop(key, default))

    def joined(codec: str = "none", decay: float = 1.0) -> Callable[[mt.World], Joined]:
        return partial(Joined, room=room, worker=worker, codec=codec, decay=decay)

    if kind in ("plain", "one") or kind not in ("local_sgd", "diloco", "streaming", "sparse_loco"):
        return mt.Sync(joined("none" if kind in ("plain", "one") else name))
    outer = mt.optim.SGD(1.0)  # an outer step of LocalSGD
    if kind in ("diloco", "streaming"):
        momentum = given.pop("momentum", 0.9)
        outer = mt.optim.SGD(given.pop("rate", 0.7), momentum=momentum, nesterov=momentum > 0)
    if kind == "streaming":
        delay = whole("delay", 1)
        more: dict[str, Any] = {"fragments": whole("fragments", 4), "delay": delay}
        more["alpha"] = given.pop("alpha", 0.5)
    else:
        more = {}
    codec, decay = "none", 1.0
    if kind == "sparse_loco":
        codec, decay = f"top_k:{given.pop('density', 1 / 64)}:{whole('bits', 2)}", given.pop("decay", 0.95)
    bits = whole("int", 0)
    made = LocalUpdates(
        int(every),
        warm_up=whole("warm_up", 0),
        exchange=joined(f"int{bits}" if bits else codec, decay),
        outer=outer,
        **more,
    )
    assert not given, f"{row}: unknown settings {', '.join(given)}"
    return made


def losses_of(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, heads: int) -> torch.Tensor:
    """The mean loss of each worker: parameters[name][worker], x[worker, sample, time]. The model of examples/models/gpt.py."""
    workers, n, time_, width = *x.shape, parameters["norm.scale"].shape[-1]

    def norm(h: torch.Tensor, name: str) -> torch.Tensor:
        normal = layer_norm(h, (width,), eps=1e-5)
        return normal * parameters[f"{name}.scale"][:, None] + parameters[f"{name}.bias"][:, None]

    def dense(h: torch.Tensor, name: str) -> torch.Tensor:
        weight = parameters[f"{name}.weight"].reshape(workers, h.shape[-1], -1)
        return torch.baddbmm(parameters[f"{name}.bias"][:, None], h, weight)

    table = parameters["embedding.token"]
    tokens = torch.stack([table[worker][x[worker].flatten()] for worker in range(workers)])
    stream = (tokens.reshape(workers, n, time_, width) + parameters["embedding.position"][:, None, :time_]).flatten(
        1, 2
    )
    layer = 0
    while f"block{layer}.norm1.scale" in parameters:
        block = f"block{layer}."
        qkv = dense(norm(stream, f"{block}norm1"), f"{block}attention.qkv")
        q, k, v = qkv.reshape(workers * n, time_, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        stream = stream + dense(mixed.reshape(workers, n * time_, width), f"{block}attention.out")
        up = gelu(dense(norm(stream, f"{block}norm2"), f"{block}mlp.up"), approximate="tanh")
        stream = stream + dense(up, f"{block}mlp.down")
        layer += 1
    logits = torch.bmm(norm(stream, "norm"), table.transpose(1, 2))
    return cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").reshape(workers, -1).mean(1)


class Models:
    """The models of the workers, whose gradients are computed at once: the first worker of a step computes all."""

    def __init__(self, options: argparse.Namespace, workers: int, batch: int) -> None:
        self._tokens, validation, vocabulary = load_text("austen")
        self._options, self._shape = options, (workers, batch, options.context)
        self._step = -1
        sizes = {"context": options.context, "width": options.width, "heads": options.heads, "layers": options.layers}
        rng = numpy.random.default_rng(options.seed)
        initial = gpt.initial(rng, numpy, vocabulary=len(vocabulary), **sizes)
        rate = mt.optim.warmup_cosine(options.rate, warmup_steps=options.steps // 10, total_steps=options.steps)
        self.adapters = [
            mt.ArrayFunction(
                partial(self._of_worker, worker),
                initial,
                mt.optim.AdamW(rate, betas=(0.9, 0.99), weight_decay=0.1, clip_norm=1.0),
            )
            for worker in range(workers)
        ]
        places = numpy.linspace(0, len(validation) - options.context - 2, 1000).astype(int)
        self._held_out = self._at(validation, places)

    def _at(self, tokens: numpy.ndarray, places: numpy.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(tokens[places[:, None] + numpy.arange(self._options.context + 1)])
        return rows[:, :-1], rows[:, 1:]

    def _of_worker(self, worker: int, _: Any, step: int, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
        if step != self._step:
            self._step, (workers, batch, context) = step, self._shape
            rng = numpy.random.default_rng([self._options.seed, step])
            places = rng.integers(0, len(self._tokens) - context - 1, WORKERS * self._options.batch)[: workers * batch]
            x, y = (part.reshape(self._shape) for part in self._at(self._tokens, places))
            every = [adapter.parameters() for adapter in self.adapters]
            stacked = {name: torch.from_numpy(numpy.stack([one[name] for one in every])) for name in every[0]}
            for tensor in stacked.values():
                tensor.requires_grad_()
            self._losses = losses_of(stacked, x, y, self._options.heads)
            gradients = torch.autograd.grad(self._losses.sum(), list(stacked.values()))
            self._gradients = {name: one.numpy() for name, one in zip(stacked, gradients, strict=True)}
        for name in reversed(self._gradients):
            on_gradient(name, self._gradients[name][worker])
        return float(self._losses[worker].detach())

    def validation_loss(self) -> float:
        """Of the first worker."""
        with torch.no_grad():
            stacked = {name: torch.from_numpy(one[None]) for name, one in self.adapters[0].parameters().items()}
            return float(losses_of(stacked, *(part[None] for part in self._held_out), self._options.heads).mean())


def train(options: argparse.Namespace, row: str, state: Path) -> dict[str, Any]:
    """Train a row, from the saved state if there is one. Return what is known of it."""
    workers = 1 if row.split()[0] in ("plain", "one") else WORKERS
    room = Room(workers)
    models = Models(options, workers, options.batch * (WORKERS if row.startswith("plain") else 1))
    losses: list[float] = []
    tested: dict[int, float] = {}
    before = pickle.loads(state.read_bytes()) if state.exists() else None
    if before:
        losses, tested = before["losses"], before["tested"]
    saved: list[Any] = [None] * workers
    first = len(losses)

    def work(worker: int) -> None:
        adapter, strategy = models.adapters[worker], strategy_of(row, room, worker)
        strategy.begin(make_world(MPI.COMM_SELF), adapter)
        if before:
            adapter_state, shared, own = before["workers"][worker]
            adapter.restore(adapter_state)
            strategy.restore(shared)
            strategy.restore_own(own)
        for step in range(first, options.steps):
            strategy.begin_step(options.batch)
            loss = adapter.loss_and_gradients(step, strategy.on_gradient)
            strategy.finish_step(adapter, loss)
            if worker == 0:
                losses.append(0.0)
            room.meet(worker)
            losses[step] += loss / workers
            if (step + 1) % options.save == 0:
                own = strategy.own_state()
                saved[worker] = pickle.dumps((adapter.state(), strategy.state(), own))
                room.meet(worker)
                if worker == 0:
                    tested[step + 1] = models.validation_loss()
                    print(
                        f"# {row}: step {step + 1}, loss {numpy.mean(losses[-options.save :]):.4f}, held out {tested[step + 1]:.4f}",
                        flush=True,
                    )
                    content = {"losses": losses, "tested": tested, "workers": [pickle.loads(one) for one in saved]}
                    state.with_suffix(".new").write_bytes(pickle.dumps(content))
                    state.with_suffix(".new").rename(state)
        strategy.end_run()

    def in_turn(worker: int) -> None:
        try:
            room.turns.wait(worker)
            work(worker)
            room.turns.pass_on(worker, is_last=True)
        except BaseException as error:
            room.turns.problem = room.turns.problem or error
            room.turns.pass_on(worker, is_last=True)
            raise

    threads = [threading.Thread(target=in_turn, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if room.turns.problem:
        raise room.turns.problem
    tested[options.steps] = models.validation_loss()
    return {"losses": losses, "tested": tested}


_KEY = ("steps", "width", "layers", "heads", "context", "batch", "rate", "seed", "row")


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Compare the rows of equal settings with `plain`."""
    lines = [
        "| row | seeds | training loss, last tenth | validation loss | difference from plain |",
        "| --- " * 5 + "|",
    ]
    for row in dict.fromkeys(run["row"] for run in runs):
        its = {run["seed"]: run for run in runs if run["row"] == row}
        plain = {run["seed"]: run for run in runs if run["row"] == "plain"}
        last = [float(numpy.mean(run["losses"][-len(run["losses"]) // 10 :])) for run in its.values()]
        found = {seed: list(run["tested"].values())[-1] for seed, run in its.items()}
        apart = [value - list(plain[seed]["tested"].values())[-1] for seed, value in found.items() if seed in plain]
        mean, half = interval(apart) if apart else (math.nan, math.nan)
        text = f"{mean:+.4f}" + (f" ± {half:.4f}" if math.isfinite(half) else "")
        lines.append(
            f"| {row} | {len(its)} | {numpy.mean(last):.4f} | {numpy.mean(list(found.values())):.4f} | {text} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=["plain", "one worker", "diloco:50", "int8"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--results", type=Path, required=True, help="a file of JSON lines: runs in it are not repeated")
    parser.add_argument("--table", action="store_true", help="train nothing; print what is in the file")
    for name, value in (("steps", 3000), ("width", 96), ("layers", 2), ("heads", 4), ("context", 32), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=4e-3, help="of AdamW, the highest one")
    parser.add_argument("--save", type=int, default=250, help="steps")
    options = parser.parse_args()
    text = options.results.read_text() if options.results.exists() else ""
    runs = [json.loads(line) for line in text.splitlines()]
    if options.table:
        kinds = {tuple(run[name] for name in _KEY[:-2]) for run in runs}
        for kind in sorted(kinds):
            print(", ".join(f"{name} {value}" for name, value in zip(_KEY, kind, strict=False)), end="\n\n")
            print(table([run for run in runs if tuple(run[name] for name in _KEY[:-2]) == kind]), end="\n\n")
        return
    torch.set_num_threads(1)
    mt.init()
    for options.seed in options.seeds:
        for options.row in options.rows:
            key = {name: getattr(options, name) for name in _KEY}
            if any(all(run[name] == value for name, value in key.items()) for run in runs):
                continue
            state = options.results.with_name(
                "_".join(str(value).replace(" ", "-") for value in key.values()) + ".state"
            )
            began, used = time.monotonic(), time.process_time()
            found = train(options, options.row, state)
            taken = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - used}
            with options.results.open("a") as file:
                file.write(json.dumps({**key, **found, **taken, "load": os.getloadavg()[0]}) + "\n")
            state.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
