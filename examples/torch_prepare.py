"""A PyTorch training loop for one process, made to run on one or many ranks by two lines of mpitrain.

    python examples/torch_prepare.py                            # this process alone
    mpiexec -n 2 python examples/torch_prepare.py               # two ranks: the same loss to 5 digits

Each batch of 128 images is shared out among the ranks, in the order that one process would draw, and the gradients are
those of the whole batch. The data is scikit-learn's 1,797 small images of digits, or with --data fashion
Fashion-MNIST (get it with scripts/get-data fashion).
"""

import argparse

import torch

import mpitrain.torch
from arguments import positive
from datasets import load_images


def main() -> None:
    arguments = parse()
    torch.manual_seed(0)
    train_x, train_y, test_x, test_y = (torch.from_numpy(part) for part in load_images(arguments.data))
    model = torch.nn.Sequential(torch.nn.Linear(train_x.shape[1], 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(train_x, train_y), batch_size=128, shuffle=True)
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, data)

    for _ in range(arguments.epochs):
        for x, y in data:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        scores = model(test_x)
    accuracy = float((scores.argmax(1) == test_y).float().mean())
    if mpitrain.init().is_root:  # every rank has the same model, and would print the same
        print(f"test loss {loss_fn(scores, test_y):.6f}, test accuracy {accuracy:.4f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an image classifier in PyTorch on one or many ranks.")
    parser.add_argument("--data", choices=("digits", "fashion"), default="digits")
    parser.add_argument("--epochs", type=positive, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
