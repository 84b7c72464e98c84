"""A training step with 25 million parameters between hosts: how much of the exchange hides behind the backward pass?

    benchmarks/shaped_hosts 4 1gbit '$MPIEXEC python benchmarks/training_step.py --gbit 1'

The gradients are those of an MLP of equal layers, float32, normally distributed, and different on each rank and in each
of three steps in turn. mpitrain's GradientReducer with and without compression
stands against PyTorch's DistributedDataParallel over gloo (without PyTorch: --variants none bf16 int8), with the same
layers, the same gradients and the same computation, all in one set of processes, in turns; neither updates parameters.

A layer's computation is a sleep, a third of it in the forward pass: the hosts of shaped_hosts share the cores of one
machine, and their ranks would take them from each other where real hosts have their own. What the exchange itself
computes (copies, sums, codecs, sockets) is real, and all hosts of the bed share the cores for it. `--multiply` computes
matrix products for about that long instead.

    alone       the step with no computation
    exposed     step - compute, of the slowest rank
    wire        rank 0's own report: while at least one bucket was under way; in brackets over the bound, the time of
                the bytes that a rank sends with this variant, at the nominal rate
    hidden      of what can be hidden: (W - exposed) / (W - least). W is 1.045 of the bound, the best that TCP does;
                `least` is the wait that is left when every bucket starts as soon as it is full and the one before has
                arrived: the last one is full when the backward pass ends, so it cannot be hidden, nor what a short
                backward pass leaves no time for. So a wire that is not at its best counts as not hidden
    report      rank 0's own report: 1 - exposed / wire
    of bound    (compute + least) / step: the step that the bytes allow over the one that was measured
    cores       CPU seconds per second of a rank; in brackets, of a step
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy

import mpitrain as mt
from mpitrain.compression import factory_of, power_sgd
from mpitrain.forecast.rounds import Variant, measure, ratio, spread, versions_line
from mpitrain.reducer.exchange import make_exchange
from mpitrain.reducer.means import Overlap

FORWARD = 1 / 3  # of the computation
STEPS_IN_TURN = 3
TCP = 1.045  # of the bound is what TCP's headers allow
# A step, given what computes the forward and the backward pass of one layer.
Compute = tuple[Callable[[], object], Callable[[], object]]
Step = Callable[[Compute], None]


def sent_bytes(name: str, layers: int, width: int, ranks: int) -> float:
    """The bytes that each rank sends in a step, without headers, with that compression."""
    count = layers * (width * width + width)
    twice = 2 * (ranks - 1) / ranks
    if name == "none":
        return twice * 4 * count
    if name.startswith(power_sgd.NAME):
        made = power_sgd.plan([("weight", (width, width)), ("bias", (width,))], power_sgd.rank_of(name))
        return twice * 4 * layers * (made.num_first + made.num_second)
    codec = factory_of(name)(False)
    return (ranks - 1 if codec.gathered else twice) * codec.wire_bytes(count)


def gradients(rank: int, width: int) -> list[tuple[numpy.ndarray, numpy.ndarray]]:
    """Those of one layer, weight and bias, for some steps."""
    generator = numpy.random.default_rng(rank)
    return [
        tuple(generator.standard_normal(shape, numpy.float32) for shape in ((width, width), (width,)))  # type: ignore[misc]
        for _ in range(STEPS_IN_TURN)
    ]


def means(world: mt.World, mine: list[tuple[numpy.ndarray, numpy.ndarray]]) -> list[float]:
    """The mean of the ranks' first bias in each of these steps. Collective."""
    everyone = world.allgather([float(bias[0]) for _, bias in mine])
    return [sum(values) / world.size for values in zip(*everyone, strict=True)]


def with_mpitrain(world: mt.World, codec: str, layers: int, width: int, reports: list[Overlap]) -> tuple[Step, int]:
    """The step, and its number of buckets."""
    parameters = [
        mt.Parameter(f"layer{i}.{name}", shape, numpy.dtype("float32"))
        for i in range(layers)
        for name, shape in (("weight", (width, width)), ("bias", (width,)))
    ]
    reducer = mt.GradientReducer(world, parameters, exchange=lambda own: make_exchange(own, compression=codec))
    mine = gradients(world.rank, width)
    turns, expected = cycle(mine), cycle(means(world, mine))

    def step(compute: Compute) -> None:
        forward, backward = compute
        weight, bias = next(turns)
        reducer.begin(1.0)
        for _ in range(layers):
            forward()
        for index in reversed(range(layers)):
            backward()
            reducer.ready(2 * index + 1, bias)
            reducer.ready(2 * index, weight)
        reports.append(reducer.finish().overlap)
        mean = next(expected)
        if codec in ("none", "bf16", "fp16", "int8"):  # others may leave out all of a value, for later steps
            assert abs(reducer.gradients[1][0] - mean) < 0.1, (reducer.gradients[1][0], mean)

    return step, reducer.num_buckets


