"""mpitrain: data-parallel training over MPI for a few ordinary Linux machines.

import mpitrain as mt

world = mt.init()
w = world.sync(w)
for x, y in world.shard(batches):
    w = step(w, world.mean(grad(w, x, y), weight=len(x)))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpitrain.early import watch

if TYPE_CHECKING:
    from mpitrain import collectives as collectives
    from mpitrain.adapters.accumulate import Accumulate
    from mpitrain.adapters.array_function import ArrayFunction
    from mpitrain.adapters.torch_module import TorchModule as TorchModule
    from mpitrain.errors import MpitrainError
    from mpitrain.exchange.bucket import Parameter
    from mpitrain.exchange.reducer import GradientReducer
    from mpitrain.start import init
    from mpitrain.strategies import Sync
    from mpitrain.training.data.arrays import ArrayData
    from mpitrain.training.data.map import MapData
    from mpitrain.training.data.prefetch import Prefetch
    from mpitrain.training.data.stream import StreamData
    from mpitrain.training.flat_optimizer import clip_by_global_norm
    from mpitrain.training.hooks.balance import Balance
    from mpitrain.training.hooks.checkpoint import Checkpoint
    from mpitrain.training.hooks.early_stopping import EarlyStopping
    from mpitrain.training.hooks.evaluate import Evaluate
    from mpitrain.training.hooks.hook import Hook
    from mpitrain.training.hooks.log import Log
    from mpitrain.training.hooks.record import Record
    from mpitrain.training.hooks.replicas import CompareReplicas
    from mpitrain.training.hooks.stop import StopAfter, StopAtStep, StopWhen
    from mpitrain.training.loss_scale import LossScale
    from mpitrain.training.meters.communication import Communication
    from mpitrain.training.meters.gpu_utilisation import GpuUtilisation
    from mpitrain.training.meters.gradient_norm import GradientNorm
    from mpitrain.training.meters.learning_rate import LearningRate
    from mpitrain.training.meters.loss import Loss
    from mpitrain.training.meters.memory import Memory
    from mpitrain.training.meters.meter import Meter, Reading
    from mpitrain.training.meters.throughput import Throughput
    from mpitrain.training.metrics import evaluate
    from mpitrain.training.optimizers import Adam, AdamW, Sgd
    from mpitrain.training.schedules import constant, warmup_cosine
    from mpitrain.training.trainer import Parts, Step, Trainer
    from mpitrain.training.writers.csv_table import Csv
    from mpitrain.training.writers.json_lines import JsonLines
    from mpitrain.training.writers.tensorboard import TensorBoard
    from mpitrain.world import World

__version__ = "0.1.0"

watch()

# Loaded when first used (PEP 562), so that the command line starts at once and `mpitrain doctor` can tell what is
# wrong on a machine where NumPy or MPI is missing.
_HOME = {
    "Accumulate": "adapters.accumulate",
    "Adam": "training.optimizers",
    "AdamW": "training.optimizers",
    "ArrayData": "training.data.arrays",
    "ArrayFunction": "adapters.array_function",
    "Balance": "training.hooks.balance",
    "Checkpoint": "training.hooks.checkpoint",
    "Communication": "training.meters.communication",
    "CompareReplicas": "training.hooks.replicas",
    "Csv": "training.writers.csv_table",
    "EarlyStopping": "training.hooks.early_stopping",
    "Evaluate": "training.hooks.evaluate",
    "GpuUtilisation": "training.meters.gpu_utilisation",
    "GradientNorm": "training.meters.gradient_norm",
    "GradientReducer": "exchange.reducer",
    "Hook": "training.hooks.hook",
    "JsonLines": "training.writers.json_lines",
    "LearningRate": "training.meters.learning_rate",
    "Log": "training.hooks.log",
    "Loss": "training.meters.loss",
    "LossScale": "training.loss_scale",
    "MapData": "training.data.map",
    "Memory": "training.meters.memory",
    "Meter": "training.meters.meter",
    "MpitrainError": "errors",
    "Parameter": "exchange.bucket",
    "Parts": "training.trainer",
    "Prefetch": "training.data.prefetch",
    "Reading": "training.meters.meter",
    "Record": "training.hooks.record",
    "Sgd": "training.optimizers",
    "Step": "training.trainer",
    "StopAfter": "training.hooks.stop",
    "StopAtStep": "training.hooks.stop",
    "StopWhen": "training.hooks.stop",
    "StreamData": "training.data.stream",
    "Sync": "strategies",
    "TensorBoard": "training.writers.tensorboard",
    "Throughput": "training.meters.throughput",
    "Trainer": "training.trainer",
    "World": "world",
    "clip_by_global_norm": "training.flat_optimizer",
    "constant": "training.schedules",
    "evaluate": "training.metrics",
    "init": "start",
    "warmup_cosine": "training.schedules",
}
# As these, but not in __all__: `from mpitrain import *` would load a framework, which need not even be installed.
_OF_FRAMEWORKS = {"TorchModule": "adapters.torch_module"}

__all__ = [
    "Accumulate",
    "Adam",
    "AdamW",
    "ArrayData",
    "ArrayFunction",
    "Balance",
    "Checkpoint",
    "Communication",
    "CompareReplicas",
    "Csv",
    "EarlyStopping",
    "Evaluate",
    "GpuUtilisation",
    "GradientNorm",
    "GradientReducer",
    "Hook",
    "JsonLines",
    "LearningRate",
    "Log",
    "Loss",
    "LossScale",
    "MapData",
    "Memory",
    "Meter",
    "MpitrainError",
    "Parameter",
    "Parts",
    "Prefetch",
    "Reading",
    "Record",
    "Sgd",
    "Step",
    "StopAfter",
    "StopAtStep",
    "StopWhen",
    "StreamData",
    "Sync",
    "TensorBoard",
    "Throughput",
    "Trainer",
    "World",
    "clip_by_global_norm",
    "constant",
    "evaluate",
    "init",
    "warmup_cosine",
]


def __getattr__(name: str) -> Any:
    if name == "collectives":  # a module, loaded when first used as well
        return import_module("mpitrain.collectives")
    home = _HOME.get(name) or _OF_FRAMEWORKS.get(name)
    if home is None:
        raise AttributeError(f"module 'mpitrain' has no attribute {name!r}")
    value = getattr(import_module(f"mpitrain.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OF_FRAMEWORKS, "collectives"})
