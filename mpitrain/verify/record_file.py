"""The file of a run's record, one line of JSON per step: `mpitrain verify` makes and reads it, rank 0 fills it."""

from __future__ import annotations

import errno
import math
import os
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from mpitrain.errors import DataError
from mpitrain.reading import json_of, parsed, read_text, shown
from mpitrain.verify.fingerprint import NUM_PROJECTIONS, Sketch

FILE = "record.jsonl"
_MODE = 0o600
_MOST_BYTES = 1 << 30
STEP, MEAN, SUM = "step", "mean", "sum"


@dataclass(frozen=True)
class Line:
    """One step of a Trainer, an optimizer of PyTorch or a GradientReducer, or one call of world.mean or world.sum.

    Attributes:
        number: counts from 1.
        kind: STEP, MEAN or SUM.
        samples: hashes by rank, in the order in which each rank read them; None if they could not be seen.
        weights: weights by rank; empty for a sum.
        tensors: sketches of mean gradients by parameter, or of a result's leaves by path.
        before: sketches of those parameters that the script has changed since the line before.
        parameters: sketches of the parameters after the step.
        precision: the dtype that the gradients were computed in.
        loss, learning_rate, metrics: those of a step.
        alone: in this step, each rank has used its own gradients, and not the mean, as in a round of LocalSGD.
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
    before: dict[str, Sketch] = field(default_factory=dict)
    parameters: dict[str, Sketch] = field(default_factory=dict)
    alone: bool = False


@dataclass(frozen=True)
class RunRecord:
    """The record of one run: its number of ranks, and its lines."""

    num_ranks: int
    lines: tuple[Line, ...]


def make_record(directory: Path) -> None:
    """Make the empty file that rank 0 fills. `mpitrain verify` calls this on its own machine.

    Raises:
        DataError: the file cannot be made.
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


def opened(directory: Path) -> TextIO:
    """Open the file that make_record has made. Refuse any other: the path comes from the environment.

    Raises:
        OSError: the file does not exist, or is another file.
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
        f"{stat.filemode(stat.S_IFREG | _MODE)}, owner {os.geteuid()}, 1 links. If rank 0 runs on another host, use "
        "mpitrain verify --directory with a folder that both hosts share"
    )


def read_record(directory: Path) -> RunRecord:
    """Read the record that a run has left in `directory`.

    Raises:
        DataError: there is no record, or it is damaged.
    """
    path = directory / FILE
    if path.is_file() and path.stat().st_size == 0:
        raise DataError(
            "the script made no World, so there is nothing to compare: it did not reach mpitrain.init(), which "
            'prepare(), Trainer and init_process_group("mpitrain") call. Does the script import mpitrain at all?'
        )

    def refusal(said: str) -> DataError:
        return DataError(
            f"there is no complete record in {directory}: {said}. Rank 0 writes the record on its host. If that is "
            "another host, use mpitrain verify --directory with a folder that both hosts share"
        )

    lines = read_text(path, refusal, most_bytes=_MOST_BYTES).rstrip("\n").split("\n")
    head, *others = (
        json_of(line, refusal, f"line {number}", any_text=True, any_number=True) for number, line in enumerate(lines, 1)
    )

    def parse() -> RunRecord:
        num_ranks = head["num_ranks"]
        if type(num_ranks) is not int or num_ranks < 1:
            raise ValueError(f"num_ranks is {shown(num_ranks)}; it must be a number of ranks")
        return RunRecord(num_ranks, tuple(_line(number, fields) for number, fields in enumerate(others, 1)))

    record: RunRecord = parsed(parse, refusal, str(path), "is damaged")
    return record


def _line(number: int, fields: dict[str, Any]) -> Line:
    """Return the line, after checking that each field is what a Recorder writes.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, OverflowError: a field is not.
    """
    line = Line(**fields)
    weights = [_number(weight) for weight in line.weights]
    samples = line.samples
    if line.number != number or line.kind not in (STEP, MEAN, SUM) or type(line.precision) is not str:
        raise ValueError(f"line {number + 1} is of call {line.number!r}, kind {line.kind!r}, dtype {line.precision!r}")
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"line {number + 1} has the weights {weights}; they must be 0 or more")
    if samples is not None and not all(type(sample) is str for of_rank in samples for sample in of_rank):
        raise ValueError(f"line {number + 1} has samples that are not hashes")
    if type(line.alone) is not bool:
        raise TypeError(f"line {number + 1} has alone={line.alone!r}; it must be true or false")
    return replace(
        line,
        weights=weights,
        tensors=_sketches(line.tensors),
        before=_sketches(line.before),
        parameters=_sketches(line.parameters),
        loss=None if line.loss is None else _number(line.loss),
        learning_rate=None if line.learning_rate is None else _number(line.learning_rate),
        metrics={name: _number(value) for name, value in line.metrics.items()},
    )


def _sketches(entries: dict[str, Sketch]) -> dict[str, Sketch]:
    return {name: _sketch(name, entry) for name, entry in entries.items()}


def _sketch(name: str, entry: Sketch) -> Sketch:
    count, projections = entry["count"], [_number(value) for value in entry["projections"]]
    if type(count) is not int or not 0 <= count < 2**63 or len(projections) != NUM_PROJECTIONS:
        raise ValueError(f"{name} has {count!r} elements and {len(projections)} projections, not {NUM_PROJECTIONS}")
    if type(entry["dtype"]) is not str:
        raise TypeError(f"{name} has the dtype {entry['dtype']!r}")
    return {"dtype": entry["dtype"], "count": count, "norm": _number(entry["norm"]), "projections": projections}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{shown(value)} is not a number")
    return float(value)
