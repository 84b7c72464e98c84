"""What is known of a cluster without a job: the last report of `mpitrain check-cluster`, and the measured ways.

The files are those of this user. A file that is damaged, huge or of a newer version is named, and the rest is shown.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from mpitrain.check.report import KEPT_VERSION, REPORT_FILE, VERSION, WAYS_FILE
from mpitrain.errors import DataError
from mpitrain.profile import SCHEMA
from mpitrain.reading import find_file, json_of, parsed
from mpitrain.state_files import read_state, state_folder

Result = TypeVar("Result")

_MOST_BYTES = 96 << 20  # of a report; one of 512 nodes with all pairs has 40, one of 256 has 10
_MOST_NODES = 512  # with measured pairs
_FINDING = ("id", "title", "verdict", "places", "found", "allowed", "why", "remedy")


def last_check() -> dict[str, Any] | None:
    """Return the last report: when, how much was checked, counts, findings, and the nodes; None: there is none.

    Raises:
        DataError: it cannot be read.
    """
    path = state_folder() / REPORT_FILE
    content = read_state(path, KEPT_VERSION, _MOST_BYTES)
    if content is None:
        return None
    return _taken(path, lambda: _report(path, content))


def _report(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    report, machines = content["report"], content["machines"]
    if report["schema"] != VERSION:
        raise DataError(f"{path}: its report has the schema {report['schema']!r:.40}; this mpitrain reads {VERSION}")
    findings = [
        {**{name: _text(one[name]) for name in _FINDING}, "blocks": [_text(id_) for id_ in one["blocks"]]}
        for one in report["findings"]
    ]
    return {
        "at": datetime.fromisoformat(report["started"]).timestamp(),
        "seconds": _number(report["seconds"]),
        "level": _text(content["level"]),
        "only": [_text(one) for one in content["only"]],
        "skip": [_text(one) for one in content["skip"]],
        "counts": {_text(name): int(_number(count)) for name, count in report["counts"].items()},
        "findings": findings,
        "nodes": {
            _text(name): {"address": _text(address), **_machine(machines.get(name, {}))}
            for name, address in report["nodes"].items()
        },
    }


def _machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: facts.get(name) for name in ("cores", "memory_bytes")}
    return {name: None if value is None else int(_number(value)) for name, value in values.items()}


def measured_ways() -> list[tuple[str, Callable[[], dict[str, Any] | None]]]:
    """Return where measurements of all pairs may be, each with a function that reads them.

    The function returns None if nothing is there, and raises DataError if it cannot be read.
    """
    places = [("mpitrain check-cluster --level bench", _of_check)]
    if name := os.environ.get("MPITRAIN_PROFILE"):
        places.append((name, lambda: _of_profile(Path(name))))
    return places


def _of_check() -> dict[str, Any] | None:
    path = state_folder() / WAYS_FILE
    content = read_state(path, KEPT_VERSION, _MOST_BYTES)
    if content is None:
        return None

    def take() -> dict[str, Any]:
        nodes = _nodes(content["nodes"])
        return {
            "measured": _number(content["measured"]),
            "nodes": nodes,
            "latency_us": _table(content["latency_us"], len(nodes)),
            "bytes_per_second": _table(content["bytes_per_second"], len(nodes)),
        }

    return _taken(path, take)


def _of_profile(path: Path) -> dict[str, Any] | None:
    """Take the links of a profile of `mpitrain bench --save-profile`; the time is that of the file."""
    text = find_file(path, DataError, most_bytes=_MOST_BYTES)
    if text is None:
        raise DataError(f"MPITRAIN_PROFILE names {path}, and there is no such file")

    def take() -> dict[str, Any] | None:
        content = json_of(text, DataError, f"the profile {path}")
        if content["schema"] != SCHEMA:
            raise DataError(f"the profile {path} has format {content['schema']!r:.40}; this mpitrain reads {SCHEMA}")
        nodes, measured = _nodes(content["nodes"]), content["measured"]
        if measured["link_bytes_per_second"] is None:  # of one node
            return None
        latency = measured.get("link_latency_us")  # a profile of an older mpitrain has only the median
        return {
            "measured": path.stat().st_mtime,
            "nodes": nodes,
            "latency_us": None if latency is None else _table(latency, len(nodes)),
            "bytes_per_second": _table(measured["link_bytes_per_second"], len(nodes)),
        }

    return _taken(path, take)


def _taken(path: Path, take: Callable[[], Result]) -> Result:
    """Return what `take` finds in the content of `path`.

    Raises:
        DataError: the content is not what it should be.
    """

    def refusal(said: str) -> DataError:
        return DataError(f"{said}. Measure or check again")

    result: Result = parsed(take, refusal, str(path), "is damaged")
    return result


def _nodes(names: object) -> list[str]:
    if not isinstance(names, list):
        raise TypeError(f"its nodes are {names!r:.40}; they must be a list of names")
    if len(names) > _MOST_NODES:
        raise DataError(f"what was measured between {len(names)} nodes is not shown; allowed are at most {_MOST_NODES}")
    return [_text(name) for name in names]


def _table(rows: Any, size: int) -> list[list[float | None]]:
    """Return numbers from each node to each; None for a node itself, and where nothing was measured."""
    if len(rows) != size or any(len(row) != size for row in rows):
        raise ValueError("its numbers do not fit its nodes")
    return [
        [None if i == j or value is None else _number(value) for j, value in enumerate(row)]
        for i, row in enumerate(rows)
    ]


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value!r:.40} is not a number of at least 0")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value
