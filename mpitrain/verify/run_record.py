"""The recorder of a run: it notes what happens in each step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import ref

from mpitrain.arrays import Array, is_array
from mpitrain.errors import DataError, TreeError
from mpitrain.tree import Tree, leaves
from mpitrain.verify.comparison import ROUNDOFFS
from mpitrain.verify.fingerprint import Sketch, sample_hashes, sketch
from mpitrain.verify.record_file import MEAN, STEP, SUM, Line, opened
from mpitrain.world.world import TreeExchange, World


class GivenArrays:
    """The visible parameters of the script's own loop: the arrays from world.broadcast that the script still has.

    A script that changes these arrays in place (`w -= ...`) has its parameters in them. A script that makes new arrays
    (`w = w - ...`) drops them, and the new ones cannot be seen.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, ref[Array]] = {}

    def add(self, tree: Tree) -> None:
        """Note a result of world.broadcast."""
        for path, leaf in leaves(tree):
            if is_array(leaf) and str(leaf.dtype) in ROUNDOFFS:
                name = path or "the array"
                alike = sum(known == name or known.startswith(f"{name} (") for known in self._arrays)
                self._arrays[f"{name} ({alike + 1})" if alike else name] = ref(leaf)

    def now(self) -> dict[str, Array]:
        """Return the present arrays by name."""
        return {name: array for name, weak in self._arrays.items() if (array := weak()) is not None}

    def dropped(self) -> list[str]:
        """Return the names of arrays that the script no longer has. Each name is returned once."""
        names = [name for name, weak in self._arrays.items() if weak() is None]
        for name in names:
            del self._arrays[name]
        return names


# The lines of a record are steps or calls of one of these. If a script has several, the last one in this order counts.
CALLS, REDUCER, TORCH, TRAINER = range(4)
_OF_TORCH = (
    "comparing the steps of torch.optim's optimizers: gradients, learning rates, parameters, and the samples "
    "that DataLoaders and prepare() give. Losses and metrics are not seen"
)
_OF_LOOPS = {
    CALLS: "the calls of world.mean, world.sum and mpitrain.jax: results",
    REDUCER: "the steps of a GradientReducer: mean gradients",
}
_HOW_TO_SEE = (
    "Parameters are seen if world.broadcast gave their arrays and the script changes these in place (w -= ...), or if "
    "they are an argument of a function in mpitrain.jax.mean"
)


