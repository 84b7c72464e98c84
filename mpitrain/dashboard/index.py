"""The index of runs: what their records say, in SQLite. So a list of 1,000 runs and a chart of 10^6 rows open at once.

The index is made from the records. If its file is damaged or of another version, it is made anew.
"""

from __future__ import annotations

import json
import math
import socket
import sqlite3
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy
from numpy.typing import NDArray

from mpitrain.dashboard.record_reader import NewRows, ReadMark, is_record, is_same_file, read_on, run_id, stamp_of
from mpitrain.dashboard.run_notes import RunNotes, read_notes
from mpitrain.dashboard.series import Curve, curve, means
from mpitrain.errors import DataError
from mpitrain.reading import parsed
from mpitrain.state_files import cache_folder
from mpitrain.training.run_document import FILE as DOCUMENT
from mpitrain.training.run_document import RunDocument, read_document
from mpitrain.training.writers.json_lines import FILE as ROWS

Result = TypeVar("Result")

_VERSION = 3
_MOST_THINNED = 32  # points of a curve in a list
_PIECE_ROWS = 4096
_READ_BYTES = 8 << 20  # others may use the index between two reads
_MOST_EVENTS = 1000
_MOST_PROBLEMS = 20
_BUSY_SECONDS = 30.0

_TABLES = f"""
CREATE TABLE runs (id TEXT PRIMARY KEY, folder TEXT NOT NULL, stamp TEXT NOT NULL, place TEXT NOT NULL,
    document TEXT NOT NULL, last TEXT NOT NULL, num_rows INTEGER NOT NULL, names TEXT NOT NULL, events TEXT NOT NULL,
    problems TEXT NOT NULL, extremes TEXT NOT NULL, thinned TEXT NOT NULL, notes TEXT NOT NULL, changed REAL NOT NULL);
CREATE TABLE pieces (id TEXT NOT NULL, name TEXT NOT NULL, number INTEGER NOT NULL, steps BLOB NOT NULL,
    vals BLOB NOT NULL, PRIMARY KEY (id, name, number));
PRAGMA user_version = {_VERSION};
"""
_COLUMNS = "id, folder, document, last, num_rows, names, events, problems, extremes, thinned, notes, changed"


@dataclass(frozen=True)
class IndexedRun:
    """What the index has of a run.

    Attributes:
        id: of the folder, for addresses.
        folder: that JsonLines was given.
        document: what `run.json` says; None: there is none, or it cannot be read.
        last: the last row.
        num_rows: the number of rows.
        names: the metrics, in the order of their first rows.
        events: as in NewRows.
        problems: what of the record could not be read, each in a sentence.
        changed: when a file of the record was last written, in seconds since the epoch.
        extremes: of each metric the lowest finite value and its step, and the highest and its step.
        thinned: of the loss, or another metric in a record without one, at most 32 means of as many rows each.
        notes: the users' notes on the run.
    """

    id: str
    folder: str
    document: RunDocument | None
    last: dict[str, float]
    num_rows: int
    names: list[str]
    events: list[dict[str, Any]]
    problems: list[str]
    changed: float
    extremes: dict[str, list[float]] = field(default_factory=dict)
    thinned: list[float] = field(default_factory=list)
    notes: RunNotes = field(default_factory=RunNotes)


def index_path() -> Path:
    """Return the file of the index: of this user on this host, because SQLite's locks do not hold between hosts.

    Raises:
        DataError: this user has no home folder, and XDG_CACHE_HOME is not set.
    """
    return cache_folder() / f"runs-{socket.gethostname()}.sqlite"


