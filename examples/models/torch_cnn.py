"""`cnn` in PyTorch: the same parameters at the start, the same steps, gradients by autograd."""

import math
from collections.abc import Callable
from types import ModuleType

import numpy
import torch
from torch.nn.functional import max_pool2d

import mpitrain as mt

from . import cnn
from .torch_mlp import applied, trained


class Cnn(torch.nn.Module):
    """Two times (3x3 convolution, 2x2 max-pool, ReLU), then a dense layer."""

    def __init__(self, side: int, channels: tuple[int, int], classes: int) -> None:
        super().__init__()
        first, second = channels
        self.conv1 = torch.nn.Conv2d(1, first, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(first, second, 3, padding=1)
        self.dense = torch.nn.Linear((side // 4) ** 2 * second, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = math.isqrt(x.shape[1])
        x = x.reshape(len(x), 1, side, side)
        for convolution in (self.conv1, self.conv2):
            x = torch.relu(max_pool2d(convolution(x), 2))
        return self.dense(x.permute(0, 2, 3, 1).flatten(1))  # channels last, as in `cnn`


def adapter(
    rng: numpy.random.Generator,
    xp: ModuleType,
    *,
    inputs: int,
    schedule: Callable[[int], float],
    precision: str = "float32",
) -> mt.TorchModule:
    """The model with its optimizer, for the Trainer. See `models`."""
    initial = {name: torch.from_numpy(value) for name, value in cnn.initial(rng, xp, inputs=inputs).items()}
    channels = len(initial["conv1.bias"]), len(initial["conv2.bias"])
    module = Cnn(math.isqrt(inputs), channels, len(initial["dense.bias"]))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = initial[name]
            parameter.copy_(value.permute(3, 2, 0, 1) if value.ndim == 4 else value.T if value.ndim == 2 else value)
    return trained(module, schedule, precision)


def scores(parameters: dict[str, numpy.ndarray], x: numpy.ndarray) -> numpy.ndarray:
    """The logits (n, classes) of x (n, inputs)."""
    sizes = [len(parameters[f"{name}.bias"]) for name in ("conv1", "conv2", "dense")]
    with torch.device("meta"):
        module = Cnn(math.isqrt(x.shape[1]), (sizes[0], sizes[1]), sizes[2])
    return applied(module, parameters, x)
