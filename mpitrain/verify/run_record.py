"""A run's record: what happened in each step, one line of JSON a step, written by rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.arrays import Array
from mpitrain.errors import DataError, TreeError
from mpitrain.tree import Tree, leaves
from mpitrain.verify.fingerprint import Sketch, sample_hashes, sketch
from mpitrain.world import TreeExchange, World

FILE = "record.jsonl"
STEP, MEAN, SUM = "step", "mean", "sum"


@dataclass(frozen=True)
class Line:
    """One step of a Trainer, or one call of world.mean or world.sum.

    Attributes:
        number: from 1.
        kind: STEP, MEAN or SUM.
        samples: hashes by rank, in the order in which each rank had them; None where they could not be seen.
        weights: by rank; none for a sum.
        tensors: of mean gradients by parameter, or of a result's leaves by path.
        precision: the dtype that the gradients were computed in.
        loss, learning_rate, metrics: of a step.
    """

    number: int
    kind: str
    samples: list[list[str]] | None
    weights: list[float]
    tensors: dict[str, Sketch]
    precision: str = ""
    loss: float | None = None
    learning_rate: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """What one run has left: how many ranks it had, and its lines."""

    num_ranks: int
    lines: tuple[Line, ...]


class Recorder:
    """Writes the record of this run, and ends it after the steps that were asked for. Its calls are collective."""

    def __init__(self, world: World) -> None:
        """
        Raises:
            MpitrainError: the record cannot be written. On every rank.
        """
        self._world = world
        self._number = 0
        self._has_trainer = False
        self._seen: list[str] | None = []  # by this rank since the last line
        self._means: dict[str, Array] = {}  # of the step that the Trainer makes
        self._path = Path(world.context.verify_record) / FILE
        with world.together("begin the record for mpitrain verify"):
            if world.is_root:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._begin()

    @property
    def steps_left(self) -> int:
        """How many are still to be recorded."""
        return self._world.context.verify_steps - self._number

    def attach(self) -> None:
        """A Trainer is there: its steps are recorded, and no more calls of world.mean and world.sum."""
        if self._has_trainer:
            return
        self._has_trainer, self._number, self._seen = True, 0, []
        if self._world.is_root:
            self._begin()  # calls from before it are not what is to be compared

    def saw(self, batch: Tree) -> None:
        """This rank has got these samples. Not collective."""
        if self._seen is None:
            return
        try:
            self._seen += sample_hashes(batch)
        except (TreeError, DataError):
            self._seen = None

    def saw_means(self, means: Mapping[str, Array]) -> None:
        """The step's mean gradients, by parameter, are these. Not collective."""
        if self._has_trainer:
            self._means = {name: mean.copy() for name, mean in means.items()}  # the optimizer may overwrite them

    def add_step(self, weight: float, **more: Any) -> None:
        """Write a line about a step of the Trainer, with the means seen in it: none where it was skipped."""
        means, self._means = self._means, {}
        self.add(STEP, weight, means, **more)

    def add(self, kind: str, weight: float | None, tensors: Mapping[str, Any], **more: Any) -> None:
        """Write a line about `tensors`, arrays or numbers by name, which are the same on all ranks."""
        self._number += 1
        of_all = self._world.allgather((self._seen, weight))
        self._seen = []
        if not self._world.is_root:
            return
        samples = [seen for seen, _ in of_all if seen is not None]
        line = Line(
            number=self._number,
            kind=kind,
            samples=samples if len(samples) == len(of_all) and any(samples) else None,
            weights=[weight for _, weight in of_all if weight is not None],
            tensors={name: sketch(name, value) for name, value in tensors.items()},
            **more,
        )
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")

    def called(self, kind: str, tree: Tree, weight: float | None) -> None:
        """World.mean or World.sum has given `tree`. Ends the run after the last one that was asked for."""
        if self._has_trainer:
            return
        self.add(kind, weight, {path or "the result": leaf for path, leaf in leaves(tree)})
        self.end_if_done()

    def end_if_done(self) -> None:
        """Leave the script once all is recorded: what it does at its end, such as saving a model, must not be done."""
        if self.steps_left <= 0:
            raise SystemExit(0)

    def _begin(self) -> None:
        self._path.write_text(json.dumps({"num_ranks": self._world.size}) + "\n")


class RecordedTrees:
    """World's tree calls, recorded."""

    def __init__(self, inner: TreeExchange, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def sync(self, tree: Tree, root: int = 0) -> Tree:
        """See World.sync."""
        return self._inner.sync(tree, root)

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


def read_record(directory: Path) -> RunRecord:
    """The record that a run has left in `directory`.

    Raises:
        DataError: there is none.
    """
    try:
        head, *lines = (directory / FILE).read_text().splitlines()
        return RunRecord(json.loads(head)["num_ranks"], tuple(Line(**json.loads(line)) for line in lines))
    except (OSError, ValueError) as error:
        raise DataError(
            f"there is no whole record in {directory} ({error}). Rank 0 writes it on its host: if that is another one, "
            "use mpitrain verify --directory on a file system that both share"
        ) from None
