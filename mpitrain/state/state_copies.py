"""In-memory checkpoints of a training, which outlive the ranks: a restart resumes from them instead of from the disk.

    a step ─> hooks ─> copy, every k steps ─> the next step ...        the keeper of each host has the memory
    restart ─> the newest whole copy of all hosts ─> Checkpoint: is there a newer one on the disk? ─> continue

The training is a Trainer's, or a loop with mt.keep (keep.py).

The first rank of each node copies the content of a checkpoint. Each rank copies its own state. The snapshot agents
(mpitrain/launch/keeper.py) belong to `mpitrain run`. docs/how-to/fault-tolerance.md has more.

The next attempt of a job may be ready while this one trains: then the earlier ranks leave, and the new ones continue.

    ranks before: copy ─> commit ─> hooks closed ─> their keepers ─> end
                                                         │
    these ranks: init() ─> build ─> wait at their keepers ┴─> all have heard it ─> read the copy ─> train

On a host without earlier ranks there is nothing to wait for. So all ranks also wait for each other, mostly asleep: a
wait in MPI would take time from the cores on which the earlier ranks still train.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from mpitrain.errors import CheckpointError, LaunchError, NoRoomError, everywhere
from mpitrain.launch.kept import STAYS, KeeperLine
from mpitrain.state.copies import KeptCopies, part_name, slots_of, state_name
from mpitrain.state.memory_slot import MemorySlot
from mpitrain.state.names import split
from mpitrain.state.resume import is_first_of_node, say
from mpitrain.watching.activity import note_checkpoint, own_activity
from mpitrain.watching.rank_record import BUSY
from mpitrain.world.world import World

_LOOK_SECONDS = 0.002


def wait_for_turn(world: World, line: KeeperLine | None) -> tuple[int, int]:
    """Wait until the ranks of the previous attempt have left. Collective.

    Return the step after which they left, and when, by time.time() of their host, in milliseconds.

    Raises:
        LaunchError: the snapshot agent of a host does not answer. Raised on every rank.
    """
    activity = own_activity()
    assert activity is not None, "a rank with a keeper has a record"
    entry = activity.begin(BUSY, "ready, until the ranks before leave", time.monotonic())
    activity.get_ready()
    left: list[int] = []
    problem = None if line else LaunchError(f"{world.name()}: this host has no keeper, so its ranks cannot take over")
    if line is not None:
        try:
            left = line.follow(world.context.follows)
        except OSError as error:
            problem = LaunchError(f"{world.name()}: the keeper of this host does not answer: {error}")
    everyone = world.objects.Ibarrier()
    while not everyone.Test():
        time.sleep(_LOOK_SECONDS)
    activity.end(entry)
    with world.together("take over from the ranks before"):
        if problem is not None:
            raise problem
    step, ms = next(told for told in world.allgather(left) if told)
    return step, ms


def end_try(step: int) -> NoReturn:
    """End this process as if the script were over: on other hosts, the next attempt continues after `step`."""
    if activity := own_activity():
        activity.leave(step)
    raise SystemExit(0)


if TYPE_CHECKING:
    from mpitrain.job.job import Job

# The share of the time that the copies may take.
_SHARE = 0.01


def steps_between(copy_seconds: float, step_seconds: float) -> int:
    """The smallest number of steps between copies at which they take at most their share of the time."""
    return max(1, math.ceil(copy_seconds / (_SHARE * max(step_seconds, 1e-9))))


class Copied(Protocol):
    """An object with a state to copy: a Trainer, or a loop with mt.keep.

    Attributes:
        world: its ranks share the state.
        step_number: the number of steps made so far.
        last_step: the number of the step after which the run ends; None: not known.
        memory_step: set by `resume`: the step of the copy that was restored.
    """

    step_number: int
    last_step: int | None
    memory_step: int

    @property
    def world(self) -> World: ...

    def state(self) -> dict[str, Any]:
        """The common state. Not collective."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`. Raises CheckpointError if it belongs to another training."""

    def own_state(self, *, reads: bool = True) -> dict[str, Any]:
        """The state that belongs to this rank; {}: none. Collective. Only ranks with `reads` call `state`
        afterwards."""

    def restore_own(self, name: str, parts: int, read_part: Callable[[int], dict[str, Any]], *, reads: bool) -> None:
        """Continue from the ranks' own states. Collective; see resume.own_part for the arguments."""


