"""`mlp` in PyTorch: the same parameters at the start, the same steps, gradients by autograd."""

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import numpy
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import mpitrain as mt

from . import mlp


class Mlp(torch.nn.Module):
    """Dense layers of these sizes, with ReLU between them."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *inner, last = self.layers
        for layer in inner:
            x = torch.relu(layer(x))
        return last(x)


def adapter(
    rng: numpy.random.Generator,
    xp: ModuleType,
    *,
    inputs: int,
    schedule: Callable[[int], float],
    precision: str = "float32",
) -> mt.TorchModule:
    """The model with its optimizer, for the Trainer. See `models`."""
    initial = list(mlp.initial(rng, xp, inputs=inputs).values())
    module = Mlp([inputs, *(bias.size for bias in initial[1::2])])
    with torch.no_grad():
        for layer, weight, bias in zip(module.layers, initial[::2], initial[1::2], strict=True):
            layer.weight.copy_(torch.from_numpy(weight).T)
            layer.bias.copy_(torch.from_numpy(bias))
    return trained(module, schedule, precision)


def trained(module: torch.nn.Module, schedule: Callable[[int], float], precision: str) -> mt.TorchModule:
    """With the optimizer of the examples: weight decay for parameters of two and more dimensions."""
    decayed = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=schedule(0), momentum=0.9, nesterov=True)
    return mt.TorchModule(module, loss, optimizer, schedule=schedule, precision=precision)


def loss(module: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean loss over the samples of batch = x (n, inputs), integer labels y (n,)."""
    x, y = batch
    return cross_entropy(module(x), y.long())


def scores(parameters: dict[str, numpy.ndarray], x: numpy.ndarray) -> numpy.ndarray:
    """The logits (n, classes) of x (n, inputs)."""
    sizes = [x.shape[1], *(value.size for name, value in parameters.items() if name.endswith("bias"))]
    with torch.device("meta"):
        module = Mlp(sizes)
    return applied(module, parameters, x)


def applied(module: torch.nn.Module, parameters: dict[str, numpy.ndarray], x: numpy.ndarray) -> numpy.ndarray:
    """What a module gives for x with these parameters in place of its own."""
    tensors = {name: torch.from_numpy(value) for name, value in parameters.items()}
    with torch.no_grad():
        return functional_call(module, tensors, (torch.from_numpy(x),)).numpy()
