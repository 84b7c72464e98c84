"""A run's record: what happened in each step, one line of JSON a step, written by rank 0."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from mpitrain.arrays import Array
from mpitrain.errors import DataError, TreeError
from mpitrain.tree import Tree, leaves
from mpitrain.verify.fingerprint import NUM_PROJECTIONS, Sketch, sample_hashes, sketch
from mpitrain.world import TreeExchange, World

FILE = "record.jsonl"
_MODE = 0o600
STEP, MEAN, SUM = "step", "mean", "sum"

# Whose steps are the lines of a record. The last one of these that the script has makes all lines.
CALLS, REDUCER, TORCH, TRAINER = range(4)
_SEEN = {
    REDUCER: "compared are the steps of a GradientReducer: mean gradients, weights, and the samples of world.shard. "
    "Losses, learning rates and metrics are not seen",
    TORCH: "compared are the steps of torch.optim's optimizers: gradients, learning rates, and the samples that "
    "DataLoaders and prepare() give. Losses and metrics are not seen",
}


@dataclass(frozen=True)
class Line:
    """One step of a Trainer, an optimizer of PyTorch or a GradientReducer, or one call of world.mean or world.sum.

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
        self._source = CALLS
        self._seen: list[str] | None = []  # by this rank since the last line
        self._means: dict[str, Array] = {}  # of the step that the Trainer makes
        with world.together("begin the record for mpitrain verify"):
            if world.is_root:
                self._begin()

    @property
    def steps_left(self) -> int:
        """How many are still to be recorded."""
        return self._world.context.verify_steps - self._number

    def attach(self, source: int) -> bool:
        """A Trainer, an optimizer or a reducer is there: its steps are recorded from now on, and nothing lower.

        Returns whether they are: not where there is a higher source.
        """
        if source > self._source:
            self._source, self._number = source, 0
            if source == TRAINER:  # it is there before its first step; the others are known when theirs ends
                self._seen = []
            if self._world.is_root:
                self._begin()  # calls from before it are not what is to be compared
            if self._world.size == 1 and source in _SEEN:
                self._world.print(f"mpitrain verify: {_SEEN[source]}")
        return source == self._source

    def saw(self, batch: Tree) -> None:
        """This rank has got these samples. Not collective, but behind all calls before."""
        self._world.control.settle()  # a library that computes ahead has made the calls with the samples before
        if self._seen is None:
            return
        try:
            self._seen += sample_hashes(batch)
        except (TreeError, DataError):
            self._seen = None

    def saw_means(self, means: Mapping[str, Array], weight: float) -> None:
        """A GradientReducer has these mean gradients, by parameter; this rank's gradients had that weight."""
        if self._source == TRAINER:
            self._means = {name: mean.copy() for name, mean in means.items()}  # the optimizer may overwrite them
        elif self.attach(REDUCER):
            self.add(STEP, weight, means)
            self.end_if_done()

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
        self._write(asdict(line))

    def called(self, kind: str, tree: Tree, weight: float | None) -> None:
        """World.mean or World.sum has given `tree`. Ends the run after the last one that was asked for."""
        if self._source != CALLS:
            return
        self.add(kind, weight, {path or "the result": leaf for path, leaf in leaves(tree)})
        self.end_if_done()

    def end_if_done(self) -> None:
        """Leave the script once all is recorded: what it does at its end, such as saving a model, must not be done."""
        if self.steps_left <= 0:
            raise SystemExit(0)

    def _begin(self) -> None:
        self._write({"num_ranks": self._world.size}, anew=True)

    def _write(self, content: Mapping[str, Any], *, anew: bool = False) -> None:
        with _opened(Path(self._world.context.verify_record)) as file:
            if anew:
                file.truncate(0)
            file.write(json.dumps(content) + "\n")


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


