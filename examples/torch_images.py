"""Train a convolutional network in PyTorch on Fashion-MNIST, with DDP over MPI.

    mpiexec -n 2 python examples/torch_images.py
    python examples/torch_images.py             # this process alone, the same result to rounding

Get the images with scripts/get-data fashion; --data digits needs no files. The loop is the one for torchrun and gloo.
The network uses GroupNorm. BatchNorm would use the statistics of a rank's part of the batch, so its results would
depend on the number of ranks (torch.nn.SyncBatchNorm covers all ranks, but works on GPUs only).
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpitrain.torch  # noqa: F401 - makes the backend known
from datasets import load_images


def network(side: int) -> nn.Module:
    """Images (n, 1, side, side) to scores (n, 10)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(32 * (side // 4) ** 2, 10),
    )


def main() -> None:
    arguments = parse()
    dist.init_process_group("mpitrain")
    rank, size = dist.get_rank(), dist.get_world_size()
    train_x, train_y, test_x, test_y = map(torch.from_numpy, load_images(arguments.data, arguments.data_directory))
    side = int(train_x.shape[1] ** 0.5)
    data = TensorDataset(train_x.view(-1, 1, side, side), train_y)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=arguments.global_batch // size, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    net = network(side)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    step = 0
    for epoch in range(-(-arguments.steps // len(loader))):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            if step == arguments.steps:
                break
    with torch.no_grad():  # each rank its part of the test images, and the sum over ranks
        x, y = test_x.view(-1, 1, side, side)[rank::size], test_y[rank::size]
        right = (net(x).argmax(1) == y).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"ranks: {size}, step {step}: test accuracy {right.item() / len(test_y):.4f}")
        if arguments.save:
            torch.save(net.state_dict(), arguments.save)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a convolutional network in PyTorch on Fashion-MNIST.")
    parser.add_argument("--data", choices=("fashion", "digits"), default="fashion")
    parser.add_argument("--data-directory", type=Path, help="default: data/ here, else ~/.cache/mpitrain")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--global-batch", type=int, default=128, help="samples over all ranks; a multiple of the ranks")
    parser.add_argument("--save", metavar="FILE", help="save the parameters to this file at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
