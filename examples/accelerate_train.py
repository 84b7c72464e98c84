"""Hugging Face accelerate over MPI: make the process group before the Accelerator, which then uses that group.

    mpiexec -n 2 python examples/accelerate_train.py
    python examples/accelerate_train.py         # this process alone, the same result to rounding

accelerate makes a process group with a backend from its own list, unless a group exists. So one line makes the group
first, and the loop is accelerate's own. On a machine without GPUs, pass `cpu=True`: without it, accelerate treats every
rank as a job of its own.
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn.functional import cross_entropy

import mpitrain.torch  # noqa: F401 - makes the backend known
from datasets import load_images


def main() -> None:
    arguments = parse()
    dist.init_process_group("mpitrain")
    # The loader's batch is that of all ranks together, and one seed shuffles. By default, each rank has such a batch.
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    train_x, train_y, _, _ = map(torch.from_numpy, load_images("digits"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.utils.data.TensorDataset(train_x, train_y)
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    while step < arguments.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step == arguments.steps:
                break
    mean = accelerator.reduce(loss.detach(), "mean")
    accelerator.print(f"ranks: {accelerator.num_processes}, step {step}: loss {mean.item():.6f}")
    if arguments.save:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), arguments.save)
    accelerator.end_training()  # destroys the process group


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hugging Face accelerate over MPI.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", metavar="FILE", help="save the parameters to this file at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
