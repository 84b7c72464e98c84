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
    from mpitrain.adapters.array_function import ArrayFunction
    from mpitrain.errors import MpitrainError
    from mpitrain.exchange.bucket import Parameter
    from mpitrain.exchange.reducer import GradientReducer
    from mpitrain.start import init
    from mpitrain.strategies import Sync
    from mpitrain.training.data import ArrayData
    from mpitrain.training.flat_optimizer import clip_by_global_norm
    from mpitrain.training.hooks.checkpoint import Checkpoint
    from mpitrain.training.hooks.evaluate import Evaluate
    from mpitrain.training.hooks.hook import Hook
    from mpitrain.training.hooks.log import Log
    from mpitrain.training.hooks.stop import StopAtStep
    from mpitrain.training.loss_scale import LossScale
    from mpitrain.training.metrics import evaluate
    from mpitrain.training.optimizers import Adam, AdamW, Sgd
    from mpitrain.training.schedules import constant, warmup_cosine
    from mpitrain.training.trainer import Parts, Step, Trainer
    from mpitrain.world import World

__version__ = "0.1.0"

watch()

# Loaded when first used (PEP 562), so that the command line starts at once and `mpitrain doctor` can tell what is
# wrong on a machine where NumPy or MPI is missing.
_HOME = {
    "Adam": "training.optimizers",
    "AdamW": "training.optimizers",
    "ArrayData": "training.data",
    "ArrayFunction": "adapters.array_function",
    "Checkpoint": "training.hooks.checkpoint",
    "Evaluate": "training.hooks.evaluate",
    "GradientReducer": "exchange.reducer",
    "Hook": "training.hooks.hook",
    "Log": "training.hooks.log",
    "LossScale": "training.loss_scale",
    "MpitrainError": "errors",
    "Parameter": "exchange.bucket",
    "Parts": "training.trainer",
    "Sgd": "training.optimizers",
    "Step": "training.trainer",
    "StopAtStep": "training.hooks.stop",
    "Sync": "strategies",
    "Trainer": "training.trainer",
    "World": "world",
    "clip_by_global_norm": "training.flat_optimizer",
    "constant": "training.schedules",
    "evaluate": "training.metrics",
    "init": "start",
    "warmup_cosine": "training.schedules",
}

__all__ = [
    "Adam",
    "AdamW",
    "ArrayData",
    "ArrayFunction",
    "Checkpoint",
    "Evaluate",
    "GradientReducer",
    "Hook",
    "Log",
    "LossScale",
    "MpitrainError",
    "Parameter",
    "Parts",
    "Sgd",
    "Step",
    "StopAtStep",
    "Sync",
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
    if name not in _HOME:
        raise AttributeError(f"module 'mpitrain' has no attribute {name!r}")
    value = getattr(import_module(f"mpitrain.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "collectives"})