class RunIndex:
    """The file of the index. Several threads and several dashboards may use it at once."""

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        """Open or make the file. With `anew`, remove what it has.

        Raises:
            OSError, sqlite3.Error: the file cannot be made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        if anew:
            self._remove()
        self._do(lambda _: None)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def update(self, folder: Path) -> bool:
        """Take in what is new in the record in `folder`. Return whether there was anything.

        A record of many rows is taken in by several transactions.
        """
        has_changed = False
        while self.take_in(folder):
            has_changed = True
        return has_changed

    def take_in(self, folder: Path) -> bool:
        """Take in some of what is new in the record in `folder`; return whether there was anything.

        The files are read without the lock: their file system may hang, and others use the index meanwhile.
        """
        id_ = run_id(folder)
        known = self._do(lambda connection: _known(connection, id_))
        new = _new_of(folder, known)
        if new is None:
            return False
        self._do(lambda connection: _write(connection, id_, folder, known, new))
        return True

    def runs(self) -> list[IndexedRun]:
        """Return all runs, the youngest first."""
        query = f"SELECT {_COLUMNS} FROM runs ORDER BY changed DESC"
        return self._do(lambda connection: [_run(row) for row in connection.execute(query)])

    def run(self, id_: str) -> IndexedRun | None:
        """Return one run; None: the index has none with this id."""
        query = f"SELECT {_COLUMNS} FROM runs WHERE id = ?"
        runs = self._do(lambda connection: [_run(row) for row in connection.execute(query, (id_,))])
        return runs[0] if runs else None

    def curve(self, id_: str, name: str, first: float, last: float, pixels: int, *, is_mean: bool = False) -> Curve:
        """Return the curve of a metric; see series.curve, or with `is_mean` series.means."""
        query = "SELECT steps, vals FROM pieces WHERE id = ? AND name = ? ORDER BY number"

        def work(connection: sqlite3.Connection) -> Curve:
            def pieces() -> Iterator[tuple[NDArray[numpy.float64], NDArray[numpy.float64]]]:
                for steps, values in connection.execute(query, (id_, name)):
                    yield numpy.frombuffer(steps), numpy.frombuffer(values)

            return (means if is_mean else curve)(pieces, first, last, pixels)

        return self._do(work)

    def forget_missing(self, roots: Sequence[Path]) -> None:
        """Forget the runs in these folders, and below them, whose records are gone."""
        runs = self._do(lambda connection: connection.execute("SELECT id, folder FROM runs").fetchall())
        below = [(id_, Path(folder)) for id_, folder in runs if any(Path(folder).is_relative_to(one) for one in roots)]
        missing = [id_ for id_, folder in below if not is_record(folder)]

        def work(connection: sqlite3.Connection) -> None:
            for id_ in missing:
                _forget(connection, id_)

        if missing:
            self._do(work)

    def _do(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Do `work` in a transaction; once more with a new file, if this one is damaged."""
        with self._lock:
            try:
                return self._in_transaction(work)
            except sqlite3.DatabaseError as error:
                if type(error) not in (sqlite3.DatabaseError, sqlite3.OperationalError) or "locked" in str(error):
                    raise
                print(f"mpitrain dashboard: the index {self.path} is made anew: {error}", file=sys.stderr, flush=True)
            self._remove()
            return self._in_transaction(work)

    def _in_transaction(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        connection = self._connection or self._open()
        self._connection = connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None, cached_statements=64
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} COMMIT;")
        elif version != _VERSION:
            connection.close()
            raise sqlite3.DatabaseError(f"it is of version {version}, not {_VERSION}")
        return connection

    def _remove(self) -> None:
        self.close()
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)


Known = tuple[str, str, str, str, str, int, str, str, str, str]


@dataclass(frozen=True)
class _New:
    """What is new in a record, and the row of the index with it, from `stamp` on."""

    rows: NewRows
    is_anew: bool  # what the index has is of another file
    values: tuple[Any, ...]


def _known(connection: sqlite3.Connection, id_: str) -> Known | None:
    """Return what the index has of a run, without its rows."""
    columns = "stamp, place, names, events, problems, num_rows, last, document, extremes, thinned"
    query = f"SELECT {columns} FROM runs WHERE id = ?"
    known: Known | None = connection.execute(query, (id_,)).fetchone()
    if known is not None:
        _sound(lambda: (_place(known[1]), *_texts(known)))
    return known


def _texts(known: Known) -> list[Any]:
    """Return names, events, problems, the last row, the extremes and the thinned curve."""
    return [json.loads(text) for text in (known[2], known[3], known[4], known[6], known[8], known[9])]


def _new_of(folder: Path, known: Known | None) -> _New | None:
    """Read some of what is new in a record; None: nothing is."""
    stamp, changed = stamp_of(folder)
    if known is not None and known[0] == stamp:
        return None
    place, names, events, problems, num_rows, last, extremes, thinned = ReadMark(), [], [], [], 0, {}, {}, {}
    is_anew = False
    try:
        if known is not None and is_same_file(folder / ROWS, old := _place(known[1])):
            place, num_rows = old, known[5]
            names, events, problems, last, extremes, thinned = _texts(known)
            problems = [problem for problem in problems if problem.startswith(ROWS)]
        else:
            is_anew = known is not None
        begin = place.offset
        place, new = read_on(folder / ROWS, place, _READ_BYTES)
        is_whole = place.offset in (begin, (folder / ROWS).stat().st_size)
    except OSError as error:
        is_anew = known is not None
        is_missing = isinstance(error, FileNotFoundError)  # the run has just begun
        new = NewRows(problems=[] if is_missing else [f"cannot be read: {error.strerror}"])
        is_whole = True
    problems += [f"{ROWS}: {problem}" for problem in new.problems]
    document = ""
    try:
        document = read_document(folder / DOCUMENT).text() if (folder / DOCUMENT).exists() else ""
    except DataError as error:
        problems.append(str(error))
    notes = RunNotes()
    try:
        notes = read_notes(folder)
    except DataError as error:
        problems.append(str(error))
    values = (
        stamp if is_whole else "",
        json.dumps({**asdict(place), "head": place.head.hex(), "tail": place.tail.hex()}),
        document,
        json.dumps(new.last or last),
        num_rows + new.num_rows,
        json.dumps(list(dict.fromkeys([*names, *new.columns]))),
        json.dumps((events + new.events)[-_MOST_EVENTS:]),
        json.dumps(problems[:_MOST_PROBLEMS]),
        json.dumps(_extremes(extremes, new.columns)),
        json.dumps(_thinned(thinned, new.columns)),
        json.dumps(asdict(notes)),
        changed,
    )
    return _New(new, is_anew, values)


