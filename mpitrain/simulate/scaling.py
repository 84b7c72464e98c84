"""Step time, samples/s and efficiency for numbers of ranks, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from mpitrain.shown import shown_bytes
from mpitrain.simulate.machines import Machines
from mpitrain.simulate.report import Panel, Point, SimulationReport, counted, shown_seconds
from mpitrain.simulate.sums import check_sum
from mpitrain.simulate.training import SimulatedTraining, is_plain_ring, least_messages, simulate_steps

_GOOD = 0.8  # an efficiency that is worth the machines
# Measured with a ring of 1,024 ranks: see docs/log.md. Without events, the messages of at most two lengths of buckets
# are recorded first.
_MESSAGE_SECONDS, _MESSAGE_BYTES = 20e-6, 900
_RECORD_SECONDS, _REPLAY_SECONDS, _REPLAY_BYTES = 4e-6, 1e-8, 50
_LONG_SECONDS = 20.0  # of processor time; a longer simulation is announced


@dataclass(frozen=True)
class ScalingRow:
    """Some ranks with one algorithm.

    Attributes:
        num_ranks, algorithm: which.
        step_seconds: mean over steps and seeds.
        lowest_seconds, highest_seconds: means of the fastest and of the slowest seed.
        samples_per_second: of all ranks.
        efficiency: samples/s as a share of what the ranks would make without each other.
        bound: see SimulatedRun.
    """

    num_ranks: int
    algorithm: str
    step_seconds: float
    lowest_seconds: float
    highest_seconds: float
    samples_per_second: float
    efficiency: float
    bound: str


def scaling_report(
    machines: Machines,
    trainings: Mapping[str, SimulatedTraining],
    ranks: Sequence[int],
    *,
    num_steps: int,
    num_seeds: int,
    tell: Callable[[str], object] = lambda _: None,
) -> SimulationReport:
    """Simulate every number of ranks with every training.

    Args:
        trainings: by their names in the table.
        ranks: numbers of ranks; each at least 1.
        num_steps: steps, or rounds.
        num_seeds: without a spread, one is enough.
        tell: called with a sentence before a simulation that takes long.

    Raises:
        ConfigError: there is no room for so many ranks, or something cannot be simulated. Nothing was simulated.
    """
    for num_ranks in ranks:
        num_nodes = machines.nodes_of(num_ranks)[-1] + 1
        for training in trainings.values():
            check_sum(training.algorithm, training.codec, num_nodes, machines.costs)
    warning = _warning(machines, trainings, ranks, num_steps * num_seeds)
    if warning:
        tell(warning)
    rows = [
        _row(machines, name, training, num_ranks, num_steps, num_seeds)
        for num_ranks in sorted(set(ranks))
        for name, training in trainings.items()
    ]
    columns = ("ranks", "<algorithm", "step", "fastest and slowest seed", "samples/s", "efficiency", "<bound by")
    cells = [
        [
            str(row.num_ranks),
            row.algorithm,
            shown_seconds(row.step_seconds),
            f"{shown_seconds(row.lowest_seconds)} - {shown_seconds(row.highest_seconds)}" if num_seeds > 1 else "",
            f"{row.samples_per_second:.4g}",
            f"{row.efficiency:.1%}",
            row.bound,
        ]
        for row in rows
    ]
    return SimulationReport(
        columns, cells, [asdict(row) for row in rows], _answers(rows), "ranks",
        [
            Panel("samples/s", _lines(rows, per_second=True), is_log=True),
            Panel("efficiency", _lines(rows, per_second=False)),
        ],
    )  # fmt: skip


def _warning(
    machines: Machines, trainings: Mapping[str, SimulatedTraining], ranks: Sequence[int], num_steps: int
) -> str:
    """What to say before a simulation that takes long; "" if it does not."""
    total, seconds, most, largest = 0, 0.0, 0, ""
    for num_ranks in set(ranks):
        for name, training in trainings.items():
            messages, of_bucket = least_messages(machines, num_ranks, training)
            times = num_steps if training.spread else 1  # without a spread, steps repeat
            total += messages * times
            if is_plain_ring(training) and machines.ranks_per_node == 1:
                seconds += 2 * of_bucket * _RECORD_SECONDS + messages * times * _REPLAY_SECONDS
                num_bytes = of_bucket * _REPLAY_BYTES
            else:
                seconds += messages * times * _MESSAGE_SECONDS
                num_bytes = of_bucket * _MESSAGE_BYTES
            if num_bytes > most:
                most, largest = num_bytes, f"{name} with {num_ranks} ranks"
    if seconds < _LONG_SECONDS:
        return ""
    return (
        f"this simulates at least {total:,} messages, which take about {shown_seconds(seconds)} of processor time or "
        f"more; {largest} needs about {shown_bytes(most)} of memory or more. Fewer ranks or "
        "parameters, larger buckets, and with --spread fewer --steps and --seeds take less"
    )


def _row(
    machines: Machines, name: str, training: SimulatedTraining, num_ranks: int, num_steps: int, num_seeds: int
) -> ScalingRow:
    runs = [simulate_steps(machines, num_ranks, training, num_steps, seed) for seed in range(num_seeds)]
    seconds = sum(run.mean_seconds for run in runs) / num_seeds
    speeds = [machines.speeds[node] for node in machines.nodes_of(num_ranks)]
    speeds[-1] /= training.straggler
    alone = sum(speeds) / training.compute_seconds
    return ScalingRow(
        num_ranks,
        name,
        seconds,
        min(run.mean_seconds for run in runs),
        max(run.mean_seconds for run in runs),
        num_ranks * training.num_samples / seconds,
        num_ranks / seconds / alone,
        runs[0].bound,
    )


def _answers(rows: Sequence[ScalingRow]) -> list[str]:
    answers = []
    ranks = list(dict.fromkeys(row.num_ranks for row in rows))
    names = list(dict.fromkeys(row.algorithm for row in rows))
    for name in names:
        good = [row.num_ranks for row in rows if row.algorithm == name and row.efficiency >= _GOOD]
        how_far = f"up to {counted(max(good), 'rank')}" if good else "for none of these numbers of ranks"
        answers.append(f"{name}: an efficiency of {_GOOD:.0%} {how_far}")
    if len(names) > 1:
        changes, last = [], ""
        for number in ranks:
            best = min((row for row in rows if row.num_ranks == number), key=lambda row: row.step_seconds)
            if number > 1 and best.algorithm != last:
                last = best.algorithm
                changes.append(f"{last} from {number} ranks")
        answers.append(f"fastest: {', '.join(changes)}")
    return answers


def _lines(rows: Sequence[ScalingRow], *, per_second: bool) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for row in rows:
        ideal = row.samples_per_second / row.efficiency
        mean = row.samples_per_second if per_second else row.efficiency
        shares = (row.step_seconds / row.highest_seconds, 1.0, row.step_seconds / row.lowest_seconds)
        low, middle, high = (mean * share for share in shares)
        lines.setdefault(row.algorithm, []).append((row.num_ranks, low, middle, high))
        if per_second and row.algorithm == rows[0].algorithm:
            lines.setdefault("ideal", []).append((row.num_ranks, ideal, ideal, ideal))
    return lines