def make_record(directory: Path) -> None:
    """Make the empty file that rank 0 fills; `mpitrain verify` calls it, on the machine where it was started.

    Raises:
        DataError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE).unlink(missing_ok=True)
        os.close(os.open(directory / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE))
    except OSError as error:
        raise DataError(
            f"cannot make the record {directory / FILE}: {error.strerror}; name a folder that you can write to: "
            "mpitrain verify --directory PATH"
        ) from None


def _opened(directory: Path) -> TextIO:
    """The file that make_record has made, and no other: its path comes from the environment.

    Raises:
        OSError: it is not there, or is another file.
    """
    path, problem = directory / FILE, ""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        problem = "is a link" if error.errno == errno.ELOOP else f"cannot be opened ({error.strerror})"
    else:
        status = os.fstat(descriptor)
        described = f"{stat.filemode(status.st_mode)}, owner {status.st_uid}, {status.st_nlink} links"
        if (status.st_mode, status.st_uid, status.st_nlink) == (stat.S_IFREG | _MODE, os.geteuid(), 1):
            return os.fdopen(descriptor, "a")
        os.close(descriptor)
        problem = f"is {described}"
    raise OSError(
        f"the record {path} {problem}. It must be the file that mpitrain verify has made: "
        f"{stat.filemode(stat.S_IFREG | _MODE)}, owner {os.geteuid()}, 1 links. Where rank 0 runs on another host, use "
        "mpitrain verify --directory on a file system that both share"
    )


def read_record(directory: Path) -> RunRecord:
    """The record that a run has left in `directory`.

    Raises:
        DataError: there is none.
    """
    path = directory / FILE
    if path.is_file() and path.stat().st_size == 0:
        raise DataError(
            "the script made no World, so there is nothing to compare: it did not come to mpitrain.init(), which "
            'prepare(), Trainer and init_process_group("mpitrain") call. Does it import mpitrain at all?'
        )
    try:
        head, *lines = (json.loads(line) for line in path.read_text().splitlines())
        num_ranks = head["num_ranks"]
        if type(num_ranks) is not int or num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks!r}; it must be a number of ranks")
        return RunRecord(num_ranks, tuple(_line(number, fields) for number, fields in enumerate(lines, 1)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"there is no whole record in {directory} ({type(error).__name__}: {error}). Rank 0 writes it on its host: "
            "if that is another one, use mpitrain verify --directory on a file system that both share"
        ) from None


def _line(number: int, fields: dict[str, Any]) -> Line:
    """The line, where each field is what a Recorder writes.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, OverflowError: one is not.
    """
    line = Line(**fields)
    weights = [_number(weight) for weight in line.weights]
    samples = line.samples
    if line.number != number or line.kind not in (STEP, MEAN, SUM) or type(line.precision) is not str:
        raise ValueError(f"line {number + 1} is of call {line.number!r}, kind {line.kind!r}, dtype {line.precision!r}")
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"line {number + 1} has the weights {weights}; they must be 0 or more")
    if samples is not None and not all(type(sample) is str for of_rank in samples for sample in of_rank):
        raise ValueError(f"line {number + 1} has samples that are no hashes")
    return replace(
        line,
        weights=weights,
        tensors={name: _sketch(name, entry) for name, entry in line.tensors.items()},
        loss=None if line.loss is None else _number(line.loss),
        learning_rate=None if line.learning_rate is None else _number(line.learning_rate),
        metrics={name: _number(value) for name, value in line.metrics.items()},
    )


def _sketch(name: str, entry: Sketch) -> Sketch:
    count, projections = entry["count"], [_number(value) for value in entry["projections"]]
    if type(count) is not int or not 0 <= count < 2**63 or len(projections) != NUM_PROJECTIONS:
        raise ValueError(f"{name} has {count!r} elements and {len(projections)} projections, not {NUM_PROJECTIONS}")
    if type(entry["dtype"]) is not str:
        raise TypeError(f"{name} has the dtype {entry['dtype']!r}")
    return {"dtype": entry["dtype"], "count": count, "norm": _number(entry["norm"]), "projections": projections}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)
