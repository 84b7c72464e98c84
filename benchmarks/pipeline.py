"""What a pipeline costs: its bubble, and its step against torch.distributed.pipelining over gloo.

    mpitrain run -n 2 benchmarks/pipeline.py bubble      # or -n 4: a stage a rank; computes by sleeping
    mpitrain run -n 2 benchmarks/pipeline.py memory      # activations that each rank keeps at most, in MiB
    mpitrain run -n 2 benchmarks/pipeline.py torch       # the same model and schedule, in turn
    benchmarks/shaped_hosts 4 125mbit '$MPIEXEC .venv/bin/python benchmarks/pipeline.py links'  # a stage a host

`bubble`: a layer for each stage, whose passes sleep: 10 ms forward, 20 ms backward, with activations of 64 KiB, so the
time needs no core. A step should take (m + s - 1) x 30 ms for m micro-batches and s stages; printed is measured time
divided by that. `torch`: 8 blocks (linear 512 x 512, GELU), 16 samples of 64 x 512 float32 numbers, 8 micro-batches,
1F1B, SGD. Each round has 5 steps of one side and then 5 of the other; printed is the ratio of the rounds.
`links`: the part of a step that a stage computes. It computes by sleeping, 25 ms forward and 50 ms backward for each
micro-batch, whose activations are 512 KiB of float32. At 125 Mbit/s, what a stage sends to both sides takes 34 ms as
bfloat16: 45 % of the time that it computes. So it is at 1 Gbit/s with Llama 2 7B on 4 GPUs that reach 36 TFLOP/s (2048
tokens: 16 MiB to each side, 268 ms of 600 ms).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy

import mpitrain as mt
from mpitrain.forecast.rounds import alternate, ratio, versions_line

FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020
WIDTH, LENGTH, BLOCKS, SAMPLES, MICRO = 512, 64, 8, 16, 8


class Sleeping:
    """A layer that computes by sleeping."""

    def parameters(self) -> dict[str, Any]:
        """See ArrayLayer."""
        return {"w": numpy.zeros(4)}

    def forward(self, parameters: Mapping[str, Any], inputs: Any) -> tuple[Any, Any]:
        """See ArrayLayer."""
        time.sleep(FORWARD_SECONDS)
        return inputs, None

    def backward(self, parameters: Mapping[str, Any], kept: Any, gradient: Any) -> tuple[Any, dict[str, Any]]:
        """See ArrayLayer."""
        time.sleep(BACKWARD_SECONDS)
        return gradient, {"w": numpy.zeros(4)}


def trained(strategy: mt.Pipeline, adapter: Any, world: mt.World, batch: Any, steps: int) -> float:
    """Make steps as a Trainer does, and return the median of their seconds."""
    seconds = []
    for _ in range(steps):
        world.barrier()
        begun = time.perf_counter()
        strategy.begin_step(len(batch[0]))
        loss = adapter.loss_and_gradients(batch, strategy.on_gradient)
        strategy.finish_step(adapter, loss)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def bubble(world: mt.World) -> None:
    """Print the measured time of a step, divided by that without any other cost."""
    stages = world.size
    for schedule in ("1f1b", "gpipe"):
        for num_micro in (stages, 4 * stages):
            batch = numpy.ones((num_micro, 16384), numpy.float32), numpy.zeros((num_micro, 1))
            loss: Callable[[Any, Any], Any] = lambda output, _: (0.0, output)  # noqa: E731
            adapter = mt.ArrayLayers([Sleeping() for _ in range(stages)], loss, mt.optim.SGD(0.1))
            strategy = mt.Pipeline(stages, schedule, num_micro)
            strategy.begin(world, adapter)
            seconds = trained(strategy, adapter, world, batch, 7)
            strategy.close()
            least = (num_micro + stages - 1) * (FORWARD_SECONDS + BACKWARD_SECONDS)
            world.print(
                f"{schedule}, {stages} stages, {num_micro} micro-batches: {seconds * 1e3:.1f} ms a step, "
                f"{seconds / least:.3f} of {least * 1e3:.0f} ms"
            )


class OfPiece(Sleeping):
    """A piece of a stage, which sleeps for its part of the stage's time."""

    def __init__(self, pieces: int) -> None:
        self._forward, self._backward = 0.025 / pieces, 0.050 / pieces

    def forward(self, parameters: Mapping[str, Any], inputs: Any) -> tuple[Any, Any]:
        """See ArrayLayer."""
        time.sleep(self._forward)
        return inputs, None

    def backward(self, parameters: Mapping[str, Any], kept: Any, gradient: Any) -> tuple[Any, dict[str, Any]]:
        """See ArrayLayer."""
        time.sleep(self._backward)
        return gradient, {"w": numpy.zeros(4)}


