"""The shortest way to train: a model, an optimizer and a DataLoader, with checkpoints, evaluation, a log and a record.

    python, 1 rank                             mpitrain run -n 3
    loader ─ batch of 64 ─ step                loader ─┬─ 22 ─┐
                                                       ├─ 21 ─┼─ mean over samples ─ the same step
                                                       └─ 21 ─┘

The parts exist elsewhere: TorchModule computes, ShardedData divides the batches, mpitrain.Trainer runs the steps, and
its hooks save and measure. This file only combines them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from mpitrain.adapters.torch_module import TorchModule
from mpitrain.adapters.torch_random import restored, seeded
from mpitrain.adapters.torch_state import (
    Scheduler,
    read_scheduler_state,
    read_state_bytes,
    scheduler_state,
    state_bytes,
)
from mpitrain.errors import DataError, everywhere
from mpitrain.job.start import init
from mpitrain.strategies import Strategy
from mpitrain.strategies.sync import Sync
from mpitrain.torch.batch_weight import numbers_of
from mpitrain.torch.batches import arrays_of
from mpitrain.torch.sharded import ShardedData
from mpitrain.torch.trainer_arguments import (
    CHECKPOINTS,
    EVALUATION_LOSS,
    check_arguments,
    check_evaluation,
    check_scheduler,
    run_folder,
    steps_of,
)
from mpitrain.training.hooks.checkpoint import Checkpoint
from mpitrain.training.hooks.evaluation import Evaluation
from mpitrain.training.hooks.hook import Hook
from mpitrain.training.hooks.log import Log
from mpitrain.training.hooks.record import Record
from mpitrain.training.hooks.stop import StopAtStep
from mpitrain.training.metrics import Metrics, mean_of_all
from mpitrain.training.parts import Parts
from mpitrain.training.step import Step
from mpitrain.training.trainer import Trainer
from mpitrain.training.writers.json_lines import JsonLines
from mpitrain.world.world import World

# A function of (outputs, targets), or with `training_step` of (model, batch).
Function = Callable[[Any, Any], Any]


class TorchTrainer(Trainer):
    """A Trainer of a model, an optimizer and a DataLoader. Its public name is mpitrain.torch.Trainer.

        trainer = mpitrain.torch.Trainer(model, optimizer, loader, loss=cross_entropy, max_epochs=3)
        trainer.fit()

    The script runs alone, as `python train.py`, and on many ranks, as `mpitrain run -n 3 train.py`, with equal results
    up to rounding: a batch of the loader is the batch of all ranks together, and means are over samples.

    The random numbers of the loss, such as those of dropout, depend on `seed`, the step and the rank. So a resumed run
    draws the same numbers as an uninterrupted one. The order of the samples is that of one process.

    It also has everything that mpitrain.Trainer has, such as `step_number`, `adapter` and `close`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[Any],
        *,
        loss: Function | None = None,
        training_step: Function | None = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        scheduler: Scheduler | None = None,
        scheduler_interval: str = "epoch",
        evaluation: Iterable[Any] | None = None,
        metrics: Mapping[str, Function] | None = None,
        interval: int | None = None,
        directory: Path | str | None = "runs/{script}",
        clip_norm: float | None = None,
        precision: str | None = None,
        strategy: Strategy | None = None,
        seed: int = 0,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Collective: every rank gives the same arguments. Parameters and buffers get rank 0's values.

        Args:
            model: is on the CPU. It is trained in place, in the mode (train or eval) in which it is given.
            optimizer: has all trained parameters of the model, and takes one backward pass for each step.
            loader: a DataLoader, or any iterable that yields the same batches on every rank and may be looped over
                again. `mpitrain.torch.prepare` says how batches are divided.
            loss: `loss(outputs, targets)`, the mean over the samples, for batches `(inputs, targets)`; outputs are
                `model(inputs)`. For example torch.nn.functional.cross_entropy.
            training_step: in place of `loss`: `training_step(model, batch)` returns the mean loss over the samples of
                a batch of any form.
            max_epochs, max_steps: end the training there, counted from its beginning, also across a resume. Give at
                least one; the earlier one ends it.
            scheduler: of torch.optim.lr_scheduler, for this optimizer.
            scheduler_interval: "epoch" or "step": when the scheduler is stepped.
            evaluation: a loader for evaluation. Each sample counts once. The model is in eval mode during evaluation.
            metrics: by name, functions with the arguments of `loss` or of `training_step`. Each returns a number, the
                mean over the samples, or a tensor with an entry for each sample: `lambda y, t: y.argmax(1) == t`.
            interval: the number of steps between two evaluations and between two checkpoints. Default: an epoch.
                Both also follow the last step.
            directory: the folder of the run: `checkpoints`, and the record that `mpitrain top`, `plot` and `dashboard`
                show. If it has checkpoints, the training continues from the newest one. {script} is the name of the
                script. None: nothing is saved.
            clip_norm, precision: as for TorchModule.
            strategy: for example mt.DiLoCo(50). Default: mt.Sync(). Virtual ranks and servers need mpitrain.Trainer.
            seed: of the random numbers that the loss draws, at least 0.
            hooks: more hooks, such as mt.EarlyStopping or mt.tunable's. They come after the evaluation.

        Raises:
            ConfigError: an argument is not allowed, or the folder belongs to something else. Raised on every rank.
            MismatchError: the ranks have different arguments, data or models. Raised on every rank.
            DataError: the first batch has fewer samples than there are ranks. Raised on every rank.
        """
        world = init()
        with world.together("check the arguments of mpitrain.torch.Trainer"):
            check_arguments(
                model,
                optimizer,
                loader,
                loss=loss,
                training_step=training_step,
                strategy=strategy,
                seed=seed,
                hooks=hooks,
            )
            check_scheduler(scheduler, scheduler_interval, optimizer, loader)
            check_evaluation(evaluation, metrics)
            last_step, interval = steps_of(loader, max_epochs, max_steps, interval)
        folder = None if directory is None else run_folder(world, directory)
        about = [f"last step {last_step}, interval {interval}, scheduler_interval {scheduler_interval}, seed {seed}"]
        world.agree("compare the arguments of mpitrain.torch.Trainer", [*about, f"metrics {list(metrics or ())}"])
        self._folder, self._seed = folder, seed
        self._uses_outputs = training_step is None
        function = loss if loss is not None else training_step
        assert function is not None  # see check_arguments
        self._model, self._function, self._steps_made = model, function, 0
        self._metrics = {EVALUATION_LOSS: function, **(metrics or {})}
        self._evaluation: ShardedData | None = None
        self._evaluations: Evaluation | None = None
        own: list[Hook] = [StopAtStep(last_step)]
        schedule = scheduler if scheduler_interval == "step" else None
        if scheduler is not None and schedule is None:
            own.append(_EpochSchedule(scheduler, len(loader)))  # type: ignore[arg-type] # checked
        own.append(Log())
        if evaluation is not None:
            self._evaluations = Evaluation(interval, lambda _: self._evaluated())
            own.append(self._evaluations)
        own += hooks
        if folder is not None:
            own += [Record([JsonLines(folder)]), Checkpoint(folder / CHECKPOINTS, interval)]

        def build(world: World) -> Parts:
            data = LoaderData(world, loader)
            if evaluation is not None:
                self._evaluation = ShardedData(world, evaluation)

            def loss_of(module: torch.nn.Module, _: Any) -> Any:  # of the batch itself, which may have any form
                with seeded((self._seed, data.number, world.rank)):
                    return self._applied(module, data.batch)(self._function)

            with world.together("prepare the model of mpitrain.torch.Trainer"):
                adapter = TorchModule(
                    model, loss_of, optimizer, schedule=schedule, clip_norm=clip_norm, precision=precision
                )
            return Parts(adapter, Sync() if strategy is None else copy.deepcopy(strategy), data)

        super().__init__(build, own)

    def fit(self) -> dict[str, float]:
        """Train to the end, from the newest checkpoint if there is one. Return the metrics of the last evaluation.

        Collective. The metrics are the same on every rank; {} without `evaluation`. See also mpitrain.Trainer.run.

        Raises:
            GradientError: as for mpitrain.Trainer.run.
            CheckpointError: the checkpoints are of another model or other data. Raised on every rank.
        """
        before = self._steps_made
        try:
            self.run()
        finally:
            self.data.close()  # type: ignore[attr-defined] # it is a LoaderData
        if self._steps_made == before and self._folder and not self.world.rehearsal:
            self.world.print(
                f"all {self.step_number} steps were made before; to train anew, give another directory, "
                f"or remove {self._folder}"
            )
        if self._evaluations is None:
            return {}
        results = self._evaluations.results
        return dict(results.get(self.step_number) or self._evaluated())

    def step(self) -> Step:
        """See mpitrain.Trainer.step."""
        made = super().step()
        self._steps_made += 1
        return made

    def _applied(self, model: torch.nn.Module, batch: Any) -> Callable[[Function], Any]:
        """Return a function that applies a loss or metric to this batch."""
        if not self._uses_outputs:
            return lambda function: function(model, batch)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            given = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
            raise DataError(
                f"{self.world.name()}: loss= is for batches (inputs, targets), and this batch is {given}; give "
                "training_step= instead, a function of model and batch that returns the loss"
            )
        outputs = model(batch[0])
        return lambda function: function(outputs, batch[1])

    def _evaluated(self) -> dict[str, float]:
        """Return the mean of each metric over the evaluation data. Collective. Random numbers continue as before."""
        assert self._evaluation is not None
        model = self._model
        modes = {module: module.training for module in model.modules()}  # some may be frozen in eval mode
        parts: list[tuple[int, Metrics]] = []
        model.eval()
        try:
            with torch.no_grad(), restored():
                for batch in self._evaluation:
                    assert self._evaluation.share is not None
                    count, apply = self._evaluation.share.count, self._applied(model, batch)
                    values = {name: apply(function) for name, function in self._metrics.items()}
                    if count:  # otherwise the batch has only a sample that does not count
                        parts.append((count, {name: self._mean(name, value, count) for name, value in values.items()}))
        finally:
            for module, mode in modes.items():
                module.training = mode
        return mean_of_all(self.world, parts)

    def _mean(self, name: str, value: Any, count: int) -> float:
        """Return a metric of a batch of `count` samples as a number."""
        try:
            numbers = numbers_of(value)
        except (TypeError, ValueError):
            numbers = numpy.empty(0)
        if numbers.ndim and len(numbers) != count:
            kind = f"has the shape {tuple(value.shape)}" if hasattr(value, "shape") else f"is a {type(value).__name__}"
            raise DataError(
                f"{self.world.name()}: the metric {name!r} of a batch of {count} samples {kind}; allowed is a number, "
                "the mean over the samples, or a tensor with an entry for each sample"
            )
        return float(numbers.mean())


class _EpochSchedule(Hook):
    """Steps a scheduler of PyTorch after each epoch."""

    def __init__(self, scheduler: Scheduler, steps_per_epoch: int) -> None:
        self._scheduler, self._steps = scheduler, steps_per_epoch

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook."""
        if step.number % self._steps == 0:
            self._scheduler.step()

    def state(self) -> dict[str, Any]:
        """See Hook."""
        return {"schedule": scheduler_state(self._scheduler)}

    def restore(self, state: dict[str, Any]) -> None:
        """See Hook."""
        self._scheduler.load_state_dict(read_scheduler_state(self._scheduler, state["schedule"]))


