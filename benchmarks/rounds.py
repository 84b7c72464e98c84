"""What rounds save on slow links: strategies of low-communication.md beside Sync and beside no exchange at all.

    benchmarks/shaped_hosts 4 100mbit '$MPIEXEC python benchmarks/rounds.py --mbit 100'
    benchmarks/shaped_hosts 4 100mbit '$MPIEXEC python benchmarks/rounds.py --mbit 100 --gpt --sync-every 100 \\
        --sync-steps 4 --variants sync sync+int8 diloco'

All strategies train in one job, in turns, each for one round of `--sync-every` steps, `--rounds` times; those that
exchange in every step, for `--sync-steps` of them. The model has `--millions` of float32 parameters, and a
step sleeps for `--milliseconds`. With --gpt, it is the GPT of examples/ with 10.7 million parameters, which computes on
Jane Austen's novels. The optimizer's update is real. The hosts share the cores of one machine.

    kept        samples/s, of those without any exchange in the same run
    longest     the longest step minus the median step without any exchange, on the slowest rank
    bound       least seconds for what a round sends at the nominal rate: 2 (p-1)/p of its bytes; for a codec whose sums
                are gathered, and for sparse_loco, p-1 times its bytes
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy

import mpitrain as mt
from mpitrain.compression import factory_of
from mpitrain.forecast.rounds import versions_line
from mpitrain.reducer.exchange import make_exchange
from mpitrain.strategies import Strategy

LAYERS, BATCH, GPT_BATCH = 8, 32, 4


def model(millions: float, seconds: float) -> mt.ArrayFunction:
    """Layers whose gradients come one after the other, after their part of the time."""
    count = int(millions * 1e6) // LAYERS
    gradients = {f"layer{i}": numpy.full(count, 1e-3, numpy.float32) for i in range(LAYERS)}

    def function(_: object, __: object, on_gradient: Callable[[str, numpy.ndarray], None]) -> float:
        time.sleep(seconds / 3)
        for name in reversed(gradients):
            time.sleep(seconds * 2 / 3 / LAYERS)
            on_gradient(name, gradients[name])
        return 0.0

    return mt.ArrayFunction(
        function, {name: numpy.zeros_like(one) for name, one in gradients.items()}, mt.optim.SGD(1e-3)
    )


def gpt_model(rank: int) -> tuple[mt.ArrayFunction, tuple[numpy.ndarray, numpy.ndarray]]:
    """The GPT of examples/, grown, and a batch of its text for this rank."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from datasets import load_text
    from models import gpt

    text, _, vocabulary = load_text("austen")
    rng = numpy.random.default_rng(0)
    parameters = gpt.initial(rng, numpy, vocabulary=len(vocabulary), width=384, heads=6, layers=6)
    begin = 64 * GPT_BATCH * rank
    x, y = (text[begin + shift :][: 64 * GPT_BATCH].reshape(GPT_BATCH, 64) for shift in (0, 1))
    return mt.ArrayFunction(gpt.loss_and_gradients, parameters, mt.optim.AdamW(1e-4)), (x, y)


def variants(every: int, fragments: int, delay: int) -> dict[str, tuple[Callable[[], Strategy], float, str]]:
    """By name: what makes the strategy, how often a round sends all parameters, and the codec."""

    def coded(world: mt.World) -> object:
        return make_exchange(world, compression="int8")

    def streaming(exchange: Callable[[mt.World], object]) -> Strategy:
        return mt.StreamingDiLoCo(every, fragments=fragments, delay=delay, exchange=exchange)

    return {
        "no exchange": (lambda: mt.LocalSGD(10**9), 0, "none"),
        "sync": (mt.Sync, every, "none"),
        "sync+int8": (lambda: mt.Sync(coded), every, "int8"),
        "local_sgd": (lambda: mt.LocalSGD(every), 1, "none"),
        "diloco": (lambda: mt.DiLoCo(every), 1, "none"),
        "diloco+int8": (lambda: mt.DiLoCo(every, exchange=coded), 1, "int8"),
        "sparse_loco": (lambda: mt.SparseLoCo(every), 1, f"top_k:{1 / 64}:2"),
        "streaming_diloco": (lambda: streaming(make_exchange), 1, "none"),
        "streaming_diloco+int8": (lambda: streaming(coded), 1, "int8"),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=2.5)
    parser.add_argument("--milliseconds", type=float, default=100.0)
    parser.add_argument("--gpt", action="store_true")
    parser.add_argument("--sync-every", type=int, default=50)
    parser.add_argument("--sync-steps", type=int, help="default: as many as --sync-every")
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--delay", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--variants", nargs="*", help="only these")
    options = parser.parse_args()
    world = mt.init()
    every = options.sync_every
    made = {}
    batch, length = None, {}
    for name, (make, times, codec) in variants(every, options.fragments, options.delay).items():
        if not options.variants or name in options.variants or name == "no exchange":
            strategy = make()
            if options.gpt:
                adapter, batch = gpt_model(world.rank)
            else:
                adapter = model(options.millions, options.milliseconds / 1000)
            strategy.begin(world, adapter)
            length[name] = every if times <= 1 else options.sync_steps or every
            count = sum(math.prod(entry.shape) for entry in adapter.layout)
            coder = None if codec == "none" else factory_of(codec)(False)
            nbytes = times * (coder.wire_bytes(count) if coder else 4 * count)
            sent = (world.size - 1) * (1 if coder and coder.gathered else 2 / world.size) * nbytes
            made[name] = strategy, adapter, sent * 8 / options.mbit / 1e6
    seconds: dict[str, list[float]] = {name: [] for name in made}
    steps: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.rounds):
        for name, (strategy, adapter, _) in made.items():
            world.barrier()
            began = time.perf_counter()
            for _ in range(length[name]):
                step_began = time.perf_counter()
                strategy.begin_step(BATCH)
                loss = adapter.loss_and_gradients(batch, strategy.on_gradient)
                strategy.finish_step(adapter, loss)
                steps[name].append(max(world.allgather(time.perf_counter() - step_began)))
            seconds[name].append(max(world.allgather(time.perf_counter() - began)) * every / length[name])
    plain = statistics.median(seconds["no exchange"])
    usual = statistics.median(steps["no exchange"])
    world.print(versions_line())
    world.print(
        f"{world.size} ranks, {world.num_nodes} nodes, {options.mbit:.0f} Mbit/s, {count / 1e6:.1f} million "
        f"parameters, steps of {usual * 1000:.0f} ms, rounds of {every} steps; {options.fragments} fragments, "
        f"delay {options.delay}"
    )
    world.print("| strategy | a round: median (lowest to highest) | kept | longest | bound |")
    world.print("| --- | --- | --- | --- | --- |")
    for name, taken in seconds.items():
        longest = (
            statistics.median(
                max(steps[name][n * length[name] : (n + 1) * length[name]]) for n in range(options.rounds)
            )
            - usual
        )
        row = f"{statistics.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f})"
        kept = plain / statistics.median(taken)
        world.print(f"| {name} | {row} | {kept:.1%} | {longest * 1000:.0f} ms | {made[name][2]:.2f} s |")


if __name__ == "__main__":
    main()
