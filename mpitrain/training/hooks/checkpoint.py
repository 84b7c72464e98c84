"""Saves checkpoints, and resumes from them.

A save copies the state, and a thread writes the copy to the disk while training continues. Memory is bounded: there is
one copy, in buffers that are reused. No other copy is taken while it is being written.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from mpitrain.arrays import Array, copy_to_host
from mpitrain.errors import CheckpointError, ConfigError, text_of
from mpitrain.state.manifest import Manifest, information, now
from mpitrain.state.names import split
from mpitrain.state.resume import is_first_of_node, keepers, newest, part_name, prune_parts, read_part, say
from mpitrain.state.store import name_of, prune, write
from mpitrain.training.hooks.hook import Hook
from mpitrain.waiting.control import until
from mpitrain.watching.activity import note_checkpoint
from mpitrain.watching.rank_record import BUSY

if TYPE_CHECKING:
    from mpitrain.training.step import Step
    from mpitrain.training.trainer import Trainer
    from mpitrain.world.world import World


class HostCopies:
    """Host memory for a copy of arrays, made once and reused: new pages cost more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, numpy.ndarray] = {}

    def copy(self, tensors: Mapping[str, Array]) -> dict[str, numpy.ndarray]:
        """Copy CPU or GPU arrays to CPU memory. This overwrites the copies of the previous call."""
        buffers = {}
        for name, value in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = numpy.empty(value.shape, value.dtype)
            copy_to_host(value, buffer)
            buffers[name] = buffer
        self._buffers = buffers
        return buffers


class BackgroundWriter:
    """Does one piece of work at a time, in a thread. Call all methods from the training thread.

    Attributes:
        doing: a name of the current or last work.
        failed: whether the last work raised an error; None before any work.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        """The writing thread calls `report` with the text of an error."""
        self.doing = ""
        self.failed: Exception | None = None
        self._report = report
        self._thread: threading.Thread | None = None
        self._started = 0.0

    def start(self, doing: str, work: Callable[[], None]) -> None:
        """Begin `work`, which `doing` names. Do not call this while other work is under way."""
        assert not self.is_busy

        def run() -> None:
            try:
                work()
                self.failed = None
            except Exception as error:  # training continues after any error
                self.failed = error
                self._report(text_of(error))

        self.doing, self._started = doing, time.monotonic()
        # The thread is not a daemon: a process that ends first finishes what it has begun to write.
        self._thread = threading.Thread(target=run, name="mpitrain checkpoint")
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """True if work is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return time.monotonic() - self._started


_NAP_SECONDS = 0.002
# How long a save waits for an earlier write. So small states that are saved often are all saved, and a disk that hangs
# delays only one step, by no more than this.
_PATIENCE_SECONDS = 1.0


