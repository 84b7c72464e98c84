"""What virtual ranks cost: steps of a training, in turns in one run.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/virtual_ranks.py

`plain`: one pass a rank, a plain sum. `exact`: one pass a rank, an exact sum. `V = p` and so on: virtual ranks. Random
data, the models of examples/, no hooks. A cell is the median of the rounds' ratios to plain, with the 10th and 90th
percentile.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

import mpitrain as mt
from mpitrain.forecast.rounds import Variant, measure, ratio, versions_line

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import gpt, mlp


def parts(world: mt.World, model: str, global_batch: int, virtual_ranks: int | None) -> mt.Parts:
    rng = numpy.random.default_rng(0)
    arrays: tuple[Any, Any]
    if model == "gpt":
        tokens = rng.integers(0, 81, (1024, 65))
        arrays, function = (tokens[:, :-1], tokens[:, 1:]), gpt.loss_and_gradients
        parameters = gpt.initial(rng, numpy, vocabulary=81, context=64, width=96, heads=4, layers=2)
    else:
        arrays, function = (
            (rng.standard_normal((4096, 784)).astype("f4"), rng.integers(0, 10, 4096)),
            mlp.loss_and_gradients,
        )
        parameters = mlp.initial(rng, numpy)
    data = mt.data.ArrayData(world, arrays, global_batch=global_batch)
    adapter = mt.ArrayFunction(function, parameters, mt.optim.SGD(0.01, momentum=0.9))
    return mt.Parts(adapter, mt.Sync(virtual_ranks=virtual_ranks), data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    world = mt.init()
    exact = world.replaced(config=replace(world.config, reduction="exact"))
    world.print(f"{world.size} ranks on {world.num_nodes} hosts, {versions_line('numba')}")
    world.print("| model | global batch | plain | exact / plain | V = p | V = 8 | V = 32 |")
    world.print("| --- " * 7 + "|")
    for model, global_batch in (("mlp", 128), ("gpt", 32)):
        kinds = {"plain": (world, None), "exact": (exact, None), "V = p": (world, world.size)}
        kinds |= {"V = 8": (world, 8), "V = 32": (world, 32)}
        trainers = {
            name: mt.Trainer(
                lambda world, virtual_ranks=number, model=model, batch=global_batch: parts(
                    world, model, batch, virtual_ranks
                ),
                world=there,
            )
            for name, (there, number) in kinds.items()
        }
        variants = {name: Variant(trainer.step) for name, trainer in trainers.items()}
        measure(world, variants, 3)  # with the probes
        seconds = {name: one.seconds for name, one in measure(world, variants, arguments.rounds).items()}
        cells = ["{:.2f} [{:.2f}-{:.2f}]".format(*ratio(seconds, name, "plain")) for name in kinds if name != "plain"]
        plain = f"{statistics.median(seconds['plain']) * 1e3:.2f} ms"
        world.print(f"| {model} | {global_batch} | {plain} | {' | '.join(cells)} |")
        for trainer in trainers.values():
            trainer.close()


if __name__ == "__main__":
    main()
