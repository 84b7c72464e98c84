"""The GPT of examples/models on Jane Austen's novels, for several workers that train in one process.

The parameters of all workers are stacked, so PyTorch computes all their gradients at once. The text is in the public
domain: `scripts/get-data austen`.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention

import mpitrain as mt

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from datasets import load_text
from models import gpt

HELD_OUT = 500  # pieces of the text that nobody trains with
MOST = 256  # pieces that all workers take in a step


def losses_of(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, heads: int) -> torch.Tensor:
    """The mean loss of each worker, of parameters[name][worker] and x[worker, sample, time]."""
    workers, samples, length, width = *x.shape, parameters["norm.scale"].shape[-1]

    def norm(h: torch.Tensor, name: str) -> torch.Tensor:
        normal = layer_norm(h, (width,), eps=1e-5)
        return normal * parameters[f"{name}.scale"][:, None] + parameters[f"{name}.bias"][:, None]

    def dense(h: torch.Tensor, name: str) -> torch.Tensor:
        weight = parameters[f"{name}.weight"].reshape(workers, h.shape[-1], -1)
        return torch.baddbmm(parameters[f"{name}.bias"][:, None], h, weight)

    table = parameters["embedding.token"]
    tokens = torch.stack([table[worker][x[worker]] for worker in range(workers)])
    stream = (tokens + parameters["embedding.position"][:, None, :length]).flatten(1, 2)
    for block in sorted({name.partition(".")[0] for name in parameters if name.startswith("block")}):
        qkv = dense(norm(stream, f"{block}.norm1"), f"{block}.attention.qkv")
        q, k, v = qkv.reshape(workers * samples, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        stream = stream + dense(mixed.reshape(workers, samples * length, width), f"{block}.attention.out")
        up = gelu(dense(norm(stream, f"{block}.norm2"), f"{block}.mlp.up"), approximate="tanh")
        stream = stream + dense(up, f"{block}.mlp.down")
    logits = torch.bmm(norm(stream, "norm"), table.transpose(1, 2))
    return cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").reshape(workers, -1).mean(1)


class StackedGpt:
    """The models of the workers, and their batches. The first worker of a step computes the gradients of all.

    Attributes:
        adapters: of each worker. The batch of a step is the number of the step.
    """

    def __init__(self, options: argparse.Namespace, workers: int, batch: int) -> None:
        """Each worker takes `batch` pieces in a step. One with as many as several together takes the same pieces."""
        self._tokens, held_out, vocabulary = load_text("austen")
        self._options, self._shape, self._step = options, (workers, batch, options.context), -1
        sizes = {name: getattr(options, name) for name in ("width", "layers", "heads", "context")}
        initial = gpt.initial(numpy.random.default_rng(options.seed), numpy, vocabulary=len(vocabulary), **sizes)
        rate = mt.optim.warmup_cosine(options.rate, warmup_steps=options.steps // 10, total_steps=options.steps)
        optimizer = partial(mt.optim.AdamW, rate, betas=(0.9, 0.99), weight_decay=0.1, clip_norm=1.0)
        functions = [partial(self._of_worker, worker) for worker in range(workers)]
        self.adapters = [mt.ArrayFunction(function, initial, optimizer()) for function in functions]
        self._held_out = self._at(
            held_out, numpy.linspace(0, len(held_out) - options.context - 2, HELD_OUT).astype(int)
        )

    def _at(self, tokens: numpy.ndarray, places: numpy.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(tokens[places[:, None] + numpy.arange(self._options.context + 1)])
        return rows[:, :-1], rows[:, 1:]

    def _of_worker(self, worker: int, _: Any, step: int, on_gradient: Any) -> float:
        if step != self._step:
            self._step, (workers, batch, context) = step, self._shape
            rng = numpy.random.default_rng([self._options.seed, step])
            places = rng.integers(0, len(self._tokens) - context - 1, MOST)[: workers * batch]
            every = [adapter.parameters() for adapter in self.adapters]
            stacked = {name: torch.from_numpy(numpy.stack([one[name] for one in every])) for name in every[0]}
            values = [tensor.requires_grad_() for tensor in stacked.values()]
            x, y = (part.reshape(self._shape) for part in self._at(self._tokens, places))
            self._losses = losses_of(stacked, x, y, self._options.heads)
            gradients = torch.autograd.grad(self._losses.sum(), values)
            self._gradients = {name: one.numpy() for name, one in zip(stacked, gradients, strict=True)}
        for name in reversed(self._gradients):
            on_gradient(name, self._gradients[name][worker])
        return float(self._losses[worker].detach())

    def held_out_loss(self) -> float:
        """Of the first worker."""
        with torch.no_grad():
            stacked = {name: torch.from_numpy(one[None]) for name, one in self.adapters[0].parameters().items()}
            return float(losses_of(stacked, *(part[None] for part in self._held_out), self._options.heads).mean())