def ddp(world: mt.World, hook: str, layers: int, width: int) -> Step:
    import torch
    from torch import distributed
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
            passes[0]()
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            passes[1]()
            return gradient, *map(torch.from_numpy, now[0])

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList(
                torch.zeros(shape) for _ in range(layers) for shape in ((width, width), (width,))
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in range(layers):
                x = Layer.apply(x, self.layers[2 * index], self.layers[2 * index + 1])
            return x

    if not distributed.is_initialized():
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
        address = world.broadcast_object(Path("/proc/sys/kernel/hostname").read_text().strip())
        where = f"tcp://{address}:29500"
        distributed.init_process_group("gloo", init_method=where, rank=world.rank, world_size=world.size)
    passes: list[Callable[[], object]] = [int, int]
    mine = gradients(world.rank, width)
    turns, expected = cycle(mine), cycle(means(world, mine))
    now = mine[:1]
    model = torch.nn.parallel.DistributedDataParallel(Model(), gradient_as_bucket_view=True)
    if hook:
        model.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
    x = torch.ones(1, requires_grad=True)

    def step(compute: Compute) -> None:
        passes[:], now[0] = compute, next(turns)
        model.zero_grad()
        model(x).sum().backward()
        mean = float(model.module.layers[1].grad[0])
        assert abs(mean - next(expected)) < 0.1, mean

    return step


def least_wait(wire: float, backward: float, num_buckets: int) -> float:
    """The least time of the exchange that stays exposed, with equal buckets."""
    arrived = 0.0
    for number in range(1, num_buckets + 1):
        arrived = max(arrived, backward * number / num_buckets) + wire / num_buckets
    return arrived - backward


def sleeping(seconds: float, layers: int) -> Compute:
    forward, backward = seconds * FORWARD / layers, seconds * (1 - FORWARD) / layers
    return lambda: time.sleep(forward), lambda: time.sleep(backward)


def multiplying(world: mt.World, seconds: float, layers: int) -> Compute:
    matrix = numpy.random.default_rng(0).standard_normal((512, 512)).astype(numpy.float32)
    times = [-time.perf_counter()]
    for _ in range(50):
        matrix @ matrix
        times.append(time.perf_counter())
    product = max(world.allgather((times[-1] - times[10]) / 40))

    def repeated(part: float) -> Callable[[], object]:
        count = max(1, round(seconds * part / layers / product))
        return lambda: [matrix @ matrix for _ in range(count)]

    return repeated(FORWARD), repeated(1 - FORWARD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--compute", type=float, nargs="*", default=[0.3, 0.6, 1.2], help="seconds of a step")
    parser.add_argument("--variants", nargs="*", default=["none", "bf16", "int8", "ddp", "ddp-fp16"])
    parser.add_argument("--multiply", action="store_true", help="compute instead of sleeping")
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, help="append a line of JSON for each variant")
    arguments = parser.parse_args()
    world = mt.init()
    layers, width = arguments.layers, arguments.width
    steps: dict[str, Step] = {}
    reports: dict[str, list[Overlap]] = {}
    for name in arguments.variants:
        if name.startswith("ddp"):
            steps[name] = ddp(world, name[4:], layers, width)
        else:
            reports[name] = []
            steps[name], buckets = with_mpitrain(world, name, layers, width, reports[name])
    count = layers * (width * width + width)
    world.print(f"{world.size} ranks on {world.num_nodes} hosts, {count:,} parameters in {layers} layers")
    world.print(versions_line(*(["torch"] if "ddp" in steps else [])))
    ends = float, float
    alone = {}
    for step in steps.values():
        step(ends)  # connections, compilers and DDP's own order of buckets
        step(ends)
    for name, variant in measure(world, {n: Variant(lambda s=s: s(ends)) for n, s in steps.items()}, 5).items():
        alone[name] = statistics.median(variant.seconds)
    for compute in arguments.compute:
        work = multiplying(world, compute, layers) if arguments.multiply else sleeping(compute, layers)

        def bare(work: Compute = work) -> None:
            for part in work:
                for _ in range(layers):
                    part()

        variants = {"compute": Variant(bare)}
        variants |= {name: Variant(lambda step=step, work=work: step(work)) for name, step in steps.items()}
        for report in reports.values():
            report.clear()
        load = os.getloadavg()[0]
        measured = measure(world, variants, arguments.rounds)
        seconds = {name: variant.seconds for name, variant in measured.items()}
        base = statistics.median(seconds["compute"])
        world.print(f"\ncompute {base * 1e3:.0f} ms; load {load:.1f} to {os.getloadavg()[0]:.1f}")
        world.print(
            "| exchange | alone | step | spread | exposed | wire | hidden | of bound | report | x ddp | cores |"
        )
        world.print("| --- " * 11 + "|")
        for name in steps:
            median, low, high = spread(seconds[name])
            cores = measured[name].cores
            exposed = median - base
            # DDP's buckets are of other sizes than ours: no claim is made of how much it could hide.
            hidden, allowed, said, wire = "-", "-", "-", "-"
            if name in reports:
                bound = sent_bytes(name, layers, width, world.size) * 8 / arguments.gbit / 1e9
                best = TCP * bound
                least = least_wait(best, base * (1 - FORWARD), buckets)
                hidden = f"{(best - exposed) / (best - least):.0%}"
                allowed = f"{(base + least) / median:.2f}"
                said = f"{statistics.median(report.hidden for report in reports[name]):.0%}"
                under_way = statistics.median(report.wire_seconds for report in reports[name])
                wire = f"{under_way * 1e3:.0f} ms ({under_way / bound:.2f})"
            if arguments.results and world.rank == 0:
                line = {"hosts": world.num_nodes, "layers": layers, "width": width, "gbit": arguments.gbit}
                line |= {"variant": name, "compute": base, "alone": alone[name], "seconds": sorted(seconds[name])}
                with arguments.results.open("a") as file:
                    file.write(json.dumps({**line, "load": load}) + "\n")
            against = f"{ratio(seconds, name, 'ddp')[0]:.2f}" if "ddp" in steps else "-"
            world.print(
                f"| {name} | {alone[name] * 1e3:.0f} ms | {median * 1e3:.0f} ms | "
                f"{low / median:.2f}-{high / median:.2f} | {exposed * 1e3:.0f} ms | {wire} | {hidden} | {allowed} | "
                f"{said} | {against} | {cores:.2f} ({cores * statistics.fmean(seconds[name]) * 1e3:.0f} ms) |"
            )


if __name__ == "__main__":
    main()
