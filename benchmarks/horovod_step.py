"""A step of a script for Horovod on mpitrain.horovod.torch against the same step with mpitrain.torch.prepare.

    mpiexec -n 2 python benchmarks/horovod_step.py
    mpiexec -n 2 python benchmarks/horovod_step.py --width 1024 --batch 64

Every variant has its own replica of the same convolutional network, whose batches have 3 x 32 x 32 values, and makes
whole steps: zero_grad, forward, backward, an SGD step. Variants alternate; the slowest rank counts.

    hvd         hvd.DistributedOptimizer
    hvd fp16    with hvd.Compression.fp16
    prepare     mpitrain.torch.prepare; it also compares the ranks' batches, and takes their parts
    alone       no exchange

First the time of a call that waits, of 4 KiB: hvd.allreduce_ and torch.distributed.all_reduce on our process group.
"""

import argparse
import copy
import itertools
import os
from collections.abc import Callable, Iterable

import torch
from torch import distributed

import mpitrain as mt
import mpitrain.horovod.torch as hvd
import mpitrain.torch
from mpitrain.forecast.rounds import Variant, measure, ratio, spread, versions_line

LATENCY_CALLS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="channels of the last layers")
    parser.add_argument("--batch", type=int, default=16, help="samples of a rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="in a round")
    arguments = parser.parse_args()
    world = mt.init()
    torch.set_num_threads(1)
    hvd.init()
    distributed.init_process_group("mpitrain")
    world.print(f"{world.size} ranks on {world.num_nodes} hosts; load {os.getloadavg()[0]:.1f}")
    world.print(versions_line("torch"))
    latency(world, arguments.rounds)
    steps(world, arguments)
    distributed.destroy_process_group()
    hvd.shutdown()


def latency(world: mt.World, rounds: int) -> None:
    value = torch.zeros(1024)  # stays zero, however often it is summed

    def repeated(call: Callable[[], object]) -> Variant:
        return Variant(lambda: [call() for _ in range(LATENCY_CALLS)], calls=LATENCY_CALLS)

    variants = {
        "hvd": repeated(lambda: hvd.allreduce_(value)),
        "process group": repeated(lambda: distributed.all_reduce(value)),
    }
    measure(world, variants, 2)
    for name, variant in measure(world, variants, rounds).items():
        median, low, high = spread(variant.seconds)
        world.print(f"4 KiB {name:14} {median * 1e6:7.1f} us [{low * 1e6:.1f} to {high * 1e6:.1f}]")


def network(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    channels = [3, 32, 64, 128, width, width, width]
    layers: list[torch.nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise(channels)):
        layers += [torch.nn.Conv2d(before, after, 3, stride=1 + number % 2, padding=1), torch.nn.BatchNorm2d(after)]
        layers.append(torch.nn.ReLU())
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 10))


def steps(world: mt.World, arguments: argparse.Namespace) -> None:
    base = network(arguments.width)
    gradient_bytes = sum(parameter.nbytes for parameter in base.parameters())
    shape = world.size * arguments.batch, 3, 32, 32
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    own = batch[world.rank * arguments.batch :][: arguments.batch]

    def make(name: str) -> Callable[[], object]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        data: Iterable[torch.Tensor] = [own] * arguments.steps
        if name.startswith("hvd"):
            compression = hvd.Compression.fp16 if "fp16" in name else hvd.Compression.none
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression)
        elif name == "prepare":
            model, optimizer, data = mpitrain.torch.prepare(model, optimizer, [batch] * arguments.steps)

        def run() -> None:
            for x in data:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

        return run

    names = ["alone", "hvd", "hvd fp16", "prepare"]
    variants = {name: Variant(make(name), calls=arguments.steps) for name in names}
    measure(world, variants, 2)
    measured = measure(world, variants, arguments.rounds)
    seconds = {name: variant.seconds for name, variant in measured.items()}
    tensors = len(list(base.parameters()))
    world.print(f"\n{gradient_bytes / 2**20:.1f} MiB of gradients, {tensors} tensors; load {os.getloadavg()[0]:.1f}")
    world.print("| | step, ms | spread | this / prepare's step | cores |")
    world.print("| --- | --- | --- | --- | --- |")
    for name in names:
        median, low, high = spread(seconds[name])
        relative = "{:.2f} [{:.2f}-{:.2f}]".format(*ratio(seconds, name, "prepare"))
        world.print(
            f"| {name} | {median * 1e3:.1f} | {low * 1e3:.1f}-{high * 1e3:.1f} | {relative} | "
            f"{measured[name].cores:.2f} |"
        )


if __name__ == "__main__":
    main()
