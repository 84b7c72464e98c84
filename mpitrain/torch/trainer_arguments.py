"""The checks of mpitrain.torch.Trainer's arguments, and of the folder that it writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mpitrain.adapters.torch_checks import check_schedule
from mpitrain.adapters.torch_state import Scheduler
from mpitrain.errors import ConfigError
from mpitrain.launch.processes import launcher_pid
from mpitrain.strategies import ServedStrategy, Strategy
from mpitrain.torch.batches import has_length
from mpitrain.torch.sharded import ShardedData
from mpitrain.training.hooks.hook import refuse_others
from mpitrain.training.run_document import FILE as DOCUMENT
from mpitrain.training.run_document import read_document
from mpitrain.training.writers.json_lines import FILE as ROWS
from mpitrain.world.world import World

CHECKPOINTS = "checkpoints"  # in the folder of a run
EVALUATION_LOSS = "evaluation loss"
INTERVALS = "epoch", "step"
_SCRIPT = "{script}"
_ADVICE = "give another directory, or move that folder away"


def check_arguments(
    model: Any, optimizer: Any, loader: Any, *, loss: Any, training_step: Any, strategy: Any, seed: Any, hooks: Any
) -> None:
    """Raise ConfigError for what cannot be trained. TorchModule checks more."""
    for name, value, kind in (("model", model, torch.nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(value, kind):
            raise ConfigError(f"{name} is {_shown(value)}; give an object of torch.{kind.__module__.split('.')[1]}")
    _check_loader("loader", loader)
    if (loss is None) == (training_step is None):
        raise ConfigError(
            f"{'neither' if loss is None else 'both'} of loss= and training_step= given; give one: loss(outputs, "
            "targets), such as torch.nn.functional.cross_entropy, or training_step(model, batch)"
        )
    for name, value in (("loss", loss), ("training_step", training_step)):
        if value is not None and (not callable(value) or isinstance(value, type)):
            raise ConfigError(f"{name} is {_shown(value)}; give a function, or an object such as CrossEntropyLoss()")
    if strategy is not None and (not isinstance(strategy, Strategy) or isinstance(strategy, ServedStrategy)):
        raise ConfigError(
            f"strategy is {_shown(strategy)}; allowed is one without servers, such as mt.Sync() or mt.DiLoCo(50). "
            "For servers use mt.Trainer"
        )
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"seed is {seed!r:.80}; allowed is a whole number of at least 0")
    refuse_others(hooks)


def check_scheduler(scheduler: Any, interval: str, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """Raise ConfigError unless the scheduler is one of this optimizer, or None."""
    if interval not in INTERVALS:
        raise ConfigError(f"scheduler_interval is {interval!r}; allowed: {' and '.join(map(repr, INTERVALS))}")
    if scheduler is not None and not isinstance(scheduler, Scheduler):
        raise ConfigError(f"scheduler is {_shown(scheduler)}; give an object of torch.optim.lr_scheduler")
    check_schedule(scheduler, optimizer)
    if scheduler is not None and interval == "epoch" and not has_length(loader):
        raise ConfigError("the loader has no length, so no epoch is known; give scheduler_interval='step'")


def check_evaluation(evaluation: Any, metrics: Any) -> None:
    """Raise ConfigError unless these are data for evaluation and functions by name, or None."""
    if evaluation is not None:
        _check_loader("evaluation", evaluation)
    elif metrics:
        raise ConfigError("metrics are computed over the evaluation data; give evaluation= too, or leave metrics out")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics is {_shown(metrics)}; give functions by name, such as {{'accuracy': accuracy}}")
    for name, function in (metrics or {}).items():
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or name == EVALUATION_LOSS:
            raise ConfigError(f"a metric is named {name!r}; allowed is a printable name but {EVALUATION_LOSS!r}")
        if not callable(function):
            raise ConfigError(f"the metric {name!r} is {_shown(function)}; give a function")


def steps_of(loader: Any, max_epochs: Any, max_steps: Any, interval: Any) -> tuple[int, int]:
    """Return the last step, and the number of steps between two evaluations. Raise ConfigError for other numbers."""
    numbers = {"max_epochs": max_epochs, "max_steps": max_steps, "interval": interval}
    for name, value in numbers.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} is {value!r:.80}; allowed is a whole number of at least 1")
    if max_epochs is None and max_steps is None:
        raise ConfigError("nothing ends the training; give max_epochs or max_steps")
    if has_length(loader):
        if not len(loader):
            raise ConfigError("the loader has no batch; is its data set empty, or smaller than a batch with drop_last?")
        ends = [] if max_epochs is None else [max_epochs * len(loader)]
        return min(ends + ([] if max_steps is None else [max_steps])), interval or len(loader)
    if max_epochs is not None or interval is None:
        raise ConfigError("the loader has no length, so no epoch is known; give max_steps and interval, not max_epochs")
    return max_steps, interval


def run_folder(world: World, directory: Path | str) -> Path:
    """Return the folder of the run, and print it. Collective.

    Raises:
        ConfigError: the folder is not that of an earlier run of this training, or another process is writing it. Raised
            on every rank.
    """
    folder, remark = Path(), ""
    with world.together("look at the folder of the run"):
        if not isinstance(directory, Path | str) or not str(directory):
            raise ConfigError(f"directory is {_shown(directory)}; give a folder, or None to keep nothing")
        script = Path(sys.argv[0])
        name = script.stem if script.is_file() else "interactive"
        folder = Path(str(directory).replace(_SCRIPT, name))
        if world.is_root and not world.rehearsal:
            remark = _remark(world, folder, _SCRIPT in str(directory))
    if remark and not world.context.failed_ms:  # not for a restart, which prints where it continues
        world.print(remark)
    return folder


def _remark(world: World, folder: Path, is_by_script: bool) -> str:
    """Return the remark about a folder before it is written. Raise ConfigError if it may not be written."""
    if not folder.exists():
        return f"the run is in {folder}"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; {_ADVICE}")
    document = folder / DOCUMENT
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in (CHECKPOINTS, DOCUMENT, ROWS))
    if not document.is_file():
        if others:
            raise ConfigError(f"{folder} is not the folder of a run: it has {others[0]}, and no {DOCUMENT}; {_ADVICE}")
        return f"the run is in {folder}"
    earlier, script = read_document(document), Path(sys.argv[0])
    if CHECKPOINTS not in [Path(one).name for one in earlier.checkpoints]:
        raise ConfigError(f"{folder} has the record of another kind of run, of {earlier.script}; {_ADVICE}")
    is_same = earlier.script == str(script) or Path(earlier.folder, earlier.script).resolve() == script.resolve()
    if is_by_script and not is_same:
        raise ConfigError(f"{folder} has a run of {Path(earlier.folder, earlier.script)}; {_ADVICE}")
    writer = (
        None if earlier.end or (earlier.job and earlier.job == world.context.job) else launcher_pid(earlier.process)
    )
    if writer not in (None, os.getpid()):
        raise ConfigError(f"process {writer} of {world.hosts[world.rank]} is training in {folder}; {_ADVICE}")
    if earlier.arguments != sys.argv[1:]:
        return (
            f"{folder} has a run with the arguments {' '.join(earlier.arguments) or '(none)'}, and this run continues "
            "from it; to train anew, give another directory, or remove that folder"
        )
    return ""


def _check_loader(name: str, loader: Any) -> None:
    if isinstance(loader, ShardedData):
        raise ConfigError(f"{name} is data of prepare() or shard(); give the loader itself")
    if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
        raise ConfigError(
            f"{name} is {_shown(loader)}; give a DataLoader, or a list of batches: something to loop over many times"
        )


def _shown(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"{value!r:.60} ({type(value).__name__})"
