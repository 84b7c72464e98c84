"""mpitrain: data-parallel training over MPI for a few ordinary Linux machines.

    import mpitrain as mt

    world = mt.init()
    w = world.broadcast(w)
    for x, y in world.shard(batches):
        w = step(w, world.mean(grad(w, x, y), weight=len(x)))

The ranks, and a loop of your own:
    init, World         which rank this is, and the calls that all ranks make together
    elastic, keep       a loop that survives the loss of a rank, or a restart
    evaluate            metrics over all ranks
    record_loop         a record of the run, for `mpitrain plot` and the dashboard
    tunable             a value that `mpitrain tell` changes while the script trains
    workers, run_on, map_on          functions on chosen ranks
    GradientReducer, Parameter       gradients that travel while the backward pass runs

A Trainer runs the loop. Its model, strategy and data are its Parts; hooks run around each Step:
    TorchModule, TorchLayers, ArrayFunction, ArrayLayers, Accumulate      the model
    Sync, ShardedSync, AutoSync, Pipeline                                 every step uses the gradients of all ranks
    LocalSGD, DiLoCo, StreamingDiLoCo, SparseLoCo                         ranks exchange after several local steps
    ParameterServer                                                       ranks are workers of a parameter server
    Hook, RunEvent                                                        to write a hook
    StopAtStep, StopAfter, StopWhen, EarlyStopping                        hooks that end the run
    Checkpoint, Evaluation, Log, Record, Balance, CompareReplicas         hooks that save, measure and check

Modules, loaded when first used:
    mpitrain.data           ArrayData, MapData, StreamData, Prefetch
    mpitrain.optim          SGD, Adam, AdamW, LossScale, constant, warmup_cosine, clip_by_global_norm
    mpitrain.meters         what Record measures
    mpitrain.writers        where Record writes: Csv, JsonLines, TensorBoard, Mlflow, Wandb
    mpitrain.strategies     make_strategy: a strategy by its name
    mpitrain.collectives    allreduce, broadcast and others on arrays, with handles
    mpitrain.errors         every error, below MpitrainError

Import these by name, because they need their framework:
    mpitrain.torch          a Trainer of a DataLoader, `prepare` for a loop, a backend of torch.distributed
    mpitrain.jax            means inside jit
    mpitrain.horovod        Horovod's API
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpitrain.early import take_place, watch

if TYPE_CHECKING:
    from mpitrain import collectives as collectives
    from mpitrain import data as data
    from mpitrain import errors as errors
    from mpitrain import meters as meters
    from mpitrain import optim as optim
    from mpitrain import strategies as strategies
    from mpitrain import writers as writers
    from mpitrain.adapters.accumulate import Accumulate as Accumulate
    from mpitrain.adapters.array_function import ArrayFunction as ArrayFunction
    from mpitrain.adapters.array_layers import ArrayLayers as ArrayLayers
    from mpitrain.adapters.torch_layers import TorchLayers as TorchLayers
    from mpitrain.adapters.torch_module import TorchModule as TorchModule
    from mpitrain.job.start import elastic as elastic
    from mpitrain.job.start import init as init
    from mpitrain.reducer.bucket import Parameter as Parameter
    from mpitrain.reducer.reducer import GradientReducer as GradientReducer
    from mpitrain.remote.block import map_on as map_on
    from mpitrain.remote.block import run_on as run_on
    from mpitrain.remote.block import workers as workers
    from mpitrain.state.keep import keep as keep
    from mpitrain.strategies.local_updates import DiLoCo as DiLoCo
    from mpitrain.strategies.local_updates import LocalSGD as LocalSGD
    from mpitrain.strategies.local_updates import SparseLoCo as SparseLoCo
    from mpitrain.strategies.local_updates import StreamingDiLoCo as StreamingDiLoCo
    from mpitrain.strategies.parameter_server import ParameterServer as ParameterServer
    from mpitrain.strategies.pipeline import Pipeline as Pipeline
    from mpitrain.strategies.sharded_sync import ShardedSync as ShardedSync
    from mpitrain.strategies.sync import AutoSync as AutoSync
    from mpitrain.strategies.sync import Sync as Sync
    from mpitrain.training.hooks.balance import Balance as Balance
    from mpitrain.training.hooks.checkpoint import Checkpoint as Checkpoint
    from mpitrain.training.hooks.evaluation import Evaluation as Evaluation
    from mpitrain.training.hooks.hook import Hook as Hook
    from mpitrain.training.hooks.log import Log as Log
    from mpitrain.training.hooks.record import Record as Record
    from mpitrain.training.hooks.replicas import CompareReplicas as CompareReplicas
    from mpitrain.training.hooks.stop import EarlyStopping as EarlyStopping
    from mpitrain.training.hooks.stop import StopAfter as StopAfter
    from mpitrain.training.hooks.stop import StopAtStep as StopAtStep
    from mpitrain.training.hooks.stop import StopWhen as StopWhen
    from mpitrain.training.loop_record import record_loop as record_loop
    from mpitrain.training.metrics import evaluate as evaluate
    from mpitrain.training.parts import Parts as Parts
    from mpitrain.training.run_event import RunEvent as RunEvent
    from mpitrain.training.step import Step as Step
    from mpitrain.training.trainer import Trainer as Trainer
    from mpitrain.training.tunable import tunable as tunable
    from mpitrain.world.world import World as World

__version__ = "0.2.0"

watch()

# The public names, each with its module. Loaded when first used (PEP 562), so that the command line starts at once and
# `mpitrain doctor` can tell what is wrong on a machine where NumPy or MPI is missing.
_HOME = {
    # The ranks, and calls of a loop of your own.
    "init": "job.start",
    "World": "world.world",
    "elastic": "job.start",
    "evaluate": "training.metrics",
    "keep": "state.keep",
    "record_loop": "training.loop_record",
    "tunable": "training.tunable",
    # Functions on named ranks.
    "workers": "remote.block",
    "run_on": "remote.block",
    "map_on": "remote.block",
    # The training loop, and what happens around its steps.
    "Trainer": "training.trainer",
    "Parts": "training.parts",
    "Step": "training.step",
    "Hook": "training.hooks.hook",
    "RunEvent": "training.run_event",
    "StopAtStep": "training.hooks.stop",
    "StopAfter": "training.hooks.stop",
    "StopWhen": "training.hooks.stop",
    "EarlyStopping": "training.hooks.stop",
    "Checkpoint": "training.hooks.checkpoint",
    "Evaluation": "training.hooks.evaluation",
    "Log": "training.hooks.log",
    "Record": "training.hooks.record",
    "Balance": "training.hooks.balance",
    "CompareReplicas": "training.hooks.replicas",
    # Adapters: the model.
    "ArrayFunction": "adapters.array_function",
    "ArrayLayers": "adapters.array_layers",
    "Accumulate": "adapters.accumulate",
    # Strategies: what ranks exchange, and when parameters change.
    "Sync": "strategies.sync",
    "ShardedSync": "strategies.sharded_sync",
    "AutoSync": "strategies.sync",
    "LocalSGD": "strategies.local_updates",
    "DiLoCo": "strategies.local_updates",
    "StreamingDiLoCo": "strategies.local_updates",
    "SparseLoCo": "strategies.local_updates",
    "ParameterServer": "strategies.parameter_server",
    "Pipeline": "strategies.pipeline",
    # Below a Trainer: gradients in buckets, for a loop of your own.
    "GradientReducer": "reducer.reducer",
    "Parameter": "reducer.bucket",
}
# Like the names above, but not in __all__: `from mpitrain import *` would load a framework, which may not be installed.
_OF_FRAMEWORKS = {"TorchLayers": "adapters.torch_layers", "TorchModule": "adapters.torch_module"}
# Public modules, loaded when first used as well.
_MODULES = ("collectives", "data", "errors", "meters", "optim", "strategies", "writers")
# Where the names of version 0.1 are now. The error for an old name gives the new one.
_MOVED = {
    **{name: f"data.{name}" for name in ("ArrayData", "MapData", "Prefetch", "StreamData")},
    **{name: f"optim.{name}" for name in ("Adam", "AdamW", "LossScale", "clip_by_global_norm", "constant")},
    **{name: f"meters.{name}" for name in ("Communication", "GpuUtilisation", "GradientNorm", "LearningRate", "Loss")},
    **{name: f"meters.{name}" for name in ("Memory", "Meter", "Reading", "Throughput", "Workers")},
    **{name: f"writers.{name}" for name in ("Csv", "JsonLines", "Mlflow", "TensorBoard", "Wandb")},
    "Evaluate": "Evaluation",
    "KeptState": "state.keep.KeptState",
    "MpitrainError": "errors.MpitrainError",
    "Sgd": "optim.SGD",
    "Tunable": "training.tunable.Tunable",
    "make_strategy": "strategies.make_strategy",
    "warmup_cosine": "optim.warmup_cosine",
}

if not TYPE_CHECKING:  # type checkers take the names imported above
    __all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    take_place()
    if name in _MODULES:
        return import_module(f"mpitrain.{name}")
    home = _HOME.get(name) or _OF_FRAMEWORKS.get(name)
    if home is None:
        there = f"; it is mpitrain.{_MOVED[name]} now" if name in _MOVED else ""
        raise AttributeError(f"module 'mpitrain' has no attribute {name!r}{there}")
    value = getattr(import_module(f"mpitrain.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List what help() and completion can load: without PyTorch, not the names that need it."""
    return sorted({*_HOME, *(_OF_FRAMEWORKS if _has_torch() else ()), *_MODULES, "__version__"})


def _has_torch() -> bool:
    from importlib.util import find_spec

    try:
        return find_spec("torch") is not None
    except ValueError:  # something has blocked it in sys.modules
        return False