class LoaderData:
    """A loader's batches, repeated without end, for a Trainer: this rank's part of each.

    Attributes:
        batch: the newest part, as the loader's `collate_fn` has made it. If this rank has no sample of it, it has one
            that does not count.
    """

    def __init__(self, world: World, loader: Iterable[Any]) -> None:
        """Collective; see ShardedData for the errors."""
        self._parts = ShardedData(world, loader)
        self._batches: Iterator[Any] = iter(())
        self.batch: Any = None

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch."""
        return len(self._parts)

    @property
    def epoch(self) -> int:
        """The number of epochs before this one."""
        return self._parts.epoch

    @property
    def number(self) -> int:
        """The number of the newest batch since the beginning of the training."""
        return self._parts.step

    def __next__(self) -> tuple[list[numpy.ndarray], int]:
        """Return the arrays of this rank's part of the next batch, and its number of samples. Collective.

        Raises:
            DataError: the loader has no batch. Raised on every rank. See ShardedData for other errors.
        """
        for _ in range(3):  # the rest of this epoch; the rest of a resumed epoch, which may be empty; the next epoch
            for batch in self._batches:
                self.batch = batch
                assert self._parts.share is not None
                return arrays_of(batch), self._parts.share.count
            self._batches = iter(self._parts)
        raise everywhere(
            DataError("the loader has no batch; give data with at least one, that can be looped over again")
        )

    def state(self) -> dict[str, Any]:
        """Return the position, which does not depend on the number of ranks. Not collective."""
        return {"position": state_bytes(self._parts.state_dict())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`. Raises CheckpointError if it is malformed."""
        position = read_state_bytes(state["position"], "position in the data", "mpitrain.torch.Trainer")
        self.close()
        self._parts.load_state_dict(position)
        self._parts.go_on_as_drawn()

    def close(self) -> None:
        """End the iteration over the loader."""
        self._batches = iter(())
