"""A whole training in PyTorch on one or many ranks: print once, evaluate every sample once, save and resume.

    python examples/torch_whole_loop.py                           # this process alone
    mpiexec -n 3 python examples/torch_whole_loop.py              # three ranks: the same numbers, to rounding

With --checkpoint FILE the script saves after each epoch. The next run continues from there, on any number of ranks.
Under `mpitrain run` it continues from memory after a failure, also within an epoch. The data is
scikit-learn's 1,797 small images of digits, or with --data fashion Fashion-MNIST.
"""

import argparse
from pathlib import Path

import torch

import mpitrain as mt
import mpitrain.torch
from arguments import positive
from datasets import load_images


def main() -> None:
    arguments = parse()
    train_x, train_y, test_x, test_y = (torch.from_numpy(part) for part in load_images(arguments.data))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(train_x.shape[1], 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    train = torch.utils.data.TensorDataset(train_x, train_y)
    loader = torch.utils.data.DataLoader(train, batch_size=128, shuffle=True, generator=torch.Generator())
    test = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(test_x, test_y), batch_size=256)

    world = mt.init()
    state = mpitrain.torch.load(arguments.checkpoint) if arguments.checkpoint else None
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, loader)
    test = mpitrain.torch.shard(test)
    data.epoch = state["epoch"] if state else 0
    kept = mpitrain.torch.keep(model, optimizer, data, loss=0.0)

    for epoch in range(data.epoch, arguments.epochs):
        data.generator.manual_seed(epoch)  # the order of an epoch, wherever the run began
        for x, y in data:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            kept.update(loss=data.mean(loss))  # over all samples of the batch
        with torch.no_grad():
            right = sum(test.sum(model(x).argmax(1) == y) for x, y in test)  # each sample once
        world.print(f"epoch {epoch + 1}: loss {kept['loss']:.5f}, test accuracy {right / len(test.dataset):.4f}")
        if arguments.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            mpitrain.torch.save(state, arguments.checkpoint)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, evaluate, save and resume in PyTorch on one or many ranks.")
    parser.add_argument("--data", choices=("digits", "fashion"), default="digits")
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument("--checkpoint", type=Path, help="save to this file after each epoch, and resume from it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