class Checkpoint(Hook):
    """Save every `steps` steps and after the last step. Resume from the newest complete checkpoint.

    A step waits for an in-memory checkpoint, not for the disk. If a save fails, the failure is reported and training
    continues. If the last save fails, the run ends with an error. See docs/how-to/trainer-and-data.md#checkpoints.
    """

    writes_files = True
    keeps_state = True

    def __init__(
        self,
        directory: Path | str,
        steps: int,
        *,
        keep: int | None = 3,
        score: Callable[[], float] | None = None,
        copies: int | None = None,
    ) -> None:
        """
        Args:
            directory: is created if necessary. If the nodes do not share it, each node's directory gets a copy.
            steps: the number of steps between two saves.
            keep: the number of newest checkpoints to keep. None: all.
            score: is called on every rank at every save, and must return the same number on all of them. The checkpoint
                with the highest score is kept too.
            copies: the number of directories with a copy, those of the first nodes. Default: all.

        Raises:
            ConfigError: a number is below 1.
        """
        for name, value in (("steps", steps), ("keep", keep), ("copies", copies)):
            if value is not None and value < 1:
                raise ConfigError(f"Checkpoint({name}={value}): the number must be at least 1")
        self._directory = Path(directory)
        self._steps = steps
        self._keep = keep
        self._score = score
        self._copies = copies
        self._trusted: set[int] = set()  # steps whose checkpoints were written or read here
        # The last checkpoint that this rank began to write: its step, and the commands that the training had received.
        self._begun: tuple[int, dict[str, Any]] = 0, {}
        self._state, self._part = HostCopies(), HostCopies()

    @property
    def directory(self) -> Path:
        """The folder of the checkpoints."""
        return self._directory

    def reads_model(self, trainer: Trainer, step: int) -> bool:
        """See Hook."""
        return step % self._steps == 0 or step == trainer.last_step

    def before_run(self, trainer: Trainer) -> None:
        """See Hook.

        Raises:
            CheckpointError: the directory cannot be used, none of its checkpoints is complete, or the newest one
                belongs to another model. Raised on every rank.
        """
        world = trainer.world
        keeper = self._begin_in(world)
        shared = _is_shared(world, keeper)
        is_first, node = is_first_of_node(world), world.node_rank
        # A node that keeps no checkpoints now may have one of an earlier run.
        reads = is_first and keeper.get(node, node) == node
        whole = newest(world, self._directory, reads=reads, above=trainer.memory_step)
        self._run = (whole.manifest.run if whole else "") or world.broadcast_object(uuid.uuid4().hex)
        if whole is None or whole.manifest.step <= trainer.memory_step:
            return
        with world.together("resume from a checkpoint"):
            trainer.restore(whole.state)
        read = partial(read_part, self._directory, whole.manifest)
        trainer.restore_own(name_of(whole.manifest.step), whole.manifest.parts, read, reads=reads)
        trainer.memory_step = 0
        note_checkpoint()
        self._trusted.add(whole.manifest.step)
        path = self._directory / name_of(whole.manifest.step)
        there = "" if shared else f" of {world.name(whole.rank)}"
        world.print(f"resumed from {path}{there} at step {trainer.step_number}")

    def world_changed(self, trainer: Trainer) -> None:
        """See Hook. A write that is under way is completed first. After that, another rank may write."""
        self._wait(trainer.world, float("inf"))
        self._begin_in(trainer.world)

    def _begin_in(self, world: World) -> dict[int, int]:
        """Determine which ranks of a World write, and which node keeps each node's copies. Collective."""
        self._about = information(world)
        self._is_ending = False

        def report(text: str) -> None:
            if not self._is_ending:  # at the end, the failure is raised
                say(world, f"{text}; training continues, and the next save tries again. Earlier checkpoints are intact")

        self._writer = BackgroundWriter(report)
        keeper = keepers(world, self._directory, self._copies)
        self._writes = is_first_of_node(world) and keeper.get(world.node_rank) == world.node_rank
        if world.num_nodes > 1:
            kept = f"not shared: {len(set(keeper.values()))} of {world.num_nodes} nodes keep a copy"
            is_one = _is_shared(world, keeper)
            world.print(f"checkpoints in {self._directory}: {'all nodes see one directory' if is_one else kept}")
        return keeper

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See Hook.

        Raises:
            CheckpointError: the state holds a value that no checkpoint can hold. Raised on every rank.
        """
        is_last = step.number == trainer.last_step
        if step.number % self._steps and not is_last:
            return
        world = trainer.world
        score = None if self._score is None else float(self._score())
        self._wait(world, float("inf") if is_last else _PATIENCE_SECONDS)
        self._is_ending = is_last
        own = trainer.strategy.own_state_for(reads=self._writes)
        with world.together("save a checkpoint"):
            self._begin(trainer, step, score, own)

    def save_now(self, trainer: Trainer, step: Step) -> None:
        """See Hook. Raises as after_step. Waits for an earlier write, but not for that of this step."""
        self._wait(trainer.world, float("inf"))
        self._begin_if_new(trainer, step)

    def before_end(self, trainer: Trainer, step: Step) -> None:
        """See Hook. Raises as after_run."""
        self._wait(trainer.world, float("inf"))
        self._is_ending = True
        self._begin_if_new(trainer, step)
        self.after_run(trainer)
        path = self._directory / name_of(step.number)
        trainer.world.print(f"mpitrain: {path} is saved; the same command continues from there")

    def after_run(self, trainer: Trainer) -> None:
        """See Hook. Waits until the last checkpoint is on the disk.

        Raises:
            CheckpointError: the last checkpoint could not be written. Raised on every rank. Earlier ones do not change.
        """
        self._wait(trainer.world, float("inf"))
        with trainer.world.together("save the last checkpoint"):
            error = self._writer.failed
            if isinstance(error, CheckpointError):
                raise error
            if error is not None:
                raise CheckpointError(text_of(error)) from error

    def _begin_if_new(self, trainer: Trainer, step: Step) -> None:
        """The same as `_begin`, unless the last write, now complete, has put the same state on the disk."""
        score = None if self._score is None else float(self._score())
        own = trainer.strategy.own_state_for(reads=self._writes)
        with trainer.world.together("save a checkpoint"):
            if self._begun != (step.number, trainer.steering.state()) or self._writer.failed is not None:
                self._begin(trainer, step, score, own)

    def _begin(self, trainer: Trainer, step: Step, score: float | None, own: dict[str, Any]) -> None:
        """Copy the state, and let the thread write it."""
        world = trainer.world
        if not self._writes and not own:
            return
        path = self._directory / name_of(step.number)
        if self._writer.is_busy:
            say(
                world,
                f"{path} was skipped: {self._writer.doing} has taken {self._writer.seconds:.0f} s. "
                "Save less often, or find out what is wrong with the disk",
            )
            return
        self._begun = step.number, trainer.steering.state()
        about = {**self._about, "saved": now()}
        if step.samples:  # without samples, an earlier attempt made the step: see Hook.before_end
            about |= {"loss": step.loss, "learning_rate": step.learning_rate}
        work: list[Callable[[], object]] = []
        if own:
            tensors, values = split(own)
            manifest = Manifest(step.number, self._run, values=values, information=about)
            copies = self._part.copy(tensors)
            work.append(
                partial(write, self._directory, part_name(step.number, world.rank, world.size), manifest, copies)
            )
        if self._writes:
            tensors, values = split(trainer.state())
            manifest = Manifest(
                step.number, self._run, score, parts=world.size if own else 0, values=values, information=about
            )
            work.append(partial(write, self._directory, name_of(step.number), manifest, self._state.copy(tensors)))

        def write_all() -> None:
            for write_one in work:
                write_one()
            self._trusted.add(step.number)
            try:
                self._remove_old(step.number)
            except OSError as error:
                say(world, f"an old checkpoint cannot be removed: {error}")

        self._writer.start(f"writing {path}", write_all)

    def _remove_old(self, last: int) -> None:
        if self._keep is None:
            return
        prune_parts(self._directory, self._keep, last)
        if self._writes:
            prune(self._directory, self._keep, self._trusted)

    def _wait(self, world: World, patience_seconds: float) -> None:
        """Wait until the write finishes or has lasted `patience_seconds`; report a long wait."""

        say_at = world.config.stall_seconds

        def done() -> bool:
            nonlocal say_at
            seconds = self._writer.seconds
            if not self._writer.is_busy or seconds > patience_seconds:
                return True
            # Reported here: all ranks wait for disks, none for another rank, so no agent reports the wait.
            if seconds > say_at:
                say(world, f"{self._writer.doing} has taken {seconds:.0f} s; is the disk there?")
                while say_at <= seconds:
                    say_at *= 2
            return False

        world.control.wait(until(done, lambda: _NAP_SECONDS), self._writer.doing, status=BUSY)


def _is_shared(world: World, keeper: Mapping[int, int]) -> bool:
    """True if all nodes see one directory; `keeper` is the result of `keepers`."""
    return len(keeper) == world.num_nodes and set(keeper.values()) == {0}
