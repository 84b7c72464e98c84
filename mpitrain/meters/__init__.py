"""The meters of `mpitrain.Record`: `Record(writers, meters=[Loss(), Throughput()])`.

A subclass of `Meter` measures another number; its `read` returns `Reading` objects, which are combined over the ranks.
"""

from mpitrain.training.meters import (
    Communication,
    GpuUtilisation,
    GradientNorm,
    LearningRate,
    Loss,
    Memory,
    Meter,
    Reading,
    Throughput,
    Workers,
)

__all__ = [
    "Communication",
    "GpuUtilisation",
    "GradientNorm",
    "LearningRate",
    "Loss",
    "Memory",
    "Meter",
    "Reading",
    "Throughput",
    "Workers",
]
