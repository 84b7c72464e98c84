"""A training with a record of every step and a checkpoint every 5: DIRECTORY STEPS."""

import sys
from pathlib import Path

import numpy

import mpitrain as mt


def build(world: mt.World) -> mt.Parts:
    def function(parameters, batch, on_gradient):
        on_gradient("w", parameters["w"] - batch[0].mean())
        return 1.0

    data = mt.data.ArrayData(world, [numpy.arange(10.0)], global_batch=2)
    return mt.Parts(mt.ArrayFunction(function, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)), mt.Sync(), data)


directory, steps = Path(sys.argv[1]), int(sys.argv[2])
record = mt.Record(
    [mt.writers.JsonLines(directory), mt.writers.Csv(directory)],
    steps=1,
    meters=[mt.meters.Loss(), mt.meters.GradientNorm()],
)
mt.Trainer(build, [mt.StopAtStep(steps), record, mt.Checkpoint(directory / "checkpoints", 5)]).run()
