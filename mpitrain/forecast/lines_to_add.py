"""The end of a plan: the one line to add to a script or its command, how fast its steps are then, and what that costs
in loss by the table of measured_loss.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.forecast.report import counted, shown_seconds
from mpitrain.measured_loss import MeasuredLoss, losses_of_other_sizes, shown_millions

if TYPE_CHECKING:
    from mpitrain.forecast.planner import Forecast, Planner

# By what trains (StepWatch.trains): the line with a strategy, and where it belongs.
_PLACES = {
    "prepare": (
        "strategy={} in mpitrain.torch.prepare(), and mpitrain.torch.end_round(model) before the model is evaluated "
        "or saved"
    ),
    "TorchTrainer": "strategy={} in mpitrain.torch.Trainer()",
    "Trainer": "{} as the strategy of mt.Parts()",
}
_SIMILAR = 2.0  # a model of up to this many times the parameters is as large


@dataclass(frozen=True)
class PlannedTraining:
    """What a plan knows of the whole training.

    Attributes:
        front: what trains: "prepare", "Trainer", "TorchTrainer"; "": the script uses a GradientReducer, to which local
            updates cannot be added.
        steps: of the training; None: not known.
        num_bytes: of its gradients, in float32.
    """

    front: str
    steps: int | None
    num_bytes: int


def lines_to_add(planner: Planner, rows: Sequence[Forecast], plain: Forecast, training: PlannedTraining) -> list[str]:
    """What to add for one number of ranks, the best last: a setting, and local updates where they are faster.

    Only what has lost nothing in a measured training, no longer than this one, is offered. Of what is equal within the
    noise of the measured steps, the one that sends most is taken, because it changes the training least.

    Args:
        rows: of this number of ranks on several nodes.
        plain: the one of them that exchanges every step in full.
    """
    number, steps = plain.num_ranks, training.steps
    known = [row for row in rows if row.way.is_exact or row.way.loss(steps)]
    known = [row for row in known if row.way.is_setting or training.front]
    setting = _best(planner, [plain, *(row for row in known if row.way.is_setting)])
    best = _best(planner, [setting, *(row for row in known if not row.way.is_setting)])
    lines = [_line(row, plain, training) for row in dict.fromkeys([setting, best]) if row is not plain]
    if not lines:
        lines = [f"{counted(number, 'rank')}: nothing to add: no way without loss is faster by more than noise"]
    longer = [row for row in rows if training.front and row.way.outer and row.way.loss(None) and row not in known]
    later = _best(planner, [best, *longer])
    if later is not best and (row := later.way.loss(None)) is not None:
        lines.insert(0, (
            f"{counted(number, 'rank')}: {later.way.strategy} would take {shown_seconds(later.step_seconds)} a step, "
            f"but lost nothing only with {row.rounds} rounds, which are {row.rounds * later.way.sync_every} steps; "
            f"this training has {steps}"
        ))  # fmt: skip
    return lines


def _best(planner: Planner, rows: Sequence[Forecast]) -> Forecast:
    fastest = min(rows, key=lambda row: row.step_seconds)
    gentle = sorted(rows, key=lambda row: -row.wire_bytes)
    return next(row for row in gentle if row.step_seconds - fastest.step_seconds <= planner.noise(row))


def _line(row: Forecast, plain: Forecast, training: PlannedTraining) -> str:
    if row.way.is_setting:
        line = " ".join(f"{name}={value}" for name, value in row.way.settings().items()) + " before the command"
    else:
        line = _PLACES.get(training.front, _PLACES["Trainer"]).format(row.way.strategy)
    seconds, before = shown_seconds(row.step_seconds), shown_seconds(plain.step_seconds)
    times = f"{plain.step_seconds / row.step_seconds:.3g} times as fast"
    texts = [f"{counted(row.num_ranks, 'rank')}: add {line}: {seconds} a step in place of {before}, {times}"]
    if row.way.is_exact:
        return f"{texts[0]}; the loss does not change"
    loss = row.way.loss(training.steps)
    assert loss is not None
    texts.append(str(loss))
    texts += [f"but with a model of another size {row}" for row in losses_of_other_sizes(loss)]
    if not training.steps:
        least = loss.length * (row.way.sync_every if row.way.outer else 1)
        texts.append(f"only for trainings of at least {least} steps (--total-steps)")
    if others := _others(row, loss, training):
        texts.append(f"not measured with {', '.join(others)}")
    return "; ".join(texts)


def _others(row: Forecast, loss: MeasuredLoss, training: PlannedTraining) -> list[str]:
    """What this training has that the measured one had not."""
    parameters, others = training.num_bytes // 4, []
    if not loss.parameters / _SIMILAR <= parameters <= loss.parameters * _SIMILAR:
        others.append(f"{shown_millions(parameters)} parameters")
    if row.num_ranks != loss.workers:
        others.append(counted(row.num_ranks, "rank"))
    if training.steps and row.way.outer and (rounds := training.steps // row.way.sync_every) != loss.rounds:
        others.append(f"{rounds} rounds")
    return others
