"""A training with a record of every step, at a service too, and a checkpoint every 5.

DIRECTORY STEPS WRITER [KILLED_AFTER]; with a step below 0, an error ends the training there.
"""

import os
import signal
import sys
from pathlib import Path

import numpy

import mpitrain as mt
from mpitrain.errors import ConfigError, everywhere
from mpitrain.training.writers import service

service.PATIENCE_SECONDS = 300.0  # for a busy machine


def build(world: mt.World) -> mt.Parts:
    def function(parameters, batch, on_gradient):
        (values,) = batch
        on_gradient("w", numpy.array([(parameters["w"][0] - values).mean() if len(values) else 0.0]))
        return float(((parameters["w"][0] - values) ** 2).mean()) if len(values) else 0.0

    data = mt.data.ArrayData(world, [numpy.arange(13.0)], global_batch=5)
    return mt.Parts(mt.ArrayFunction(function, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)), mt.Sync(), data)


class Tell(mt.Hook):
    """Reports a metric whose name and values services do not take as they are."""

    def after_step(self, trainer, step):
        trainer.report({"_odd, name": [float("nan"), float("inf"), -0.1][step.number % 3]})


class Fault(mt.Hook):
    """Ends all ranks after a step, as a power cut does, or an error."""

    def after_step(self, trainer, step):
        if abs(fault) == step.number:
            trainer.world.barrier()  # the row is written
            if fault < 0:
                # An error of one rank alone would end rank 0 and the process of wandb, whose file has a buffer.
                raise everywhere(ConfigError("on purpose"))
            os.kill(os.getpid(), signal.SIGKILL)


directory, steps, fault = Path(sys.argv[1]), int(sys.argv[2]), int((sys.argv[4:] or ["0"])[0])
writers = [mt.writers.JsonLines(directory), getattr(mt, sys.argv[3])(directory)]
record = mt.Record(writers, steps=1, meters=[mt.meters.Loss(), mt.meters.GradientNorm()])
checkpoint = mt.Checkpoint(directory / "checkpoints", 5)
mt.Trainer(build, [mt.StopAtStep(steps), Tell(), record, Fault(), checkpoint]).run()
