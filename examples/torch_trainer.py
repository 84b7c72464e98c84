"""The shortest way from a PyTorch model to a training on one or many ranks.

    python examples/torch_trainer.py                  # this process alone
    mpitrain run -n 3 examples/torch_trainer.py       # three ranks: the same numbers, to rounding

It evaluates and saves after each epoch, in runs/torch_trainer, from where the same command continues. Data: 1,797
digits.
"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

import mpitrain.torch
from arguments import positive
from datasets import load_images


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an image classifier with mpitrain.torch.Trainer.")
    parser.add_argument("--epochs", type=positive, default=5)
    parser.add_argument("--directory", default="runs/{script}", help="the folder of the run")
    arguments = parser.parse_args()
    train_x, train_y, test_x, test_y = (torch.from_numpy(part) for part in load_images("digits"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(train_x.shape[1], 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    mpitrain.torch.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.003),
        DataLoader(TensorDataset(train_x, train_y), batch_size=128, shuffle=True),
        loss=torch.nn.functional.cross_entropy,
        max_epochs=arguments.epochs,
        evaluation=DataLoader(TensorDataset(test_x, test_y), batch_size=256),
        metrics={"test accuracy": lambda outputs, y: outputs.argmax(1) == y},
        directory=arguments.directory,
    ).fit()


if __name__ == "__main__":
    main()