class StateCopies:
    """The copies of one run. All ranks make the same calls.

    Attributes:
        steps: the number of steps from copy to copy, which is also the most that may have to be repeated. 0: nothing is
            copied.
        why_not: why there is no copy to continue from.
        taken_over: the step after which the ranks before left, and when, by time.time() in milliseconds; None: these
            ranks did not start beside them.
    """

    def __init__(self, job: Job, run: int, first_step: int) -> None:
        """`run` counts the runs in this process. `first_step` is the number of steps made before."""
        self.steps = 0
        self.why_not = ""
        self.taken_over: tuple[int, int] | None = None
        self._job, self._run, self._first_step = job, run, first_step
        self._world: World | None = None
        self._line: KeeperLine | None = None
        self._slots: dict[str, list[MemorySlot]] = {}  # by name; those that this rank writes
        self._is_refused = False
        self._has_copied = False
        self._version = 0, 0  # of the last copy that was begun; see MemorySlot
        self._last_step, self._last_seconds = 0, 0.0  # of the last copy, and when it ended

    def resume(self, trained: Copied) -> None:
        """Continue from the newest complete copy, if there is one. Collective.

        If the ranks of the previous attempt still train, wait until they have left.

        Raises:
            LaunchError: see wait_for_turn; or the copies are lost since these ranks have rehearsed.
            CheckpointError: the copy belongs to another model or data set. Raised on every rank.
        """
        self._enter(trained)
        world, rehearsed = trained.world, 0
        if self._run == 1 and world.context.follows and world is self._job.world:
            rehearsed = self._rehearse(trained)
            self.taken_over = wait_for_turn(world, self._line)
        if not self.steps:
            return
        kept = KeptCopies(world, self._line, self._run)
        kept.drop_newer()
        if rehearsed and kept.step <= self._first_step:
            raise everywhere(
                LaunchError(
                    f"{world.name()}: the copy of step {rehearsed}, which these ranks loaded before their turn, is in "
                    "the memory of no host any more. These ranks cannot continue from it, nor begin anew; a new one can"
                )
            )
        if not kept.step:
            self.why_not = "no host that takes part has a whole copy"
            return
        if kept.step <= self._first_step:  # the script has restored something newer
            self.why_not = f"its newest copy is of step {kept.step}"
            return
        copy = kept.read()
        with world.together("resume from memory"):
            trained.restore(copy.state)
        name = f"the copy of step {copy.step} in memory"
        trained.restore_own(name, copy.parts, kept.part, reads=is_first_of_node(world))
        trained.memory_step = self._last_step = copy.step
        self._version = kept.version

    def _rehearse(self, trained: Copied) -> int:
        """Continue from the current copy, although a newer one will follow. Collective. Return its step; 0: there is
        none.

        The first time takes twice as long: pages of memory and connections are new.
        """
        kept = KeptCopies(trained.world, self._line, self._run)
        # A copy that is replaced while it is read is meaningless. Any other error will also occur with the last copy.
        with suppress(Exception):
            if kept.step > self._first_step:
                trained.restore(kept.read().state)
        return kept.step if kept.step > self._first_step else 0

    def after_step(self, trained: Copied, *, is_due: bool = False) -> int:
        """Copy the state, if it is time to, or `is_due`. Collective; call it when all hooks have seen the step.

        Return the launcher's request, the same on all ranks. LEAVES: this attempt must end here, and another one
        continues from this copy on other hosts. SAVES: no other attempt follows. STAYS: the training continues.

        Raises:
            CheckpointError: a value of the state cannot be written, and --max-restarts N was given. Raised on every
                rank. By default such a job makes no copies, and warns.
        """
        if trained.world is not self._world:
            self._enter(trained)
        step, world = trained.step_number, trained.world
        fixed = world.config.memory_steps
        if not is_due:
            is_due = step % fixed == 0 if fixed else not self._has_copied or step >= self._last_step + self.steps
        if not self.steps or not (is_due or step == trained.last_step):
            return STAYS
        step_seconds = (time.perf_counter() - self._last_seconds) / max(1, step - self._last_step)
        copy_seconds, problem = self._copy(trained)
        asking = time.perf_counter()
        wish = self.wish()
        copy_seconds += time.perf_counter() - asking
        is_refused = self._is_refused and is_first_of_node(world)
        of_ranks = world.allgather((copy_seconds, step_seconds, is_refused, wish, problem))
        seconds, step_seconds_of, refused, wishes, problems = zip(*of_ranks, strict=True)
        if text := next(filter(None, problems), ""):
            if world.context.must_copy:
                raise everywhere(CheckpointError(text))
            self.steps, self.why_not = 0, text
            world.print(f"mpitrain: no in-memory checkpoints are taken, so a failure ends the job: {text}")
            return STAYS
        if sum(refused) == world.num_nodes:
            self.steps = 0
            return STAYS
        self.steps = fixed or steps_between(max(seconds), step_seconds_of[0])
        if not self._has_copied:
            self._has_copied = True
            note_checkpoint()
            self._drop_old()
        self._last_step, self._last_seconds = step, time.perf_counter()
        return STAYS if step == trained.last_step else max(wishes)

    def leave(self, step: int, ms: int) -> None:
        """Let the ranks of the next attempt continue, if they wait: this attempt's ranks change nothing any more. See
        KeeperLine.leave.
        """
        assert self._world is not None
        if self._line is not None and is_first_of_node(self._world):
            with suppress(OSError):  # the next attempt says that the keeper is gone
                self._line.leave(step, ms)

    def close(self) -> None:
        """Release the memory, which stays with the snapshot agent."""
        self._let_go()
        if self._line is not None:
            self._line.close()
            self._line = None

    def _enter(self, trained: Copied) -> None:
        """Find the snapshot agents of a World. Collective."""
        self.close()
        self._world = world = trained.world
        self.steps, self._is_refused, self._has_copied = 0, False, False
        self._last_step, self._last_seconds = trained.step_number, time.perf_counter()
        if not world.context.keeper:
            return
        if world is not self._job.world:
            self.why_not = "a Trainer in a World of its own keeps no in-memory checkpoints"
            if world.context.must_copy:
                world.print(f"mpitrain: {self.why_not}")
            return
        try:
            self._line = KeeperLine(world.context.keeper, world.context.job)
            self._line.enter()
        except OSError as error:
            if is_first_of_node(world):
                say(world, f"no copy of the state is kept in memory here: this host's keeper does not answer ({error})")
        has_keeper, versions = zip(*world.allgather((self._line is not None, self._version)), strict=True)
        self._version = max(versions)  # a rank may have been lost while others had begun the next copy
        if any(has_keeper):
            self.steps = world.config.memory_steps or 1
        else:
            self.why_not = "no host has a keeper"

    def _copy(self, trained: Copied) -> tuple[float, str]:
        """Copy this rank's part of the state.

        Also return the seconds that each later copy will take, and the reason if the state cannot be copied at all.
        """
        world = trained.world
        began, waited = time.perf_counter(), 0.0
        own = trained.own_state(reads=is_first_of_node(world))  # on all ranks
        step = trained.step_number
        self._version = step, self._version[1] + 1 if self._version[0] == step else 0
        if self._line is None or self._is_refused:
            self._is_refused = True
            return 0.0, ""
        try:
            states = {state_name(self._run): trained.state()} if is_first_of_node(world) else {}
        except CheckpointError as error:  # an error of the script, which would also affect later copies
            return 0.0, f"{world.name()}: {error}"
        try:
            if own:
                states[part_name(self._run, world.rank)] = own
            for name, state in states.items():
                tensors, values = split(state)
                reserving = time.perf_counter()
                slots = self._slots_for(self._line, name)
                oldest = min(slots, key=lambda slot: slot.version)
                for slot in slots:
                    if slot is oldest or not slot.step:  # a slot that grows loses its copy
                        slot.reserve(tensors, values)
                waited += time.perf_counter() - reserving
                oldest.write(*self._version, world.size if own else 0, tensors, values)
        except (NoRoomError, CheckpointError, OSError) as error:
            self._is_refused = True
            self._give_up(self._line)
            say(
                world,
                f"the state has no in-memory checkpoint here, so a restart may continue from an older one: {error}",
            )
        return time.perf_counter() - began - waited, ""

    def wish(self) -> int:
        """The request of this rank's snapshot agent at a copy. Only the first run of a script can end this way."""
        if self._run != 1 or self._line is None or self._world is None or not is_first_of_node(self._world):
            return STAYS
        try:
            return max(STAYS, self._line.wish())
        except OSError:  # the agent is gone; the next attempt reports it
            return STAYS

    def _slots_for(self, line: KeeperLine, name: str) -> list[MemorySlot]:
        """The two slots of that name. Those of an earlier attempt are reused."""
        if name not in self._slots:
            slots = slots_of(line, name)
            if not slots:
                slots = [MemorySlot(), MemorySlot()]
                line.keep(name, [slot.descriptor for slot in slots])
            for slot in slots:
                if slot.version >= self._version:  # the ranks have continued from an earlier one
                    slot.clear()
            self._slots[name] = slots
        return self._slots[name]

    def _give_up(self, line: KeeperLine) -> None:
        """Free the memory of slots that hold no copy. A copy of an earlier step is better than none."""
        for name, slots in self._slots.items():
            if not any(slot.step for slot in slots):
                with suppress(OSError):
                    line.keep(name, [])
        self._let_go()

    def _let_go(self) -> None:
        for slots in self._slots.values():
            for slot in slots:
                slot.close()
        self._slots = {}

    def _drop_old(self) -> None:
        """Make the snapshot agent drop the copies of earlier runs, and of ranks that are on another host now."""
        world, line = self._world, self._line
        assert world is not None
        if line is None or not is_first_of_node(world):
            return
        here = [rank for rank, node in enumerate(world.node_ranks) if node == world.node_rank]
        with suppress(OSError):  # the next attempt says that the keeper is gone
            line.keep_only([state_name(self._run), *(part_name(self._run, rank) for rank in here)], self._run)