def links(world: mt.World, steps: int) -> None:
    """Print the part of a step that a stage computes, and what the bubble of the schedule allows."""
    stages = world.size
    for schedule, pieces, activations, num_micro in (
        ("1f1b", 1, "bf16", 64),
        ("eager_1f1b", 1, None, 64),
        ("eager_1f1b", 1, "bf16", 64),
        ("eager_1f1b", 1, "bf16", 128),
        ("interleaved", 2, "bf16", 32),
        ("interleaved", 2, "bf16", 64),
    ):
        batch = numpy.ones((num_micro, 2**17), numpy.float32), numpy.zeros((num_micro, 1))
        layers = [OfPiece(pieces) for _ in range(stages * pieces)]
        adapter = mt.ArrayLayers(layers, lambda output, _: (0.0, output), mt.optim.SGD(0.1))
        of_pieces = {"pieces": pieces} if pieces > 1 else {}
        strategy = mt.Pipeline(stages, schedule, num_micro, activations=activations, **of_pieces)
        strategy.begin(world, adapter)
        seconds = trained(strategy, adapter, world, batch, steps)
        strategy.close()
        computes, waits = num_micro * 0.075, (stages - 1) / pieces * 0.075
        world.print(
            f"{schedule}, {pieces} pieces a stage, {activations or 'float32'}, {num_micro} micro-batches: "
            f"{seconds:.2f} s a step, {computes / seconds:.1%} computed (bubble alone: "
            f"{computes / (computes + waits):.1%})"
        )


class Kept(Sleeping):
    """Keeps 1 MiB for each micro-batch, and counts."""

    now = most = 0

    def forward(self, parameters: Mapping[str, Any], inputs: Any) -> tuple[Any, Any]:
        """See ArrayLayer."""
        kept = numpy.ones(2**20, numpy.uint8)
        Kept.now += kept.nbytes
        Kept.most = max(Kept.most, Kept.now)
        return inputs, kept

    def backward(self, parameters: Mapping[str, Any], kept: Any, gradient: Any) -> tuple[Any, dict[str, Any]]:
        """See ArrayLayer."""
        Kept.now -= kept.nbytes
        return gradient, {"w": numpy.zeros(4)}


def memory(world: mt.World) -> None:
    """Print what each rank keeps of activations at most."""
    for schedule in ("1f1b", "gpipe"):
        for num_micro in (4, 16):
            Kept.now = Kept.most = 0
            adapter = mt.ArrayLayers(
                [Kept() for _ in range(world.size)], lambda output, _: (0.0, output), mt.optim.SGD(0.1)
            )
            strategy = mt.Pipeline(world.size, schedule, num_micro)
            strategy.begin(world, adapter)
            trained(strategy, adapter, world, (numpy.ones((num_micro, 16), numpy.float32), numpy.zeros(num_micro)), 2)
            strategy.close()
            most = world.allgather(Kept.most / 2**20)
            world.print(f"{schedule}, {num_micro} micro-batches: {most} MiB on ranks 0 to {world.size - 1}")


def against_torch(world: mt.World, rounds: int) -> None:
    """Print the time of our steps divided by that of torch.distributed.pipelining over gloo."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=_store(world), rank=world.rank, world_size=world.size)

    def block(number: int) -> torch.nn.Module:
        torch.manual_seed(number)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    own = range(world.rank * BLOCKS // world.size, (world.rank + 1) * BLOCKS // world.size)
    module = torch.nn.Sequential(*(block(number) for number in own))
    optimizer = sgd(module.parameters())
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(SAMPLES, LENGTH, WIDTH)
    stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=torch.nn.functional.mse_loss)
    losses: dict[str, list[float]] = {"torch": [], "mpitrain": []}

    def theirs() -> None:
        for _ in range(5):
            optimizer.zero_grad()
            of_step: list[torch.Tensor] = []
            if world.rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=of_step)
            optimizer.step()
            losses["torch"].append(sum(one.item() for one in of_step) / MICRO)

    layers = [lambda number=number: block(number) for number in range(BLOCKS)]
    adapter = mt.TorchLayers(layers, torch.nn.functional.mse_loss, sgd)
    strategy = mt.Pipeline(world.size, micro_batches=MICRO)
    strategy.begin(world, adapter)
    batch = x.numpy(), y.numpy()

    def ours() -> None:
        for _ in range(5):
            strategy.begin_step(SAMPLES)
            loss = adapter.loss_and_gradients(batch, strategy.on_gradient)
            losses["mpitrain"].append(strategy.finish_step(adapter, loss)[0].loss)

    seconds = alternate(world, {"mpitrain": ours, "torch": theirs}, rounds)
    middle, low, high = ratio(seconds, "mpitrain", "torch")
    world.print(
        f"mpitrain {statistics.median(seconds['mpitrain']) * 200:.2f} ms a step, torch over gloo "
        f"{statistics.median(seconds['torch']) * 200:.2f} ms; ratio {middle:.3f} ({low:.3f} to {high:.3f})"
    )
    first, last = (list(one) for one in losses.values())
    if world.rank == world.size - 1:
        print(
            f"losses of the first and the last step: torch {first[0]:.9f} {first[-1]:.9f}, "
            f"mpitrain {last[0]:.9f} {last[-1]:.9f}",
            flush=True,
        )
    strategy.close()
    dist.destroy_process_group()


def _store(world: mt.World) -> Any:
    import torch.distributed as dist

    port = 0
    if world.is_root:
        store = dist.TCPStore("127.0.0.1", 0, world.size, is_master=True, wait_for_workers=False)
        port = store.port
    port = world.broadcast_object(port)
    return store if world.is_root else dist.TCPStore("127.0.0.1", port, world.size, is_master=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bubble", "memory", "torch", "links"])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    world = mt.init()
    world.print(f"{versions_line()}; load {os.getloadavg()[0]:.1f}")
    if arguments.what == "torch":
        against_torch(world, arguments.rounds)
    elif arguments.what == "links":
        links(world, arguments.rounds)
    else:
        {"bubble": bubble, "memory": memory}[arguments.what](world)


if __name__ == "__main__":
    main()
