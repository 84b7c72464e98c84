"""Save, and go on from what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError
from mpitrain.training.checkpoint import latest, load, save
from mpitrain.training.hooks.hook import Hook

if TYPE_CHECKING:
    from mpitrain.training.trainer import Step, Trainer


class Checkpoint(Hook):
    """Save every `steps` steps and after the last one, and go on from the newest checkpoint there is.

    Rank 0 writes and reads; the replicas are equal. The directory is one that rank 0 can write.
    """

    def __init__(self, directory: Path | str, steps: int) -> None:
        if steps < 1:
            raise ConfigError(f"Checkpoint every {steps} steps: it takes at least 1")
        self._directory = Path(directory)
        self._steps = steps

    def before_run(self, trainer: Trainer) -> None:
        """See Hook.

        Raises:
            CheckpointError: the newest checkpoint is damaged or of another model. On every rank.
        """
        world = trainer.world
        state = None
        with world.together("resume from a checkpoint"):
            path = latest(self._directory) if world.is_root else None
            state = load(path) if path else None
        state = world.broadcast(state)
        if state is None:
            return
        with world.together("resume from a checkpoint"):
            trainer.restore(state)
        world.print(f"resumed from {path} at step {trainer.step_number}")

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook.

        Raises:
            CheckpointError: it could not be written. On every rank; earlier ones are untouched.
        """
        if step.number % self._steps and step.number != trainer.last_step:
            return
        with trainer.world.together("save a checkpoint"):
            if trainer.world.is_root:
                save(self._directory, step.number, trainer.state())
