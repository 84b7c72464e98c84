"""The course of a run: its stages, and where it continues after the loss of a rank.

    begin ─> before step ─> step ─> after step ─> before step ─> ... ─> after step ─> end
                              │
                              └── commit: all ranks have made the step, or none has

Between two commits, ranks may be at different stages. If one is lost, the others continue in a new World at the
earliest of their stages, with the parameters, the position in the data and the hooks of the last commit. So every step
counts once. Hooks may be called twice around such a loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from mpitrain.errors import CheckpointError, ConfigError, everywhere
from mpitrain.launch.kept import SAVES, STAYS
from mpitrain.state.names import host_copy
from mpitrain.state.state_copies import StateCopies, end_try
from mpitrain.strategies import ServedStrategy
from mpitrain.training.hooks.hook import Hook, restore_all, states_of
from mpitrain.training.run_event import RunEvent
from mpitrain.training.steering import wait_in_pause
from mpitrain.training.step import Step, unmade
from mpitrain.watching.activity import own_activity
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpitrain.job.job import Job
    from mpitrain.job.recovery import Recovery
    from mpitrain.training.parts import Built
    from mpitrain.training.trainer import Trainer

# The stages are in the order in which ranks reach them between two commits.
_BUILD, _BEGIN, _AFTER_STEP, _BEFORE_STEP, _STEP, _END, _LEFT, _OVER = range(8)


class Course:
    """Takes a Trainer through its stages.

    Attributes:
        is_running: the hooks have begun, and the run has not ended.
    """

    def __init__(self, trainer: Trainer, built: Built, begin: Callable[[World], None], job: Job) -> None:
        """`begin` makes the Trainer's parts for a World; they are in `built`."""
        self._trainer = trainer
        self._built = built
        self._begin = begin
        self._job = job
        self._stage = _BUILD
        self._copies = StateCopies(job, 0, 0)
        self._noted: dict[int, tuple[dict[str, Any], int | None, dict[str, float], dict[str, Any]]] = {}
        self._made: Step | None = None
        self.is_running = False

    def build(self, world: World) -> None:
        """Make all parts for the first World of this Trainer.

        Raises:
            ConfigError: the Trainer runs inside mpitrain.elastic, which would continue at a different place; or the job
                has servers, and the strategy trains without them.
        """
        if self._job.is_elastic:
            raise ConfigError("a Trainer continues by itself after the loss of a rank; do not run it in mt.elastic")
        self._go_through(lambda: self._begin(world))
        strategy, role = self._trainer.strategy, self._job.role.kind
        if role and not isinstance(strategy, ServedStrategy):
            raise ConfigError(
                f"{world.name()} is a {role} of a job with servers, and `build` has made the strategy "
                f"{type(strategy).__name__}, which would train in each process separately; allowed is "
                "mt.ParameterServer. Use it, or start the script without servers"
            )

    def run(self) -> None:
        """See Trainer.run."""
        served = self._trainer.served
        if served and served.role != "server":
            served.work(self._trainer.data)
            raise SystemExit(0)
        stages = {
            _BUILD: self._begin_run,  # a rank was lost while others were still building
            _BEGIN: self._begin_run,
            _AFTER_STEP: self._after_step,
            _BEFORE_STEP: self._before_step,
            _STEP: self._make_step,
            _END: self._end_run,
        }
        self._stage = _BEGIN
        self._job.num_runs += 1
        self._copies = StateCopies(self._job, self._job.num_runs, self._trainer.step_number)
        error: BaseException | None = None
        try:
            try:
                while self._stage not in (_LEFT, _OVER):
                    self._go_through(stages[self._stage])
            finally:
                self.is_running = False
                for hook in self._trainer.hooks:
                    hook.close()
        except BaseException as raised:
            error = raised  # sys.exception() would also name one that the caller handles
            raise
        finally:
            if served:
                served.end_serving(error)
            if self._stage == _LEFT:
                self._copies.leave(self._trainer.step_number, self._left_ms)
            self._copies.close()
        if self._stage == _LEFT:
            end_try(self._trainer.step_number)
        self._trainer.steering.end()

    def _begin_run(self) -> None:
        trainer = self._trainer
        trainer.memory_step = 0
        self._copies.resume(trainer)
        copied = trainer.memory_step
        for hook in self._keeping_first():
            hook.before_run(trainer)
        if trainer.world.context.saves and self._save_only(copied):
            self._leave()
            return
        self._say_origin(copied)
        self._note_copies()
        self.is_running = True
        if trainer.last_step is None and not any(hook.ends_run for hook in trainer.hooks):
            raise ConfigError("nothing ends this run; add the hook StopAtStep(number)")
        if trainer.world.watch:
            trainer.world.watch.trains(type(trainer).__name__, trainer.last_step)
        if trainer.step_number == 0 and trainer.last_step and (doubt := trainer.strategy.doubt(trainer.last_step)):
            trainer.world.print(f"mpitrain: {doubt}")
        if trainer.served:
            trainer.served.begin_serving(trainer.data)
        trainer.steering.begin(trainer, self._job.num_runs)
        if trainer.steering.saves and trainer.memory_step:  # the state from the disk exists already
            self._save_if_told()
        trainer.steering.saves = False
        trainer.begin_steps()
        self._leave_or_stay(STAYS)

    def _before_step(self) -> None:
        self._trainer.metrics = {}
        for hook in self._trainer.hooks:
            self._prepare(hook, "before_step", self._trainer.step_number + 1)
            hook.before_step(self._trainer)
        self._stage = _STEP

    def _make_step(self) -> None:
        trainer = self._trainer
        if self._recovery:  # the exchange changes all of these
            keeps = trainer.strategy.keeps_own_state
            own = {} if keeps else trainer.strategy.own_state()
            # `state` has PowerSGD's factors: a sum replaces them, perhaps only on some ranks before a loss.
            self._before = trainer.data.state(), (own, trainer.strategy.state()) if own else None
        self._made = trainer.step()
        self._come_to(_AFTER_STEP)

    def _after_step(self) -> None:
        made, trainer = self._made, self._trainer
        assert made is not None
        if trainer.steering.is_due(made.number, trainer.order_number):  # first: it may end the run, and belongs to
            trainer.steering.obey(trainer, trainer.order_number, made)  # the checkpoint of this step
        self._end_round()
        # A checkpoint holds what the other hooks have seen of the step.
        for hook in sorted(self._trainer.hooks, key=lambda hook: hook.keeps_state):
            if hook.keeps_state:  # one of the others may have ended the run
                self._end_round()
            self._prepare(hook, "after_step", made.number)
            hook.after_step(trainer, made)
        self._save_if_told()
        wish = self._copies.after_step(trainer, is_due=trainer.steering.has_news)
        trainer.steering.has_news = False
        self._note_copies()
        self._leave_or_stay(wish)

    def _save_if_told(self) -> None:
        """Save now if a command has requested it."""
        steering = self._trainer.steering
        if steering.saves:
            self._end_round()
            for hook in self._keeping_first():
                hook.save_now(self._trainer, self._made or unmade(self._trainer.step_number))
        steering.saves = False

    def _obey_in_pause(self, heard: int) -> None:
        self._trainer.steering.obey(self._trainer, heard, self._made)
        self._save_if_told()

    def _leave_or_stay(self, wish: int) -> None:
        """Go to the next stage, after a pause if there is one; or leave, if the launcher requests it."""
        trainer = self._trainer
        if wish == STAYS and trainer.steering.pause and self._next_stage() == _BEFORE_STEP:
            self._made = self._made or trainer.steering.paused_step()  # of the attempt before
            wish = wait_in_pause(trainer, self._copies, self._obey_in_pause)
        if wish == SAVES:
            self._save(self._made or unmade(trainer.step_number))
        if wish == STAYS:
            self._come_to(self._next_stage())
            return
        self._leave()

    def _leave(self) -> None:
        self._left_ms = int(1000 * time.time())
        self._trainer.world.commit()  # no rank may leave a step that others have to repeat
        self._stage = _LEFT

    def _prepare(self, hook: Hook, method: str, step: int) -> None:
        """Gather the model's parts from several servers, if a hook has this method and may read the model."""
        served, has_method = self._trainer.served, getattr(type(hook), method) is not getattr(Hook, method)
        if served and has_method and hook.reads_model(self._trainer, step):
            served.fetch()

    def _end_round(self) -> None:
        """After the last step, show the hooks the final state of the run."""
        if self._trainer.step_number == self._trainer.last_step:
            self._trainer.strategy.end_run()

    def _note_copies(self) -> None:
        self._trainer.copy_steps = steps = self._copies.steps
        if activity := own_activity():
            activity.copy_run(self._job.num_runs if steps else 0)

    def _save(self, step: Step) -> None:
        """Save a state from which a later job can continue, because no further attempt of this job follows."""
        trainer = self._trainer
        for hook in self._keeping_first():
            hook.before_end(trainer, step)
        if not self._has_saving_hook:
            trainer.world.print(f"mpitrain: nothing saves step {trainer.step_number}: add the hook mt.Checkpoint")

    def _save_only(self, copied: int) -> bool:
        """Save what earlier attempts have reached, without a step. False: leave it to a later run of the script.

        Raises:
            CheckpointError: nothing can be saved. Raised on every rank.
        """
        trainer, number = self._trainer, self._trainer.step_number
        world = trainer.world
        if trainer.memory_step and not self._has_saving_hook:
            raise everywhere(
                CheckpointError(f"{world.name()}: nothing saves step {number} on a disk: add the hook mt.Checkpoint")
            )
        if trainer.memory_step:
            self._save(unmade(number))
            return True
        why = f"its newest copy is of step {copied}" if copied else self._copies.why_not
        if not number:
            raise everywhere(CheckpointError(f"{world.name()}: there is nothing to save: {why}"))
        if not copied and self._next_stage() == _END:
            return False
        world.print(f"mpitrain: memory is not used: {why}. The newest state is the checkpoint of step {number}")
        return True

    def _end_run(self) -> None:
        if activity := own_activity():
            activity.copy_run(0)
        self._trainer.strategy.end_run()
        if self._trainer.served:
            self._trainer.served.fetch()
        for hook in self._keeping_first():  # the last save is on the disk before another hook can fail
            hook.after_run(self._trainer)
        self._trainer.world.commit()  # no rank may leave a run whose end others have to repeat
        self._stage = _OVER

    def _say_origin(self, copied: int) -> None:
        """Print where a run continues after a failure; `copied` is the step of the in-memory checkpoint."""
        trainer, context = self._trainer, self._trainer.world.context
        ms, failed_step = context.failed_ms, context.failed_step
        if self._copies.taken_over:
            failed_step, ms = self._copies.taken_over
            failed_step += 1
        if not ms:
            return
        step, size = trainer.step_number, trainer.world.size
        if trainer.memory_step:
            trainer.world.print(f"resumed from memory at step {step}")
        else:
            why = f"its newest copy is of step {copied}" if copied else self._copies.why_not
            place = f"continues after step {step}" if step else "starts over"
            trainer.world.print(f"mpitrain: memory is not used: {why}. The training {place}")
        if step and self._job.num_runs == 1:  # a later run begins as in the first attempt, or has its own line
            seconds, repeated = time.time() - ms / 1000, max(0, failed_step - 1 - step)
            source: Literal["memory", "disk"] = "memory" if trainer.memory_step else "disk"
            trainer.tell(RunEvent(step, context.failure, source, (), size, max(0.0, seconds), repeated))

    def _come_to(self, stage: int) -> None:
        """Begin a stage of hooks, and note their state, from which they begin again if a rank is lost in this stage."""
        self._stage = stage
        if self._recovery:
            trainer = self._trainer
            steering = trainer.steering.note()
            self._noted[stage] = states_of(trainer.hooks), trainer.last_step, dict(trainer.metrics), steering

    @property
    def _has_saving_hook(self) -> bool:
        return any(type(hook).before_end is not Hook.before_end for hook in self._trainer.hooks)

    @property
    def _recovery(self) -> Recovery | None:
        """The object that moves this Trainer to the next World. None: its World is not the job's and is not
        replaced."""
        return self._job.recovery if self._trainer.world is self._job.world else None

    def _keeping_first(self) -> list[Hook]:
        """The hooks, beginning with those that restore the others."""
        return sorted(self._trainer.hooks, key=lambda hook: not hook.keeps_state)

    def _next_stage(self) -> int:
        last = self._trainer.last_step
        return _END if last is not None and self._trainer.step_number >= last else _BEFORE_STEP

    def _go_through(self, stage: Callable[[], None]) -> None:
        """Run a stage. If a rank is lost in it, continue in the next World."""
        trainer = self._trainer
        try:
            stage()
        except Exception as error:
            recovery = self._recovery
            if recovery is None or not recovery.is_loss(error):
                raise
            recovery.abandon()
            state: dict[str, Any] = {}
            own: dict[str, Any] = {}
            if self._stage > _BUILD:
                # A copy: `build` may make the next parts of the same arrays.
                own = host_copy(trainer.strategy.own_state())
                state = host_copy(self._built.state())
            if self._stage == _STEP:
                state["data"], before = self._before
                if before:
                    own, state["strategy"] = before
            kept = self._built.parts
            self._built.close()
            loss = self._job.recover(lambda world: self._go_on(world, state, own), kept)
            trainer.tell(
                RunEvent(trainer.step_number, loss.text, "ranks", loss.ranks, trainer.world.size, loss.seconds)
            )

    def _go_on(self, world: World, state: Mapping[str, Any], own: dict[str, Any]) -> None:
        self._built.close()  # left from an attempt in which another rank was lost
        self._stage = min(world.allgather(self._stage))
        self._begin(world)
        if self._stage > _BUILD:
            self._built.restore(state)
            self._built.restore_own(world, own)
        trainer = self._trainer
        if self._stage > _BEGIN:
            for hook in trainer.hooks:
                hook.world_changed(trainer)
        if self._stage in (_AFTER_STEP, _BEFORE_STEP, _END):  # some ranks have made more of its calls than others
            states, trainer.last_step, metrics, steering = self._noted[self._stage]
            trainer.metrics = dict(metrics)
            trainer.steering.take_back(steering)
            restore_all(trainer.hooks, states)
