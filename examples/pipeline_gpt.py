"""Train a GPT that does not fit in the memory of one rank: as a pipeline of as many stages as there are ranks.

    mpitrain run -n 2 examples/pipeline_gpt.py
    mpitrain run -n 4 examples/pipeline_gpt.py
    mpitrain run -n 1 examples/pipeline_gpt.py               # fails: there is no room for parameters and AdamW
    mpitrain run -n 1 examples/pipeline_gpt.py --room-mib 0  # without a limit: the same losses
    mpitrain run -n 2 examples/pipeline_gpt.py --show        # prints what each layer takes, and the stage it is on

The layers are measured at the start, and cut so that the slowest stage takes the least time. Each rank may take
`--room-mib` MiB for the model, beyond what Python and its libraries take (RLIMIT_DATA). The text is Python's own
standard library, byte by byte.
"""

import argparse
import resource
import sysconfig
from functools import partial
from pathlib import Path

import numpy
import torch
from torch.nn.functional import cross_entropy

import mpitrain as mt
from models.torch_block import Block

CONTEXT, WIDTH, HEADS, BLOCKS, BYTES = 32, 256, 4, 22, 256


class Embedding(torch.nn.Module):
    """Bytes to vectors, with their places."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = torch.nn.Embedding(BYTES, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        for embedding in (self.token, self.place):
            torch.nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.place.weight


def layer(number: int) -> torch.nn.Module:
    """Make a layer. It has a seed of its own, because no rank makes all layers."""
    torch.manual_seed(number)
    if number == 0:
        return Embedding()
    if number <= BLOCKS:
        return Block(WIDTH, HEADS)
    return torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, BYTES))


def loss(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """In nats per byte."""
    return cross_entropy(scores.flatten(0, 1), tokens.flatten())


def text() -> tuple[numpy.ndarray, numpy.ndarray]:
    """Windows of bytes, and the same shifted by one."""
    folder = Path(sysconfig.get_path("stdlib"))
    tokens = numpy.frombuffer(b"".join((folder / name).read_bytes() for name in ("os.py", "typing.py")), numpy.uint8)
    windows = numpy.lib.stride_tricks.sliding_window_view(tokens, CONTEXT + 1)[::CONTEXT].astype(numpy.int64)
    return windows[:, :-1].copy(), windows[:, 1:].copy()


def limit(room_mib: int) -> None:
    """Let this process take so much more memory, and no more."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    taken = int(status["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (taken + room_mib * 2**20,) * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT as a pipeline, under a limit of memory.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--show", action="store_true", help="print the time and memory of each layer, and its stage")
    parser.add_argument("--room-mib", type=int, default=350, help="0: no limit")
    arguments = parser.parse_args()
    world = mt.init()
    torch.set_num_threads(1)

    def build(world: mt.World) -> mt.Parts:
        inputs, targets = text()
        pipeline = mt.Pipeline("auto", "1f1b", micro_batches=4, sample=(inputs[:2], targets[:2]))
        layers = [partial(layer, number) for number in range(BLOCKS + 2)]
        adapter = mt.TorchLayers(layers, loss, partial(torch.optim.AdamW, lr=1e-3), clip_norm=1.0)
        return mt.Parts(
            adapter, pipeline, mt.data.ArrayData(pipeline.replicas(world), (inputs, targets), global_batch=8)
        )

    torch.nn.Linear(8, 8)(torch.ones(1, 8)).sum().backward()  # the threads of autograd take memory too
    if arguments.room_mib:
        limit(arguments.room_mib)
    trainer = mt.Trainer(build, [mt.StopAtStep(arguments.steps), mt.Log(10)])
    if arguments.show:
        world.print(trainer.strategy.table())
    num_parameters = sum(value.size for value in trainer.adapter.parameters().values())
    world.print(f"{num_parameters:,} parameters", all_ranks=True)
    trainer.run()


if __name__ == "__main__":
    main()