def _extremes(known: Mapping[str, list[float]], columns: Mapping[str, tuple[list[float], list[float]]]) -> Any:
    """Return IndexedRun.extremes with the new columns. Of equal values, the first one counts."""
    extremes = dict(known)
    for name, (steps, values) in columns.items():
        points = [(value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        if not points:
            continue
        low, high = min(points), max(points, key=lambda point: point[0])
        if name in extremes:
            old = extremes[name]
            low, high = min((old[0], old[1]), low), max((old[2], old[3]), high, key=lambda point: point[0])
        extremes[name] = [*low, *high]
    return extremes


def _thinned(known: dict[str, Any], columns: Mapping[str, tuple[list[float], list[float]]]) -> dict[str, Any]:
    """Return the thinned curve with the new columns: its metric, and sums of so many values each, with their number.

    When there are too many sums, each two become one.
    """
    name = "loss" if "loss" in columns else known.get("name") or next(iter(columns), "")
    if name != known.get("name"):
        known = {"name": name, "every": 1, "sums": []}
    every, sums = known["every"], list(known["sums"])
    for value in columns.get(name, ([], []))[1]:
        if not math.isfinite(value):
            continue
        if not sums or sums[-1][1] == every:
            if len(sums) == _MOST_THINNED:
                sums = [[a + b, m + n] for (a, m), (b, n) in zip(sums[::2], sums[1::2], strict=True)]
                every *= 2
            sums.append([0.0, 0])
        sums[-1] = [sums[-1][0] + value, sums[-1][1] + 1]
    return {"name": name, "every": every, "sums": sums}


def _write(connection: sqlite3.Connection, id_: str, folder: Path, known: Known | None, new: _New) -> None:
    """Write what is new, unless another process has done so since `known` was read: then it is read again."""
    if _known(connection, id_) != known:
        return
    if new.is_anew:
        _forget(connection, id_)
    _add(connection, id_, new.rows)
    values = (id_, str(folder), *new.values)
    connection.execute(f"INSERT OR REPLACE INTO runs VALUES ({', '.join('?' * len(values))})", values)


def _sound(parse: Callable[[], Result]) -> Result:
    """Return what a text of the index holds. If it is damaged, so is the index: `_do` makes it anew."""
    result: Result = parsed(parse, sqlite3.DatabaseError, "a run in it", "is damaged")
    return result


def _place(text: str) -> ReadMark:
    fields = json.loads(text)
    return ReadMark(**{**fields, "head": bytes.fromhex(fields["head"]), "tail": bytes.fromhex(fields["tail"])})


def _forget(connection: sqlite3.Connection, id_: str) -> None:
    for table in ("runs", "pieces"):
        connection.execute(f"DELETE FROM {table} WHERE id = ?", (id_,))


def _add(connection: sqlite3.Connection, id_: str, new: NewRows) -> None:
    """Add the columns to the pieces; only the last piece of a metric has less than its number of rows."""
    query = "SELECT number, steps, vals FROM pieces WHERE id = ? AND name = ? ORDER BY number DESC LIMIT 1"
    for name, (new_steps, new_values) in new.columns.items():
        number, old_steps, old_values = connection.execute(query, (id_, name)).fetchone() or (0, b"", b"")
        steps, values = (
            old + array("d", more).tobytes() for old, more in ((old_steps, new_steps), (old_values, new_values))
        )
        size = 8 * _PIECE_ROWS
        pieces = [
            (id_, name, number + place, steps[place * size :][:size], values[place * size :][:size])
            for place in range(-(-len(steps) // size))
        ]
        connection.executemany("INSERT OR REPLACE INTO pieces VALUES (?, ?, ?, ?, ?)", pieces)


def _run(row: Sequence[Any]) -> IndexedRun:
    return _sound(lambda: _run_in(row))


def _run_in(row: Sequence[Any]) -> IndexedRun:
    id_, folder, document, *texts, changed = row
    last, num_rows, names, events, problems, extremes, thinned, notes = texts
    read, listed = RunDocument(**json.loads(document)) if document else None, json.loads(events)
    if read is not None and read.orders:  # that came after the last row
        listed += [order.plain() for order in read.orders_without(()) if order.plain() not in listed]
    return IndexedRun(
        id_,
        folder,
        read,
        json.loads(last),
        num_rows,
        json.loads(names),
        listed,
        json.loads(problems),
        changed,
        json.loads(extremes),
        [total / count for total, count in json.loads(thinned)["sums"]],
        RunNotes(**json.loads(notes)),
    )
