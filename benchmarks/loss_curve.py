"""The same training on 1, 2 and 4 ranks: how far do the loss curves and the parameters differ?

    python benchmarks/loss_curve.py --write one.npz
    mpiexec -n 2 python benchmarks/loss_curve.py --compare one.npz

The MLP of examples/train.py on Fashion-MNIST, one global batch of 128 whatever the number of ranks. What differs is
the order of additions, so the curves differ by rounding, which training then amplifies step by step.
"""

import argparse
import sys
from pathlib import Path

import numpy

import mpitrain as mt
from mpitrain.forecast.rounds import versions_line

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from datasets import load_images
from models import mlp

MARKS = (1, 10, 100, 469, 1000, 2345)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--steps", type=int, default=2345)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    arguments = parser.parse_args()
    world = mt.init()
    losses, parameters = train(arguments.dtype, arguments.steps)
    if not world.is_root:
        return
    if arguments.write:
        numpy.savez(arguments.write, losses=losses, **parameters)
    if arguments.compare:
        other = numpy.load(arguments.compare)
        difference = abs(losses - other["losses"])
        print(f"{world.size} ranks, {arguments.dtype}, {versions_line()}")
        for mark in MARKS:
            if mark <= len(losses):
                print(f"steps 1-{mark}: largest difference of the loss {difference[:mark].max():.3g}")
        largest = max(float(abs(value - other[name]).max()) for name, value in parameters.items())
        print(f"after step {len(losses)}: largest difference of a parameter {largest:.3g}")


def train(dtype: str, steps: int) -> tuple[numpy.ndarray, dict[str, numpy.ndarray]]:
    """The loss of every step, and the parameters at the end."""
    x, y, _, _ = load_images("fashion")
    x = ((x - x.mean()) / x.std()).astype(dtype)
    losses: list[float] = []

    class Losses(mt.Hook):
        def after_step(self, _: mt.Trainer, step: mt.Step) -> None:
            losses.append(step.loss)

    def build(world: mt.World) -> mt.Parts:
        initial = mlp.initial(numpy.random.default_rng(0), numpy, dtype=dtype)
        schedule = mt.optim.warmup_cosine(0.05, warmup_steps=200, total_steps=2345)
        optimizer = mt.optim.SGD(schedule, momentum=0.9, nesterov=True, weight_decay=5e-4)
        adapter = mt.ArrayFunction(mlp.loss_and_gradients, initial, optimizer)
        return mt.Parts(adapter, mt.Sync(), mt.data.ArrayData(world, (x, y), global_batch=128))

    trainer = mt.Trainer(build, [mt.StopAtStep(steps), Losses()])
    trainer.run()
    return numpy.array(losses), trainer.adapter.parameters()


if __name__ == "__main__":
    main()
