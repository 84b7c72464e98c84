"""A run compared with the previous one: is it better, faster, and what was changed? Functions of what was read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any

from mpitrain.dashboard.index import IndexedRun

_IS_EVALUATION = re.compile(r"(test|valid|validation|val|eval|evaluation|dev)[ _/.-]", re.IGNORECASE)
_HIGHER = re.compile(
    r"(^|[ _/.-])(acc|accuracy|score|f1|auc|bleu|rouge|precision|recall|reward|return|iou|map|r2|success|per_second)$",
    re.IGNORECASE,
)
_SPEED = "per_second"


def is_higher_better(name: str) -> bool:
    """Return whether a metric of this name is better when it is higher; others, such as a loss, when they are lower."""
    return _HIGHER.search(name) is not None


def main_metric(names: Sequence[str]) -> str:
    """Return the metric by which a run is judged: of an evaluation, if there is one; "": there is none.

    Of several, one for which higher is better, such as an accuracy, comes first: it is easier to compare than a loss.
    """
    chosen = [name for name in names if name == "loss" or _IS_EVALUATION.match(name) or is_higher_better(name)]
    chosen = [name for name in chosen if not name.endswith(_SPEED)]
    order = sorted(chosen, key=lambda name: (not _IS_EVALUATION.match(name), not is_higher_better(name)))
    return order[0] if order else ""


def best_of(extremes: Sequence[float], name: str) -> tuple[float, float]:
    """Return the best value of a metric and its step, from IndexedRun.extremes."""
    low, low_step, high, high_step = extremes
    return (high, high_step) if is_higher_better(name) else (low, low_step)


def last_run_before(run: IndexedRun, runs: Iterable[IndexedRun]) -> IndexedRun | None:
    """Return the youngest run of the same script that began before this one and has rows; None: there is none."""
    if run.document is None:
        return None
    script, began = _script(run), run.document.first_started
    earlier = [
        (other.document.first_started, other)
        for other in runs
        if other.document is not None and other.num_rows and other.id != run.id and _script(other) == script
    ]
    return max(((at, other) for at, other in earlier if at < began), key=lambda item: item[0], default=(0, None))[1]


def _script(run: IndexedRun) -> PurePath | None:
    return PurePath(run.document.folder, run.document.script) if run.document else None


def against(run: IndexedRun, other: IndexedRun, best_until: Callable[[str, str, float], float]) -> dict[str, Any]:
    """Return the best values of both runs at the step that both have reached.

    Args:
        run: this run.
        other: the one before.
        best_until: the best value of a run (its id) in a metric up to a step.
    """
    name = main_metric([name for name in run.names if name in other.extremes and name in run.extremes])
    step = min(run.last.get("step", 0.0), other.last.get("step", 0.0))
    # Evaluations may be at other steps than the last one, and be the only rows of their metric.
    if not name or step < max(_first(run, name), _first(other, name)):
        return {"metric": "", "step": step}
    values = {"now": best_until(run.id, name, step), "before": best_until(other.id, name, step)}
    return {"metric": name, "step": step, "isHigherBetter": is_higher_better(name), **values}


def _first(run: IndexedRun, name: str) -> float:
    return min(run.extremes[name][1], run.extremes[name][3])
