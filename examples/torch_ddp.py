"""A plain DistributedDataParallel script over MPI. The two marked lines differ from the same script for gloo.

mpiexec -n 2 python examples/torch_ddp.py
python examples/torch_ddp.py                # this process alone, the same result to rounding
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpitrain.torch  # noqa: F401 - with gloo: no such line

GLOBAL_BATCH = 64


def main() -> None:
    arguments = parse()
    dist.init_process_group("mpitrain")  # with gloo: "gloo", and MASTER_ADDR, RANK and the rest, by torchrun
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(4096, 32)
    data = TensorDataset(x, (x @ torch.randn(32, 8)).sin())
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler, drop_last=True)
    net = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    step = 0
    for epoch in range(-(-arguments.steps // len(loader))):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            step += 1
            if step == arguments.steps:
                break
    mean = loss.detach()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"ranks: {size}, step {step}: loss {mean.item() / size:.6f}")
        if arguments.save:
            torch.save(net.state_dict(), arguments.save)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A plain DistributedDataParallel script over MPI.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", metavar="FILE", help="save the parameters to this file at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