class Recorder:
    """Writes the record of this run, and ends the run after the requested steps. Its methods are collective."""

    def __init__(self, world: World) -> None:
        """
        Raises:
            MpitrainError: the record cannot be written; raised on every rank.
        """
        self._world = world
        self._number = 0
        self._source = CALLS
        self._seen: list[str] | None = []  # samples read since the last line; None: they could not be seen
        self._seen_before: list[str] | None = []  # samples of the lines so far
        self._parameters: dict[str, Sketch] = {}  # after the last step
        self._before: dict[str, Sketch] = {}  # parameters that the script has changed since the last step
        self._given = GivenArrays()
        self._has_changed = False  # True: a parameter of the script's own loop has changed between two lines
        self._means: dict[str, Array] = {}  # of the Trainer's current step
        with world.together("begin the record for mpitrain verify"):
            if world.is_root:
                self._begin()

    @property
    def steps_left(self) -> int:
        """The number of steps still to be recorded."""
        return self._world.context.verify.steps - self._number

    def attach(self, source: int) -> bool:
        """Record from now on the steps of this source (a Trainer, an optimizer, a reducer), and of no lower source.

        Return False if a higher source is attached already; its steps are recorded instead.
        """
        if source > self._source:
            self._source, self._number, self._parameters, self._before = source, 0, {}, {}
            self._has_changed = False
            if source == TRAINER:  # a Trainer attaches before its first step
                self._seen = []
            else:  # the others attach when their first step ends: the samples of all calls so far are that step's
                self._seen = _joined(self._seen_before, self._seen)
            self._seen_before = []
            if self._world.is_root:
                self._begin()  # drop the calls of lower sources
            if source == TORCH:
                self._tell(_OF_TORCH)
        return source == self._source

    def saw(self, batch: Tree) -> None:
        """Note that this rank has read these samples. Not collective, but ordered after all earlier calls."""
        self._world.control.settle()  # a library that computes ahead may still owe calls with earlier samples
        if self._seen is None:
            return
        try:
            self._seen += sample_hashes(batch)
        except (TreeError, DataError):
            self._seen = None

    def gave(self, tree: Tree) -> None:
        """Note the result of World.broadcast, which may have the parameters of the script's own loop."""
        if self._source in _OF_LOOPS:
            self._given.add(tree)

    def saw_parameters(self, parameters: Mapping[str, Array]) -> None:
        """Note the parameters that the next call of the script's own loop finds, equal on all ranks. Not collective."""
        self._world.control.settle()  # see `saw`
        if self._source in _OF_LOOPS:
            self.begin_step(parameters)

    def saw_means(self, means: Mapping[str, Array], weight: float) -> None:
        """Record a GradientReducer's mean gradients, by parameter, and the weight of this rank's gradients."""
        if self._source == TRAINER:
            self._means = {name: mean.copy() for name, mean in means.items()}  # the optimizer may overwrite them
        elif self.attach(REDUCER):
            self.add(STEP, weight, means)
            self.end_if_done()

    def begin_step(self, parameters: Mapping[str, Any]) -> None:
        """Note that a step begins with these parameters, the same on all ranks. Not collective."""
        if self._world.is_root:
            sketches = _sketches(parameters).items()
            self._before |= {name: value for name, value in sketches if value != self._parameters.get(name)}

    def add_step(self, weight: float, **more: Any) -> None:
        """Write a line about a step of the Trainer, with the means seen in the step; a skipped step has none."""
        means, self._means = self._means, {}
        self.add(STEP, weight, means, **more)

    def add(
        self,
        kind: str,
        weight: float | None,
        tensors: Mapping[str, Any],
        parameters: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Write a line about `tensors`, and `parameters` as they are now: arrays or numbers, the same on all ranks."""
        self._number += 1
        of_all = self._world.allgather((self._seen, weight))
        self._seen, self._seen_before = [], _joined(self._seen_before, self._seen)
        if not self._world.is_root:
            return
        if self._source in _OF_LOOPS:
            self._look_at_loop()
        samples = [seen for seen, _ in of_all if seen is not None]
        line = Line(
            number=self._number,
            kind=kind,
            samples=samples if len(samples) == len(of_all) and any(samples) else None,
            weights=[weight for _, weight in of_all if weight is not None],
            tensors=_sketches(tensors),
            before=self._before,
            parameters=_sketches(parameters or {}),
            **more,
        )
        self._parameters, self._before = self._parameters | line.before | line.parameters, {}
        self._write(asdict(line))

    def _look_at_loop(self) -> None:
        """Note the parameters with which a line of the script's own loop begins, and tell what cannot be seen of
        them."""
        self.begin_step(self._given.now())
        dropped = self._given.dropped()
        unit = "step" if self._source == REDUCER else "call"
        if self._number == 1:
            known = f", and {', '.join(self._before)} as each {unit} finds them" if self._before else ""
            unseen = "Losses, learning rates and metrics" if known else "Losses, learning rates, parameters and metrics"
            hint = "" if known else f". {_HOW_TO_SEE}"
            of_all = f"{_OF_LOOPS[self._source]}, weights, the samples of world.shard{known}"
            self._tell(f"comparing {of_all}. {unseen} are not seen{hint}")
            return
        lost = [name for name in dropped if self._parameters.pop(name, None)]
        self._has_changed |= bool(self._before)
        if lost:
            self._tell(
                f"{', '.join(lost)}: not seen from {unit} {self._number} on. The script has replaced the array "
                f"that world.broadcast gave. {_HOW_TO_SEE}"
            )
        if self._parameters and not self._has_changed and self.steps_left <= 0:
            self._tell(
                f"no parameter changed between the {self._number} {unit}s, so updates are not compared. {_HOW_TO_SEE}"
            )

    def _tell(self, text: str) -> None:
        """Print a line once, in the run on one rank."""
        if self._world.size == 1:
            self._world.print(f"mpitrain verify: {text}")

    def called(self, kind: str, tree: Tree, weight: float | None) -> None:
        """Record `tree`, the result of World.mean or World.sum. End the run after the last requested call."""
        if self._source != CALLS:
            return
        self.add(kind, weight, {path or "the result": leaf for path, leaf in leaves(tree)})
        self.end_if_done()

    def end_if_done(self) -> None:
        """Leave the script once all steps are recorded: its end, such as saving a model, must not run."""
        if self.steps_left <= 0:
            raise SystemExit(0)

    def _begin(self) -> None:
        self._write({"num_ranks": self._world.size}, anew=True)

    def _write(self, content: Mapping[str, Any], *, anew: bool = False) -> None:
        with opened(Path(self._world.context.verify.record)) as file:
            if anew:
                file.truncate(0)
            file.write(json.dumps(content) + "\n")


class RecordedTrees:
    """World's tree calls, recorded."""

    def __init__(self, inner: TreeExchange, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def broadcast(self, tree: Tree, root: int = 0) -> Tree:
        """See World.broadcast."""
        return self._inner.broadcast(tree, root)

    def sum(self, tree: Tree) -> Tree:
        """See World.sum."""
        result = self._inner.sum(tree)
        self._recorder.called(SUM, result, None)
        return result

    def mean(self, tree: Tree, weight: float = 1.0) -> Tree:
        """See World.mean."""
        result = self._inner.mean(tree, weight)
        self._recorder.called(MEAN, result, float(weight))
        return result

    def weighted_sum(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """See TreeExchange: recorded as a sum, of which each rank has some summands."""
        result = self._inner.weighted_sum(trees, weights)
        self._recorder.called(SUM, result, None)
        return result


def _joined(earlier: list[str] | None, later: list[str] | None) -> list[str] | None:
    return None if earlier is None or later is None else earlier + later


def _sketches(arrays: Mapping[str, Any]) -> dict[str, Sketch]:
    return {name: sketch(name, array) for name, array in arrays.items()}
