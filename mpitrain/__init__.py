"""mpitrain: data-parallel training over MPI for a few ordinary Linux machines.

import mpitrain as mt

world = mt.init()
w = world.sync(w)
for x, y in world.shard(batches):
    w = step(w, world.mean(grad(w, x, y), weight=len(x)))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpitrain.job.early import watch

if TYPE_CHECKING:
    from mpitrain import collectives as collectives
    from mpitrain.adapters.accumulate import Accumulate as Accumulate
    from mpitrain.adapters.array_function import ArrayFunction as ArrayFunction
    from mpitrain.adapters.array_layers import ArrayLayers as ArrayLayers
    from mpitrain.adapters.torch_layers import TorchLayers as TorchLayers
    from mpitrain.adapters.torch_module import TorchModule as TorchModule
    from mpitrain.errors import MpitrainError as MpitrainError
    from mpitrain.exchange.bucket import Parameter as Parameter
    from mpitrain.exchange.reducer import GradientReducer as GradientReducer
    from mpitrain.job.elastic import elastic as elastic
    from mpitrain.job.start import init as init
    from mpitrain.remote.block import map_on as map_on
    from mpitrain.remote.block import run_on as run_on
    from mpitrain.remote.block import workers as workers
    from mpitrain.strategies import AutoSync as AutoSync
    from mpitrain.strategies import DiLoCo as DiLoCo
    from mpitrain.strategies import LocalSGD as LocalSGD
    from mpitrain.strategies import ParameterServer as ParameterServer
    from mpitrain.strategies import Pipeline as Pipeline
    from mpitrain.strategies import ShardedSync as ShardedSync
    from mpitrain.strategies import SparseLoCo as SparseLoCo
    from mpitrain.strategies import StreamingDiLoCo as StreamingDiLoCo
    from mpitrain.strategies import Sync as Sync
    from mpitrain.strategies import make_strategy as make_strategy
    from mpitrain.training.data.arrays import ArrayData as ArrayData
    from mpitrain.training.data.map import MapData as MapData
    from mpitrain.training.data.prefetch import Prefetch as Prefetch
    from mpitrain.training.data.stream import StreamData as StreamData
    from mpitrain.training.flat_optimizer import clip_by_global_norm as clip_by_global_norm
    from mpitrain.training.hooks.balance import Balance as Balance
    from mpitrain.training.hooks.checkpoint import Checkpoint as Checkpoint
    from mpitrain.training.hooks.early_stopping import EarlyStopping as EarlyStopping
    from mpitrain.training.hooks.evaluate import Evaluate as Evaluate
    from mpitrain.training.hooks.hook import Hook as Hook
    from mpitrain.training.hooks.log import Log as Log
    from mpitrain.training.hooks.record import Record as Record
    from mpitrain.training.hooks.replicas import CompareReplicas as CompareReplicas
    from mpitrain.training.hooks.stop import StopAfter as StopAfter
    from mpitrain.training.hooks.stop import StopAtStep as StopAtStep
    from mpitrain.training.hooks.stop import StopWhen as StopWhen
    from mpitrain.training.keep import KeptState as KeptState
    from mpitrain.training.keep import keep as keep
    from mpitrain.training.loss_scale import LossScale as LossScale
    from mpitrain.training.meters.communication import Communication as Communication
    from mpitrain.training.meters.gpu_utilisation import GpuUtilisation as GpuUtilisation
    from mpitrain.training.meters.gradient_norm import GradientNorm as GradientNorm
    from mpitrain.training.meters.learning_rate import LearningRate as LearningRate
    from mpitrain.training.meters.loss import Loss as Loss
    from mpitrain.training.meters.memory import Memory as Memory
    from mpitrain.training.meters.meter import Meter as Meter
    from mpitrain.training.meters.meter import Reading as Reading
    from mpitrain.training.meters.throughput import Throughput as Throughput
    from mpitrain.training.meters.workers import Workers as Workers
    from mpitrain.training.metrics import evaluate as evaluate
    from mpitrain.training.optimizers import Adam as Adam
    from mpitrain.training.optimizers import AdamW as AdamW
    from mpitrain.training.optimizers import Sgd as Sgd
    from mpitrain.training.parts import Parts as Parts
    from mpitrain.training.run_event import RunEvent as RunEvent
    from mpitrain.training.schedules import constant as constant
    from mpitrain.training.schedules import warmup_cosine as warmup_cosine
    from mpitrain.training.step import Step as Step
    from mpitrain.training.trainer import Trainer as Trainer
    from mpitrain.training.tunable import Tunable as Tunable
    from mpitrain.training.tunable import tunable as tunable
    from mpitrain.training.writers.csv_table import Csv as Csv
    from mpitrain.training.writers.json_lines import JsonLines as JsonLines
    from mpitrain.training.writers.mlflow import Mlflow as Mlflow
    from mpitrain.training.writers.tensorboard import TensorBoard as TensorBoard
    from mpitrain.training.writers.wandb import Wandb as Wandb
    from mpitrain.world import World as World

__version__ = "0.2.0"

watch()

# The public names, each with its module. Loaded when first used (PEP 562), so that the command line starts at once and
# `mpitrain doctor` can tell what is wrong on a machine where NumPy or MPI is missing.
_HOME = {
    "Accumulate": "adapters.accumulate",
    "Adam": "training.optimizers",
    "AdamW": "training.optimizers",
    "ArrayData": "training.data.arrays",
    "ArrayFunction": "adapters.array_function",
    "ArrayLayers": "adapters.array_layers",
    "Balance": "training.hooks.balance",
    "Checkpoint": "training.hooks.checkpoint",
    "Communication": "training.meters.communication",
    "CompareReplicas": "training.hooks.replicas",
    "Csv": "training.writers.csv_table",
    "AutoSync": "strategies",
    "DiLoCo": "strategies",
    "EarlyStopping": "training.hooks.early_stopping",
    "Evaluate": "training.hooks.evaluate",
    "GpuUtilisation": "training.meters.gpu_utilisation",
    "GradientNorm": "training.meters.gradient_norm",
    "GradientReducer": "exchange.reducer",
    "Hook": "training.hooks.hook",
    "JsonLines": "training.writers.json_lines",
    "LearningRate": "training.meters.learning_rate",
    "KeptState": "training.keep",
    "LocalSGD": "strategies",
    "Log": "training.hooks.log",
    "Loss": "training.meters.loss",
    "LossScale": "training.loss_scale",
    "MapData": "training.data.map",
    "Memory": "training.meters.memory",
    "Meter": "training.meters.meter",
    "Mlflow": "training.writers.mlflow",
    "MpitrainError": "errors",
    "Parameter": "exchange.bucket",
    "ParameterServer": "strategies",
    "Parts": "training.parts",
    "Pipeline": "strategies",
    "Prefetch": "training.data.prefetch",
    "Reading": "training.meters.meter",
    "Record": "training.hooks.record",
    "RunEvent": "training.run_event",
    "ShardedSync": "strategies",
    "Sgd": "training.optimizers",
    "SparseLoCo": "strategies",
    "Step": "training.step",
    "StopAfter": "training.hooks.stop",
    "StopAtStep": "training.hooks.stop",
    "StopWhen": "training.hooks.stop",
    "StreamData": "training.data.stream",
    "StreamingDiLoCo": "strategies",
    "Sync": "strategies",
    "TensorBoard": "training.writers.tensorboard",
    "Throughput": "training.meters.throughput",
    "Trainer": "training.trainer",
    "Tunable": "training.tunable",
    "Wandb": "training.writers.wandb",
    "Workers": "training.meters.workers",
    "World": "world",
    "clip_by_global_norm": "training.flat_optimizer",
    "constant": "training.schedules",
    "elastic": "job.elastic",
    "evaluate": "training.metrics",
    "init": "job.start",
    "keep": "training.keep",
    "make_strategy": "strategies",
    "map_on": "remote.block",
    "run_on": "remote.block",
    "tunable": "training.tunable",
    "warmup_cosine": "training.schedules",
    "workers": "remote.block",
}
# Like the names above, but not in __all__: `from mpitrain import *` would load a framework, which may not be installed.
_OF_FRAMEWORKS = {"TorchLayers": "adapters.torch_layers", "TorchModule": "adapters.torch_module"}

if not TYPE_CHECKING:  # type checkers take the names imported above
    __all__ = list(_HOME)


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
    return sorted({*_HOME, *_OF_FRAMEWORKS, "collectives", "__version__"})
