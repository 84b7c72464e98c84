"""An ordinary training loop in JAX. The three lines marked with MPI make it run on many ranks.

    python examples/jax_mlp.py                      # this process alone
    mpiexec -n 2 python examples/jax_mlp.py         # two ranks, the same result to rounding

The data is Fashion-MNIST (get it with scripts/get-data fashion), or with --data digits the 1,797 small images that
come with scikit-learn.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy

import mpitrain as mt
import mpitrain.jax
from arguments import positive
from datasets import load_images

Parameters = list[dict[str, jax.Array]]
RATE = 0.2


def initial(key: jax.Array, sizes: tuple[int, ...]) -> Parameters:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def scores(parameters: Parameters, x: jax.Array) -> jax.Array:
    *hidden, last = parameters
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def loss(parameters: Parameters, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores(parameters, x)), y[:, None], axis=1))


# MPI: the mean over all ranks' samples, of the loss and the gradients.
loss_and_gradients = mpitrain.jax.mean(jax.value_and_grad(loss), weight=lambda parameters, x, y: len(x))


@jax.jit
def step(parameters: Parameters, x: jax.Array, y: jax.Array) -> tuple[Parameters, jax.Array]:
    value, gradients = loss_and_gradients(parameters, x, y)
    return jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients), value


def batches(x: numpy.ndarray, y: numpy.ndarray, size: int, steps: int) -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
    rng = numpy.random.default_rng(0)
    for _ in range(steps):
        chosen = rng.choice(len(x), size, replace=False)
        yield x[chosen], y[chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion", help="fashion or digits (default: %(default)s)")
    parser.add_argument("--data-directory", type=Path, help="folder of scripts/get-data's files")
    parser.add_argument("--global-batch", type=positive, default=127, help="samples of a step, over all ranks")
    parser.add_argument("--steps", type=positive, default=500)
    arguments = parser.parse_args()
    world = mt.init()
    with world.together("load the data"):
        train_x, train_y, test_x, test_y = load_images(arguments.data, arguments.data_directory)
    parameters = initial(jax.random.key(0), (train_x.shape[1], 256, 10))
    parameters = mpitrain.jax.broadcast(parameters)  # MPI: all ranks begin with equal values
    data = batches(train_x, train_y, arguments.global_batch, arguments.steps)
    for number, (x, y) in enumerate(mpitrain.jax.shard(data), start=1):  # MPI: this rank's part of each batch
        parameters, value = step(parameters, x, y)
        if number % 100 == 0 or number in (1, arguments.steps):
            world.print(f"step {number}: loss {value:.6f}")
    right = (jax.jit(scores)(parameters, test_x).argmax(axis=1) == test_y).mean()
    world.print(f"{world.size} rank(s): test accuracy {right:.4f}")


if __name__ == "__main__":
    main()
