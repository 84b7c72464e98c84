"""The random generators of a PyTorch loop or model on the CPU: their states, and their seeds for a virtual rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def random_state(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """Return the states of PyTorch's, NumPy's and Python's own generators on the CPU, and of `generators`.

    It holds tensors, numbers, texts, tuples and lists, so that torch.load reads it with weights_only=True.
    """
    kind, keys, *rest = numpy.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)), *rest),
        "python": random.getstate(),
        "generators": [generator.get_state() for generator in generators],
    }


def set_random_state(state: Mapping[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Continue from a `random_state`, with as many generators."""
    kind, keys, *rest = state["numpy"]
    torch.set_rng_state(state["torch"])
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
    random.setstate(state["python"])
    for generator, kept in zip(generators, state["generators"], strict=False):
        generator.set_state(kept)


@contextmanager
def seeded(key: tuple[int, ...]) -> Iterator[None]:
    """A block in which PyTorch's, NumPy's and Python's own generators on the CPU are seeded from the key alone.

    After the block, they continue as if it had not run.
    """
    with restored():
        seed(key)
        yield


@contextmanager
def restored() -> Iterator[None]:
    """A block after which these generators continue as if it had not run."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def seed(key: tuple[int, ...]) -> None:
    """Seed these generators from the key alone."""
    words = numpy.random.SeedSequence(key).generate_state(4)
    torch.default_generator.manual_seed(int(words[0]) << 32 | int(words[1]))
    numpy.random.seed(int(words[2]))
    random.seed(int(words[3]))


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators of a DataLoader and its samplers, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    drawn = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in drawn if isinstance(one, torch.Generator)}.values())
