"""Commands to a running training: `mpitrain tell`, on the ranks.

    launcher ─> agents ─> record of each rank ─> vote of a step: has any rank heard of an order? ─> all obey after it
    (launch/orders.py)                                                                               │
    launcher <─ agents <─ record of each rank <── what became of it ─────────────────────────────────┘

The vote (reducer/vote.py) carries the number of the newest command anyway, so a step without a command costs no
message. Lasting effects are part of the state of the training. After a restart, commands that are not in the state yet
are applied after the same steps as before.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpitrain.adapters.adapter import scaled_of
from mpitrain.errors import ConfigError, everywhere
from mpitrain.launch.kept import STAYS
from mpitrain.reading import json_of
from mpitrain.reducer.means import Overlap
from mpitrain.training.run_event import RunEvent
from mpitrain.training.step import Step
from mpitrain.training.tunable import TUNABLES
from mpitrain.typed import fitting
from mpitrain.waiting.control import until
from mpitrain.watching.activity import own_activity
from mpitrain.watching.order import TrainingOrder
from mpitrain.watching.rank_record import BUSY, MOST_STEERING_BYTES

if TYPE_CHECKING:
    from mpitrain.state.state_copies import StateCopies
    from mpitrain.training.trainer import Trainer
    from mpitrain.world.world import World


_MOST = 8


class Outcomes:
    """The outcomes of the newest commands, over all runs of the script.

    Attributes:
        newest: number, run, step, whether the command was applied, and a text. The oldest comes first.
        num_heard: the number of the newest command that a run has obeyed, or that none will obey.
    """

    def __init__(self) -> None:
        self.newest: list[tuple[int, int, int, bool, str]] = []
        self.num_heard = 0

    def note(self, number: int, run: int, step: int, is_applied: bool, words: str) -> None:
        """Note the outcome of a command."""
        self.newest = [*self.newest[1 - _MOST :], (number, run, step, is_applied, words)]

    def beside(self, facts: Mapping[str, Any]) -> str:
        """Return, as JSON, the facts and as many of the newest outcomes as fit into the record of a rank."""
        text = ""
        for first in range(max(1, len(self.newest))):
            text = json.dumps({**facts, "outcomes": self.newest[first:]})
            if len(text) <= MOST_STEERING_BYTES:
                break
        return text


OUTCOMES = Outcomes()


# All ranks look at the same time, which costs a message of 48 bytes each.
_LOOK_SECONDS = 0.25
_NAP_SECONDS = 0.02


def wait_in_pause(trainer: Trainer, copies: StateCopies, obey: Callable[[int], None]) -> int:
    """Wait while the training is paused. Collective.

    No rank waits for another one here, so the wait is not reported. A rank that misses a common look is.

    Args:
        trainer: is between two steps.
        copies: the in-memory checkpoints of its run. New ones are made after a command with a lasting effect, and
            before the ranks leave.
        obey: applies commands, given the number of commands that a rank has heard of.

    Return the launcher's request, as StateCopies.after_step does.
    """
    world, steering, activity = trainer.world, trainer.steering, own_activity()
    words = f"a pause {steering.words.removeprefix('paused ')}"
    steering.paused_since = time.monotonic()  # the hooks' work since the command is not a pause
    entry = activity.begin(BUSY, words, time.monotonic()) if activity else None
    try:
        while steering.pause:
            due = time.monotonic() + _LOOK_SECONDS
            world.control.wait(until(lambda due=due: time.monotonic() >= due, lambda: _NAP_SECONDS), words, status=BUSY)  # type: ignore[misc]
            number = activity.order_number if activity else 0
            looks = world.agree("look for orders in a pause", code=copies.wish(), detail=number)
            heard = int(looks["detail"].max())
            if heard > steering.num_heard:
                obey(heard)
            if looks["code"].max() > STAYS or steering.has_news:
                wish = copies.after_step(trainer, is_due=True)
                steering.has_news = False
                if wish != STAYS:
                    return wish
    finally:
        if activity and entry:
            activity.end(entry)
    return STAYS


_MOST_OUTCOME_CHARACTERS = 400


class Steering:
    """The commands to one Trainer. All ranks make the same calls.

    Attributes:
        rate_factor: the learning rate of each step is multiplied by this number.
        pause: who has paused the training, when, and after which step, with the loss and learning rate of that step; {}
            while it trains.
        saves: a save of this step was requested. The code that saves it sets this to False.
        has_news: the state or the record has changed. The code that copies the state sets this to False.
        num_heard: the number of the newest command that all ranks have obeyed.
    """

    def __init__(self) -> None:
        self.rate_factor = 1.0
        self.pause: dict[str, Any] = {}
        self.saves = self.has_news = False
        self.num_heard = 0
        self._last = ("", 0)  # the launcher and the number of the last command in the state
        self._replayed: Sequence[TrainingOrder] = ()  # of earlier attempts
        self._replayed_until = 0
        # The commands of this launcher, or why one cannot be read. Another rank may not have the last ones yet.
        self._known: dict[int, TrainingOrder | str] = {}
        self._run = 0
        self.paused_since = 0.0

    def begin(self, trainer: Trainer, run: int) -> None:
        """Called when the run with this number begins and the state is restored. Collective.

        Raises:
            MismatchError: the ranks have declared other tunable values.
            ConfigError: the job has servers, and the state is that of a training whose learning rate was changed.
        """
        world, self._run, activity = trainer.world, run, own_activity()
        number = activity.order_number if activity else 0
        there = world.agree("compare the tunable values", TUNABLES.lines(), detail=number)["detail"]
        if run > 1:  # existing commands were given to earlier runs
            self._pass_over(int(there.max()))
        if trainer.served and self.rate_factor != 1.0:
            raise everywhere(
                ConfigError(
                    f"{world.name()}: the learning rate of the training to continue from was multiplied by "
                    f"{self.rate_factor:g}, which servers cannot do. Multiply the rate in the script, and begin from "
                    "an earlier checkpoint, or train without servers"
                )
            )
        text = world.context.orders
        orders = _replayed(world, text) if text else []
        self._replayed = [order for order in orders if order.run == run]
        self._replayed_until = max((order.after_step or 0 for order in self._replayed), default=0)
        self.paused_since = time.monotonic()
        if self.pause and (trainer.served or not world.context.roll_call):
            world.print(f"mpitrain: the training was {self.words}. No launcher could resume it here, so it continues")
            self.pause = {}
        elif self.pause:
            world.print(f"mpitrain: the training is {self.words}; `mpitrain tell JOB resume` lets it continue")
        TUNABLES.changed = lambda: self.publish(trainer)
        if self.is_due(trainer.step_number, 0):
            self.obey(trainer, 0)
        self.publish(trainer)

    def is_due(self, step: int, heard: int) -> bool:
        """True if there is a command to obey after this step; `heard` is the number of commands that a rank has heard
        of."""
        return heard > self.num_heard or step <= self._replayed_until

    def obey(self, trainer: Trainer, heard: int, step: Step | None = None) -> None:
        """Apply the commands that are due. Collective, between two steps.

        Args:
            trainer: the one that is told.
            heard: the number of orders that a rank has heard of, the same on all ranks.
            step: the last one, if one was made.

        Raises:
            MismatchError: the ranks have declared other tunable values.
        """
        for order in self._replayed:
            if (order.after_step or 0) <= trainer.step_number:
                if not self._has(order):
                    self._apply(trainer, order, step)
                elif order.kind == "stop":  # the end of the run is not part of the state
                    self._end_run(trainer)
        if heard > self.num_heard and trainer.step_number >= self._replayed_until:  # in the order in which they came
            for order in self._gather(trainer):
                self._apply(trainer, order, step)
        self.publish(trainer)

    def _gather(self, trainer: Trainer) -> list[TrainingOrder]:
        """The new commands, in order. A rank may not have heard of one yet, or may be lost after it has.

        One that no rank can read is refused.
        """
        world, activity = trainer.world, own_activity()
        if activity is not None and (number := activity.order_number) > self.num_heard:
            try:
                order = activity.order()
                self._known[order.number] = order
            except ValueError as error:
                self._known[number] = f"{world.name()} cannot read it: {error}"
        of_ranks = world.allgather({n: order for n, order in self._known.items() if n > self.num_heard})
        new: dict[int, TrainingOrder | str] = {}
        for number, known in (item for of_rank in of_ranks for item in of_rank.items()):
            if isinstance(new.get(number, ""), str):
                new[number] = known
        self._known |= new
        orders = [new[number] for number in sorted(new)]
        if any(isinstance(order, TrainingOrder) and order.kind == "set" for order in orders):
            world.agree("compare the tunable values", TUNABLES.lines())
        for number, known in new.items():
            if isinstance(known, str):
                OUTCOMES.note(number, self._run, trainer.step_number, False, known[:_MOST_OUTCOME_CHARACTERS])
        self.num_heard = max(new, default=self.num_heard)
        OUTCOMES.num_heard = max(OUTCOMES.num_heard, self.num_heard)
        return [order for order in orders if isinstance(order, TrainingOrder)]

    def _pass_over(self, number: int) -> None:
        """Commands up to this number were for earlier runs. Those that no run has obeyed are refused."""
        for missed in range(OUTCOMES.num_heard + 1, number + 1):
            OUTCOMES.note(missed, self._run, 0, False, "the run of its Trainer has ended")
        self.num_heard = max(self.num_heard, number)
        OUTCOMES.num_heard = max(OUTCOMES.num_heard, number)

    def _has(self, order: TrainingOrder) -> bool:
        of, number = self._last
        return order.of == of and order.number <= number

    def _apply(self, trainer: Trainer, order: TrainingOrder, step: Step | None) -> None:
        run, number = self._run, trainer.step_number
        if self._has(order) and order.kind != "stop":  # the launcher does not know this, because a rank failed
            OUTCOMES.note(order.number, run, number, True, "it was applied before a restart")
            return
        seconds = time.monotonic() - self.paused_since if order.kind in ("resume", "stop") and self.pause else 0.0
        try:
            text = self._do(trainer, order, step)
        except ConfigError as error:
            outcome = order.number, run, number, False, str(error)[:_MOST_OUTCOME_CHARACTERS]
        else:
            outcome = order.number, run, number, True, text
            self.has_news = self.has_news or order.kind != "stop"
            size = trainer.world.size
            trainer.tell(RunEvent(number, text, "told", (), size, seconds, teller=order.teller, at=order.at))
            trainer.world.print(f"mpitrain: {text}, after step {number} ({order.teller})")
            self._last = order.of, order.number
        OUTCOMES.note(*outcome)

    def _do(self, trainer: Trainer, order: TrainingOrder, step: Step | None) -> str:
        """Carry out a command, and describe what was done. Raises ConfigError, on every rank, if that is impossible."""
        if order.kind == "rate":
            factor = checked_factor(order.value)
            product = self.rate_factor * factor
            if not 0 < product < math.inf:
                raise ConfigError(
                    f"the learning rate is multiplied by {self.rate_factor:g} now, and with {order.value} by "
                    f"{product}; allowed is a finite number above 0"
                )
            scaled_of(trainer.adapter).scale_next_rate(1.0)  # a skipped step has left its factor there
            self.rate_factor = product
            return f"the learning rate is multiplied by {factor:g}, so by {product:g} in all"
        if order.kind == "set":
            return f"{order.name} is {TUNABLES.set(order.name, order.value)!r}"
        if order.kind == "pause":
            if self.pause:
                raise ConfigError(f"it is {self.words}")
            about = {"loss": step.loss, "learning_rate": step.learning_rate} if step else {}
            self.pause = {"teller": order.teller, "at": order.at, "after_step": trainer.step_number, **about}
            self.paused_since = time.monotonic()
            return "the training is paused"
        if order.kind == "resume":
            if not self.pause:
                raise ConfigError("it is not paused")
            self.pause = {}
            return "the training is resumed"
        if not any(hook.keeps_state for hook in trainer.hooks):
            raise ConfigError(
                "its Trainer has no mt.Checkpoint, so nothing can be saved; add this hook to the script. `mpitrain "
                "tell JOB kill` ends the job without"
            )
        if step is None and (order.kind == "save" or order.after_step is None):
            raise ConfigError("no step was made since it began here, so nothing new can be saved; resume it first")
        if order.kind == "save":
            self.saves = True
            return "the save of a checkpoint has begun"
        self._end_run(trainer)
        return "the run ends, and is saved"

    def _end_run(self, trainer: Trainer) -> None:
        self.saves = True  # also if it was requested before: the save may have been lost
        trainer.last_step = trainer.step_number
        self.pause = {}

    def paused_step(self) -> Step | None:
        """The step after which the training is paused, with the fields that a checkpoint needs; None: it is not
        known."""
        if "loss" not in self.pause:
            return None
        number, loss, rate = (self.pause[name] for name in ("after_step", "loss", "learning_rate"))
        return Step(number, loss, 0.0, rate, 0.0, Overlap(0.0, 0.0, 0.0))

    @property
    def words(self) -> str:
        """A text: who paused the training, and when."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.pause["at"]))
        return f"paused by {self.pause['teller']} on {when}, after step {self.pause['after_step']}"

    def publish(self, trainer: Trainer) -> None:
        """Publish the commands that this training accepts, and the outcomes of the newest commands."""
        if activity := own_activity():
            facts = {
                "run": self._run,
                "step": trainer.step_number,
                "rate_factor": self.rate_factor,
                "paused": self.words if self.pause else "",
                "saves": any(hook.keeps_state for hook in trainer.hooks),
                "tunables": TUNABLES.values(),
            }
            activity.steer(OUTCOMES.beside(facts))

    def end(self) -> None:
        """Publish that the run is over, and the outcomes of the newest commands."""
        TUNABLES.changed = lambda: None
        if activity := own_activity():
            activity.steer(OUTCOMES.beside({"run": 0}))

    def note(self) -> dict[str, Any]:
        """Return what `take_back` needs so that commands since then can be obeyed again if a rank is lost."""
        return {"state": self.state(), "num_heard": self.num_heard, "saves": self.saves}

    def take_back(self, noted: Mapping[str, Any]) -> None:
        """Return to the state that `note` returned."""
        self.restore(noted["state"])
        self.num_heard, self.saves = noted["num_heard"], noted["saves"]

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; {} if neither this nor an earlier Trainer has received a command."""
        of, number = self._last
        tunables = TUNABLES.told()
        if not of and not tunables:
            return {}
        return {"of": of, "number": number, "rate_factor": self.rate_factor, "pause": self.pause, "tunables": tunables}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if `restore` would."""
        TUNABLES.check(state.get("tunables", {}))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            CheckpointError: the script declares a tunable value with another type. Nothing has changed.
        """
        TUNABLES.restore(state.get("tunables", {}))
        self.rate_factor, self.pause = float(state.get("rate_factor", 1.0)), dict(state.get("pause", {}))
        self._last = str(state.get("of", "")), int(state.get("number", 0))


def _replayed(world: World, text: str) -> list[TrainingOrder]:
    """Return the commands to earlier attempts, from JSON.

    Raises:
        ConfigError: the text is malformed.
    """
    try:
        content = json_of(f'{{"orders": {text}}}', ValueError, "the text")
        return [TrainingOrder.of_plain(fields) for fields in fitting(content["orders"], list[dict[str, Any]], "orders")]
    except ValueError as error:
        raise ConfigError(f"{world.name()}: the commands to earlier attempts cannot be read: {error}") from None


def checked_factor(text: str) -> float:
    """Return the learning-rate factor that a user typed: "0.5" or "0.5x".

    Raises:
        ConfigError: it is not a finite number above 0.
    """
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise ConfigError(f"rate {text}: allowed is a finite number above 0, by which the learning rate is multiplied")
    return factor
