"""FSDP2 over MPI: each rank keeps a part of every parameter, of its gradient and of the optimizer's state.

    mpiexec -n 2 python examples/torch_fsdp2.py
    python examples/torch_fsdp2.py              # this process alone, the same result to rounding

The ranks gather the parameters of one layer at a time, in the forward and again in the backward pass. So a model may be
larger than the memory of one process. `fully_shard` and the loop are PyTorch's own.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import mpitrain.torch  # noqa: F401 - makes the backend known

GLOBAL_BATCH, LENGTH, LETTERS, WIDTH = 32, 24, 11, 64


class Reverser(torch.nn.Module):
    """Transformer layers that learn to read a row of letters backwards: (n, LENGTH) to scores (n * LENGTH, LETTERS)."""

    def __init__(self) -> None:
        super().__init__()
        self.letter = torch.nn.Embedding(LETTERS, WIDTH)
        self.place = torch.nn.Embedding(LENGTH, WIDTH)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.scores = torch.nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letter(letters) + self.place(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return self.scores(x.flatten(0, 1))


def main() -> None:
    arguments = parse()
    dist.init_process_group("mpitrain")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    model = Reverser()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    letters = torch.Generator().manual_seed(1)  # the same on every rank; a rank takes its rows of each batch
    for _ in range(arguments.steps):
        rows = torch.randint(LETTERS, (GLOBAL_BATCH, LENGTH), generator=letters).tensor_split(size)[rank]
        optimizer.zero_grad()
        loss = cross_entropy(model(rows), rows.flip(1).flatten())
        loss.backward()
        optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}  # all ranks call it
    if rank == 0:
        total = sum(value.numel() for value in whole.values())
        print(f"ranks: {size}, step {arguments.steps}: loss {mean.item() / size:.6f}")
        print(f"this rank held {held:,} of {total:,} numbers")
        if arguments.save:
            torch.save(whole, arguments.save)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="FSDP2 over MPI.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", metavar="FILE", help="save the whole parameters to this file at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
