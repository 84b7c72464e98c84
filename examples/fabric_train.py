"""Lightning Fabric over MPI: its DDP strategy with this backend. Fabric itself reads rank and size from MPI.

    mpiexec -n 2 python examples/fabric_train.py
    python examples/fabric_train.py             # this process alone, the same result to rounding

Under mpiexec, Fabric chooses its MPIEnvironment, which gets rank, size and node from mpi4py. The script must tell
Fabric the number of nodes, and the number of ranks on each.
"""

import argparse

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import MPIEnvironment
from lightning_fabric.strategies import DDPStrategy
from torch.nn.functional import cross_entropy

import mpitrain as mt
import mpitrain.torch
from datasets import load_images

GLOBAL_BATCH = 64


def main() -> None:
    arguments = parse()
    world = mt.init()
    strategy = DDPStrategy(process_group_backend="mpitrain", cluster_environment=MPIEnvironment())
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=world.local_size, num_nodes=world.num_nodes)
    fabric.launch()
    train_x, train_y, _, _ = map(torch.from_numpy, load_images("digits"))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    data = torch.utils.data.TensorDataset(train_x, train_y)
    batch = GLOBAL_BATCH // fabric.world_size  # Fabric gives each rank its part of the samples
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch, shuffle=True, drop_last=True))

    step = 0
    for epoch in range(-(-arguments.steps // len(loader))):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            step += 1
            if step == arguments.steps:
                break
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"ranks: {fabric.world_size}, step {step}: loss {mean.item():.6f}")
    if arguments.save:
        fabric.save(arguments.save, net.state_dict())
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Lightning Fabric over MPI.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", metavar="FILE", help="save the parameters to this file at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
