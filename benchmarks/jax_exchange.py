"""What JAX adds to an exchange: mpitrain.jax outside jit and inside, against World.mean of NumPy arrays.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/jax_exchange.py

The same gradients on all sides, in so many float32 leaves of equal size. `jit` is a function that only exchanges, so
that its copies into and out of the callback are counted too.
"""

import argparse
import statistics

import jax
import jax.numpy as jnp
import numpy

import mpitrain as mt
import mpitrain.jax
from mpitrain.bench.rounds import alternate, ratio, versions_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="+", default=[0.25, 4, 16, 64], help="of gradients")
    parser.add_argument("--leaves", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    world = mt.init()
    world.print(f"{world.size} ranks on {world.num_nodes} nodes, {versions_line('jax', 'jaxlib')}")
    for mib in arguments.mib:
        for leaves in arguments.leaves:
            measured(world, mib, leaves, arguments.rounds)


def measured(world: mt.World, mib: float, leaves: int, rounds: int) -> None:
    """One line of medians, and of ratios to NumPy with their 10th and 90th percentiles."""
    shape = (int(mib * 2**18 / leaves),)
    rng = numpy.random.default_rng(world.rank)
    arrays = {f"layer{i}": rng.standard_normal(shape, numpy.float32) for i in range(leaves)}
    on_jax = jax.tree.map(jnp.asarray, arrays)
    inside = jax.jit(lambda tree: mpitrain.jax.weighted_mean(tree, 2.0))
    seconds = alternate(
        world,
        {
            "numpy": lambda: world.mean(arrays, 2.0),
            "jax": lambda: jax.block_until_ready(mpitrain.jax.weighted_mean(on_jax, 2.0)),
            "jit": lambda: jax.block_until_ready(inside(on_jax)),
        },
        rounds,
    )
    shown = [f"numpy {statistics.median(seconds['numpy']) * 1e3:.2f} ms"]
    for name in ("jax", "jit"):
        middle, low, high = ratio(seconds, name, "numpy")
        shown.append(f"{name} / numpy {middle:.3f} [{low:.3f}-{high:.3f}]")
    world.print(f"{mib:6} MiB in {leaves:3} leaves: " + ", ".join(shown))


if __name__ == "__main__":
    main()
