"""How often to save: a training that loses its unsaved work when a node fails.

    |-- every --|save|-- every --|save|-- ev X  restart |-- every --|save| ...
                                       failure: the work since the last save is lost

Failures are a Poisson process: their mean distance is that of one node, divided by the number of nodes. They may also
come during a save or a restart.

Young's interval is sqrt(2 C M), for saves of C seconds and a failure every M seconds (Young, A first order
approximation to the optimum checkpoint interval, Commun. ACM 17 (1974) 530-531). Daly's is more precise where C is not
small beside M, and his model has the expected time of the whole: M e^(R/M) (e^((T+C)/M) - 1) W / T, for restarts of R
seconds, intervals of T and W seconds of work (Daly, A higher order estimate of the optimum checkpoint interval for
restart dumps, Future Gener. Comput. Syst. 22 (2006) 303-312).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from mpitrain.errors import ConfigError
from mpitrain.forecast.report import IDEAL, Panel, Point, SimulationReport, report_of, shown_seconds
from mpitrain.noise import error_of_mean, noise

_AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)  # times Daly's interval, if no intervals are given
_MOST_TIMES = 100.0  # the work; a training that would take longer is not simulated


@dataclass(frozen=True)
class Failing:
    """A training on machines that fail. All times are in seconds.

    Attributes:
        work_seconds: the time of the training without failures and saves.
        node_mtbf_seconds: mean time between failures of one node.
        num_nodes: a failure of any of them ends the job.
        save_seconds: for which a save holds up the training.
        restart_seconds: from a failure until the training continues from the last save.
    """

    work_seconds: float
    node_mtbf_seconds: float
    num_nodes: int
    save_seconds: float
    restart_seconds: float

    @property
    def mtbf_seconds(self) -> float:
        """Of the job."""
        return self.node_mtbf_seconds / self.num_nodes


@dataclass(frozen=True)
class SavesRow:
    """One interval.

    Attributes:
        every_seconds: of work between two saves.
        total_seconds: from the begin to the end of the training, mean of the seeds.
        lowest_seconds, highest_seconds: of the seeds.
        error_seconds: the standard error of total_seconds over seeds.
        useful_share: work / total.
        expected_seconds: by Daly's model.
    """

    every_seconds: float
    total_seconds: float
    lowest_seconds: float
    highest_seconds: float
    error_seconds: float
    useful_share: float
    expected_seconds: float


def young_seconds(failing: Failing) -> float:
    """Young's interval."""
    return math.sqrt(2 * failing.save_seconds * failing.mtbf_seconds)


def daly_seconds(failing: Failing) -> float:
    """Daly's interval, equation 37."""
    cost, mtbf = failing.save_seconds, failing.mtbf_seconds
    if cost >= 2 * mtbf:
        return mtbf
    share = cost / (2 * mtbf)
    return young_seconds(failing) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def expected_seconds(failing: Failing, every_seconds: float) -> float:
    """The expected time of the training by Daly's model; infinity if no number can hold it."""
    mtbf = failing.mtbf_seconds
    try:
        segment = mtbf * math.exp(failing.restart_seconds / mtbf) * math.expm1(
            (every_seconds + failing.save_seconds) / mtbf
        )  # fmt: skip
    except OverflowError:
        return math.inf
    return segment * failing.work_seconds / every_seconds


def simulate_failures(failing: Failing, every_seconds: float, random: numpy.random.Generator) -> float:
    """Return the time from the start to the end of one training. It ends with a save."""
    elapsed = saved = restart = 0.0
    while True:
        until_failure = random.exponential(failing.mtbf_seconds)
        left = failing.work_seconds - saved
        needed = restart + left + math.ceil(left / every_seconds) * failing.save_seconds
        if until_failure >= needed:
            return elapsed + needed
        trained = max(0.0, until_failure - restart)
        saved += trained // (every_seconds + failing.save_seconds) * every_seconds
        elapsed += until_failure
        restart = failing.restart_seconds


def saves_report(failing: Failing, intervals: Sequence[float] | None, num_seeds: int) -> SimulationReport:
    """Simulate every interval.

    Args:
        intervals: seconds of work between saves; None: Daly's and some around it with which the training would end.

    Raises:
        ConfigError: with one of the intervals, the training would hardly end. Nothing was simulated.
    """
    daly, most = daly_seconds(failing), _MOST_TIMES * failing.work_seconds
    may_end = expected_seconds(failing, daly) <= most
    given = [daly] if intervals is None else sorted(set(intervals))
    for every in given:
        if expected_seconds(failing, every) > most:
            advice = f"Save {'less' if every < daly else 'more'} often, or take" if may_end else "Take"
            raise ConfigError(
                f"with a failure every {shown_seconds(failing.mtbf_seconds)}, saves of "
                f"{shown_seconds(failing.save_seconds)} and restarts of {shown_seconds(failing.restart_seconds)}, a "
                f"training that saves every {shown_seconds(every)} would take more than {_MOST_TIMES:.0f} times its "
                f"work. {advice} shorter saves and restarts, or fewer nodes"
            )
    if intervals is None:
        around = [factor * daly for factor in _AROUND]
        given = [every for every in around if expected_seconds(failing, every) <= most]
    rows = [_row(failing, every, num_seeds) for every in given]
    columns: dict[str, Callable[[SavesRow], str]] = {
        "save every": lambda row: shown_seconds(row.every_seconds),
        "training": lambda row: shown_seconds(row.total_seconds),
        "fastest and slowest seed": lambda row: (
            f"{shown_seconds(row.lowest_seconds)} - {shown_seconds(row.highest_seconds)}"
        ),
        "useful": lambda row: f"{row.useful_share:.1%}",
        "by Daly's model": lambda row: shown_seconds(row.expected_seconds),
    }
    best = min(rows, key=lambda row: row.total_seconds)
    answers = [
        f"a failure every {shown_seconds(failing.mtbf_seconds)} on average",
        f"fastest of these: save every {shown_seconds(best.every_seconds)}{_as_fast(best, rows)}",
        f"Young: every {shown_seconds(young_seconds(failing))}; Daly: every {shown_seconds(daly_seconds(failing))}",
    ]
    work = failing.work_seconds
    lines: dict[str, list[Point]] = {
        "simulated": [
            (row.every_seconds, work / row.highest_seconds, row.useful_share, work / row.lowest_seconds) for row in rows
        ],
        f"{IDEAL}, by Daly's model": [
            (row.every_seconds, ideal, ideal, ideal) for row in rows for ideal in [work / row.expected_seconds]
        ],
    }
    return report_of(rows, columns, answers, "seconds of work between saves", [Panel("work / time", lines)])


def _as_fast(best: SavesRow, rows: Sequence[SavesRow]) -> str:
    """List the other intervals that take as long, within noise."""
    others = [
        shown_seconds(row.every_seconds)
        for row in rows
        if row is not best
        and row.total_seconds - best.total_seconds <= noise(row.total_seconds, row.error_seconds, best.error_seconds)
    ]
    return f"; {', '.join(others)} {'is' if len(others) == 1 else 'are'} as fast within noise" if others else ""


def _row(failing: Failing, every_seconds: float, num_seeds: int) -> SavesRow:
    totals = [simulate_failures(failing, every_seconds, numpy.random.default_rng(seed)) for seed in range(num_seeds)]
    mean = sum(totals) / num_seeds
    return SavesRow(
        every_seconds,
        mean,
        min(totals),
        max(totals),
        error_of_mean(totals),
        failing.work_seconds / mean,
        expected_seconds(failing, every_seconds),
    )
