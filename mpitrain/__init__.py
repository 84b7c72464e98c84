"""mpitrain: data-parallel training over MPI for a few ordinary Linux machines.

import mpitrain as mt

world = mt.init()
w = world.sync(w)
for x, y in world.shard(batches):
    w = step(w, world.mean(grad(w, x, y), weight=len(x)))
"""

from mpitrain.adapters.array_function import ArrayFunction
from mpitrain.errors import MpitrainError
from mpitrain.exchange.bucket import Parameter
from mpitrain.exchange.reducer import GradientReducer
from mpitrain.start import init
from mpitrain.strategies import Sync
from mpitrain.training.data import ArrayData
from mpitrain.training.hooks import Checkpoint, Evaluate, Hook, Log, StopAtStep
from mpitrain.training.metrics import evaluate
from mpitrain.training.optimizers import Adam, AdamW, Sgd, clip_by_global_norm
from mpitrain.training.schedules import constant, warmup_cosine
from mpitrain.training.trainer import Parts, Step, Trainer
from mpitrain.world import World

__version__ = "0.1.0"

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
    "MpitrainError",
    "Parameter",
    "Parts",
    "Sgd",
    "Step",
    "StopAtStep",
    "Sync",
    "Trainer",
    "World",
    "__version__",
    "clip_by_global_norm",
    "constant",
    "evaluate",
    "init",
    "warmup_cosine",
]
