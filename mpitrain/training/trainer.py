"""Trainer is the loop. `build` defines the model, the data, and how the ranks work together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpitrain.adapters.adapter import scaled_of
from mpitrain.cuda.failures import SHORTAGES, explain_shortage
from mpitrain.cuda.streams import wait_for_work
from mpitrain.errors import CheckpointError, ConfigError, NonFiniteError, everywhere
from mpitrain.job.start import init, the_job
from mpitrain.reducer.means import Means
from mpitrain.state.names import host_copy
from mpitrain.state.resume import own_part
from mpitrain.strategies import ServedStrategy
from mpitrain.training.course import Course
from mpitrain.training.hooks.hook import Hook, refuse_others, restore_all, states_of
from mpitrain.training.metrics import is_name, is_number
from mpitrain.training.non_finite import located
from mpitrain.training.observe import observed
from mpitrain.training.parts import Built, Parts
from mpitrain.training.run_event import RunEvent
from mpitrain.training.steering import Steering
from mpitrain.training.step import Step
from mpitrain.training.time_left import TimeLeft
from mpitrain.watching.activity import own_activity
from mpitrain.world.world import World


class Trainer:
    """Runs steps until a hook stops the run. Every rank must make the same calls.

    A Trainer keeps the `build` that it was made with, so that `rebuild` can continue in another World.

    Attributes:
        world, adapter, strategy, data: as built.
        served: the strategy, in a job with servers; else None.
        step_number: the number of steps made so far, including those before a resume.
        last_step: the number of the step to stop after. None while no hook has set it.
        memory_step: the step after which this run resumed from an in-memory checkpoint. 0: it did not.
        copy_steps: the number of steps from one in-memory checkpoint to the next. 0: there are none.
        times_own_work: a hook or meter asks for `Step.own_seconds`. On a GPU a step then waits for its gradients
            before it continues with their exchange.
        hooks: as given.
        metrics: the metrics that hooks reported for the last step, by name.
        steering: the commands to this training by `mpitrain tell`.
        order_number: the number of the newest command that a rank has heard of, the same on all ranks.
    """

    def __init__(self, build: Callable[[World], Parts], hooks: Sequence[Hook] = (), world: World | None = None) -> None:
        """Collective over the World.

        Args:
            build: makes model, strategy and data for a World. `rebuild` calls it again.
            hooks: are called in this order after every step, except that Checkpoint comes last. Before the run
                Checkpoint comes first. One of the hooks must end the run (see StopAtStep).
            world: its ranks train together. Default: the World of `init()`.

        Raises:
            ConfigError: one of the hooks is not a Hook; or the job has servers, and the strategy trains without them.
        """
        refuse_others(hooks)
        self._given_hooks = tuple(hooks)
        self._built = Built(build)
        self.step_number = 0
        self.last_step: int | None = None
        self.memory_step = 0
        self.copy_steps = 0
        self.times_own_work = False
        self._updated = 0.0  # when a server made its last update
        self.metrics: dict[str, float] = {}
        self.steering = Steering()
        self.order_number = 0
        job = the_job()
        self._activity = own_activity()  # a script need not have called init(): without the job there would be none
        self._course = Course(self, self._built, self._begin, job)
        self._course.build(init() if world is None else world)

    def _begin(self, world: World) -> None:
        """Make all parts for a World."""
        self.world = world
        self.begin_steps()
        self.hooks = observed(world, self._given_hooks)
        parts = self._built.begin(world)
        self.adapter, self.strategy, self.data = parts.adapter, parts.strategy, parts.data
        self.served: ServedStrategy | None = None
        if isinstance(self.strategy, ServedStrategy) and self.strategy.role:
            self.served = self.strategy
        self._virtual_passes = parts.strategy.passes(parts.adapter, parts.data)

    def begin_steps(self) -> None:
        """Note that the next step is the first one of a run, or in a World."""
        self._time_left = TimeLeft(self.step_number, time.perf_counter())

    @property
    def seconds_left(self) -> float | None:
        """The time for the steps up to `last_step`, from the mean over the last half of the run or more.

        None: it is not known.
        """
        return self._time_left.seconds(self.step_number, self.last_step, time.perf_counter())

    def rebuild(self, world: World) -> None:
        """Continue in another World, after the same number of steps, with the same parameters, optimizer and data
        cursor.

        Collective over both Worlds, between two steps. A hook may call `rebuild` in `after_step`. The old parts are
        closed. `build` makes new parts, which get the training state of the old ones. The hooks are kept, and
        `world_changed` of each is called. The old World still belongs to the caller, who may free it or keep using it.

        Args:
            world: the World to continue in. If the placement of the ranks is unchanged, the error-feedback residual
                stays with its rank. Otherwise it goes into the means of the next step.

        Raises:
            CheckpointError: `build` has made a different model or data set than before.
            ConfigError: the job has servers, where each process has its own World. Nothing has changed.
        """
        if self.served:
            raise ConfigError(
                f"{world.name()}: a Trainer in a job with servers cannot continue in another World; workers come and "
                "go without that. Leave rebuild() out, or train without servers"
            )
        # Copies, because `build` may make the next parts of the same arrays. `own` comes first: it waits for exchanges
        # under way, whose results belong to the state.
        own = host_copy(self.strategy.own_state())
        state = host_copy(self._built.state())
        self._built.close()
        self._begin(world)
        self._built.restore(state)
        self._built.restore_own(world, own)
        if self._course.is_running:
            for hook in self.hooks:
                hook.world_changed(self)

    def close(self) -> None:
        """Free the communicators, threads and memory of the parts. Collective. No step can follow.

        A program that trains once need not call `close`. A program that makes Trainers in a loop must, because MPI
        has a limited number of communicators.
        """
        self._built.close()

    def run(self) -> None:
        """Train until `last_step`.

        In a job with servers, a server makes the steps, from the gradients of its workers, and calls the hooks. In a
        worker, `run` calls no hook. It computes gradients until the server's run is over, and then ends the process
        with exit code 0. So only the server runs the rest of the script. If there are several servers, the first one
        does this; the others end as workers do.

        With `mpitrain run --recover`, the remaining ranks continue after the loss of a rank, in a World without it,
        with new parts that `build` makes for that World. They repeat the unfinished step. Hooks may be called twice
        around it.

        Raises:
            ConfigError: no hook ends the run.
            GradientError: a gradient cannot be used. Raised on every rank, with the parameters of the last good step.
        """
        self._updated = 0.0
        self._course.run()

    def report(self, metrics: Mapping[str, float]) -> None:
        """Report metrics of the last step to the hooks that follow. Every rank must make the same call.

        Args:
            metrics: numbers by name, the same on every rank; arrays and tensors of one number are also allowed.

        Raises:
            ConfigError: another hook has reported the name, the name is empty or does not fit in one line, or a value
                is not a number. Raised on every rank.
        """
        for name, value in metrics.items():
            if name in self.metrics or not is_name(name):
                raise everywhere(
                    ConfigError(
                        f"step {self.step_number}: the metric {name!r} was reported; allowed is a printable name that "
                        f"no other hook reports. Reported are {', '.join(self.metrics) or 'none'}; give it another name"
                    )
                )
            if not is_number(value):
                raise everywhere(
                    ConfigError(
                        f"step {self.step_number}: the metric {name!r} is {value!r:.80} ({type(value).__name__}); "
                        "allowed is a number. Report float(...) of it, or leave it out"
                    )
                )
        self.metrics.update(metrics)
        if self._activity:
            self._activity.report(metrics)

    def tell(self, event: RunEvent) -> None:
        """Tell the hooks that the training has continued after a fault or a command. Every rank makes the same call."""
        if event.source == "told":
            self._time_left.leave_out(event.seconds)
        for hook in self.hooks:
            hook.went_on(self, event)

    def step(self) -> Step:
        """Make one step: batch, gradients, exchange, update.

        Raises:
            LostRankError: a rank has been lost. Only `run` can continue after that.
            CheckpointError: too few hosts are left, so this attempt only saves, which only `run` can do.
            GradientError: as for `run`. For NaN and infinity, the error names rank, parameter and step, and says
                whether loss, batch and parameters were finite on all ranks.
        """
        if self.world.context.saves:
            raise everywhere(
                CheckpointError(
                    f"{self.world.name()}: this attempt only saves what earlier attempts have reached, and "
                    "makes no step; only Trainer.run can save it, with the hook mt.Checkpoint"
                )
            )
        spans = self.world.control.spans
        started = time.perf_counter()
        if self._activity:
            self._activity.begin_step(self.step_number + 1)
        scale = self.adapter.loss_scale.value if self.adapter.loss_scale else None
        if self.served:
            means, learning_rate = self.served.next_update(self.data)
            # Workers compute while hooks run, so their results are already there for the next updates.
            begun, self._updated = self._updated or started, time.perf_counter()
            return self._made(begun, means, learning_rate, scale, 0, 0.0)
        batch, weight = next(self.data)
        if self.world.observer:
            self.world.observer.saw(batch)
        if spans:
            spans.add("compute", "data", started, time.perf_counter(), step=self.step_number + 1)
        try:
            if self._virtual_passes:
                loss = self._virtual_passes.compute(batch, self.step_number + 1)
                told = self._virtual_passes.non_finite_loss
            else:
                self.strategy.begin_step(weight)
                loss = self.adapter.loss_and_gradients(batch, self.strategy.on_gradient)
                told = loss if weight else 0.0
            if self.times_own_work:
                wait_for_work(next(iter(self.adapter.parameters().values())))
            finishing = time.perf_counter()
            own_seconds = finishing - started
            if self.steering.rate_factor != 1.0:
                scaled_of(self.adapter).scale_next_rate(self.steering.rate_factor)
            try:
                means, learning_rate = self.strategy.finish_step(self.adapter, loss)
            except NonFiniteError as error:
                raise located(
                    self.world,
                    error,
                    step=self.step_number + 1,
                    batch=batch,
                    loss=told,
                    parameters=self.adapter.parameters(),
                ) from None
        except SHORTAGES as error:
            explain_shortage(error)
            raise
        self.order_number = means.order_number
        if spans:
            updating = finishing + means.overlap.exposed_seconds
            spans.add("compute", "update", updating, time.perf_counter(), step=self.step_number + 1)
        made = self._made(started, means, learning_rate, scale, weight, own_seconds)
        for after_step, text in self.strategy.changes():
            self.tell(RunEvent(after_step, text, "auto", (), self.world.size, 0.0))
        return made

    def _made(
        self,
        started: float,
        means: Means,
        learning_rate: float,
        scale: float | None,
        own_samples: int,
        own_seconds: float,
    ) -> Step:
        """Count a completed step."""
        self.step_number += 1
        now = time.perf_counter()
        seconds = now - started
        self._time_left.add(self.step_number, now)
        if self._activity:
            self._activity.publish("last_step", self.last_step or 0)
            self._activity.publish("left", self.seconds_left or 0.0)
            self._activity.report({"loss": means.loss, "samples/s": means.weight / seconds})
            self._activity.publish("epoch", self.data.epoch + 1)
        return Step(
            self.step_number,
            means.loss,
            means.weight,
            learning_rate,
            seconds,
            means.overlap,
            scale,
            not means.is_finite,
            own_samples,
            own_seconds,
        )

    def state(self) -> dict[str, Any]:
        """Return all that a checkpoint needs to continue from here, by name. The state does not depend on the ranks.

        The state does not hold this rank's error-feedback residual: see Strategy.own_state.
        """
        if self.served:
            self.served.fetch()
        return {
            "step": self.step_number,
            "data": self.data.state(),
            "adapter": self.adapter.state(),
            "strategy": self.strategy.state(),
            "hooks": states_of(self.hooks),
            **({"steering": steering} if (steering := self.steering.state()) else {}),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Every rank must restore the same state.

        A hook without an entry in the state starts afresh. An entry without a hook is ignored.

        Raises:
            CheckpointError: the state belongs to another model or data set, or is incomplete. Nothing has changed.
        """
        if self.served:
            self.served.fetch()  # differences from it are sent to the other servers
        data, of_strategy = self.data.state(), state.get("strategy", {})
        hooks = [(hook, hook.state()) for hook in self.hooks]
        self.steering.check(state.get("steering", {}))
        try:
            step = int(state["step"])
            try:
                self.data.restore(state["data"])
                self.strategy.check(of_strategy)
                restore_all(self.hooks, state.get("hooks", {}))
                # Last, because it is large. It refuses before it overwrites anything, so it is never put back.
                self.adapter.restore(state["adapter"])
            except BaseException:
                self.data.restore(data)
                for hook, before in hooks:
                    hook.restore(before)
                raise
            self.strategy.restore(of_strategy)
            self.steering.restore(state.get("steering", {}))
        except KeyError as error:
            raise CheckpointError(f"the checkpoint has no entry {error}; was it written by this Trainer?") from error
        self.step_number = step

    def own_state(self, *, reads: bool = True) -> dict[str, Any]:
        """Return the state that belongs to this rank alone: see Strategy.own_state. Only ranks with `reads` may call
        `state`."""
        return self.strategy.own_state_for(reads=reads)

    def restore_own(self, name: str, parts: int, read_part: Callable[[int], dict[str, Any]], *, reads: bool) -> None:
        """Continue from the states that belong to single ranks. Collective; see checkpoint.resume.own_part.

        Raises:
            CheckpointError: a state belongs to another model. Raised on every rank.
        """
        place = self.own_state(reads=False).get("place")
        part = own_part(self.world, name, parts, place, read_part, reads=reads)
        with self.world.together(f"continue from {name}"):
            self.strategy.restore_own(part)
