"""PyTorch's DistributedDataParallel over mpitrain's process group against the same over gloo; and prepare().

    mpiexec -n 2 python benchmarks/torch_ddp.py                         # 64 MiB of gradients, and a small model
    benchmarks/shaped_hosts 4 1gbit '$MPIEXEC python benchmarks/torch_ddp.py --widths 1024'

One job has both process groups. Every variant has its own replica of the same model, an MLP of --layers equal layers
of float32, and makes whole steps: zero_grad, forward, backward, an SGD step. Variants alternate; the slowest rank
counts.

    ddp gloo        torch's own
    ddp mpitrain    the same script on our process group
    ddp bf16        with mpitrain.torch.compress("bf16")
    ddp gloo fp16   with torch's fp16_compress_hook (torch's own for bfloat16 refuses gloo)
    prepare         mpitrain.torch.prepare in place of DDP; it also compares the ranks' batches, and takes their parts
    ddp alone       DDP with a hook that exchanges nothing: what DDP's own work leaves to be gained
    alone           no exchange: what the computation takes while all ranks compute

First the time of a blocking all_reduce of 4 KiB.
"""

import argparse
import copy
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import mpitrain as mt
import mpitrain.torch
from mpitrain.forecast.rounds import Variant, measure, ratio, spread, versions_line

LATENCY_CALLS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="*", default=[256, 2048], help="of the layers, one model each")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="samples of a rank")
    parser.add_argument("--variants", nargs="*", help="default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="in a round")
    arguments = parser.parse_args()
    world = mt.init()
    torch.set_num_threads(1)
    if world.num_nodes > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    address = world.broadcast_object(Path("/proc/sys/kernel/hostname").read_text().strip())
    where = f"tcp://{address}:29500"
    distributed.init_process_group("gloo", init_method=where, rank=world.rank, world_size=world.size)
    groups = {"gloo": distributed.group.WORLD, "mpitrain": distributed.new_group(backend="mpitrain")}
    world.print(f"{world.size} ranks on {world.num_nodes} hosts; load {os.getloadavg()[0]:.1f}")
    world.print(versions_line("torch"))
    latency(world, groups, arguments.rounds)
    for width in arguments.widths:
        steps(world, groups, width, arguments)
    distributed.destroy_process_group()


def latency(world: mt.World, groups: dict[str, object], rounds: int) -> None:
    value = torch.zeros(1024)  # stays zero, however often it is summed

    def calls(group: object) -> None:
        for _ in range(LATENCY_CALLS):
            distributed.all_reduce(value, group=group)

    variants = {name: Variant(lambda group=group: calls(group), calls=LATENCY_CALLS) for name, group in groups.items()}
    measure(world, variants, 2)
    measured = measure(world, variants, rounds)
    for name, variant in measured.items():
        median, low, high = spread(variant.seconds)
        world.print(f"4 KiB {name:10} {median * 1e6:7.1f} us [{low * 1e6:.1f} to {high * 1e6:.1f}]")


def replica(width: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*parts)


def _nothing(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def steps(world: mt.World, groups: dict[str, object], width: int, arguments: argparse.Namespace) -> None:
    base = replica(width, arguments.layers)
    gradient_bytes = sum(parameter.nbytes for parameter in base.parameters())
    batch = torch.randn(world.size * arguments.batch, width, generator=torch.Generator().manual_seed(0))
    own = batch[world.rank * arguments.batch :][: arguments.batch]
    hooks = {
        "ddp alone": _nothing,
        "ddp gloo fp16": default_hooks.fp16_compress_hook,
        "ddp bf16": mpitrain.torch.compress("bf16"),
    }

    def make(name: str) -> Callable[[], object]:
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        data: Iterable[torch.Tensor] = [own] * arguments.steps
        if name.startswith("ddp"):
            group = groups["gloo" if "gloo" in name else "mpitrain"]
            model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
            if name in hooks:
                model.register_comm_hook(None if "gloo" in name else group, hooks[name])
        elif name == "prepare":
            model, optimizer, data = mpitrain.torch.prepare(model, optimizer, [batch] * arguments.steps)

        def run() -> None:
            for x in data:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

        return run

    names = ["alone", "ddp alone", "ddp gloo", "ddp mpitrain", "prepare", "ddp gloo fp16", "ddp bf16"]
    names = [name for name in names if not arguments.variants or name in arguments.variants]
    variants = {name: Variant(make(name), calls=arguments.steps) for name in names}
    measure(world, variants, 2)
    measured = measure(world, variants, arguments.rounds)
    seconds = {name: variant.seconds for name, variant in measured.items()}
    world.print(f"\n{gradient_bytes / 2**20:.1f} MiB of gradients; load {os.getloadavg()[0]:.1f}")
    world.print("| | step, ms | spread | gloo's step / this | cores |")
    world.print("| --- | --- | --- | --- | --- |")
    for name in names:
        median, low, high = spread(seconds[name])
        faster = "{:.2f} [{:.2f}-{:.2f}]".format(*ratio(seconds, "ddp gloo", name)) if "ddp gloo" in names else "-"
        world.print(
            f"| {name} | {median * 1e3:.1f} | {low * 1e3:.1f}-{high * 1e3:.1f} | {faster} | "
            f"{measured[name].cores:.2f} |"
        )


if __name__ == "__main__":
    main()
