"""The assignment of layers to the stages of a pipeline, and the checks of Pipeline's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mpitrain.adapters.staged import LayerCost
from mpitrain.errors import ConfigError, everywhere
from mpitrain.strategies.passes import SCHEDULES
from mpitrain.tree import Tree
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

Stages = int | str | Sequence[int]  # the only text is "auto"


def check_arguments(
    stages: Stages,
    schedule: str,
    micro_batches: int,
    num_stages: int | None,
    sample: Tree,
    pieces: int | None,
    activations: str | None,
) -> None:
    """Raise ConfigError for arguments of Pipeline that are not allowed in any World."""
    count = num_stages if stages == "auto" else stages
    problem = _problem_of_stages(stages, num_stages, sample) or _problem_of_schedule(
        count, schedule, micro_batches, pieces, activations
    )
    if problem:
        raise ConfigError(f"Pipeline: {problem}")


def _problem_of_stages(stages: Stages, num_stages: int | None, sample: Tree) -> str:
    if stages == "auto":
        if sample is None:
            return "stages='auto' without a sample; give sample=(inputs, targets), a micro-batch to measure layers with"
    elif isinstance(stages, str):
        return f"stages={stages!r}; allowed: a number, a list of numbers, or 'auto'"
    elif num_stages is not None or sample is not None:
        return f"num_stages or sample with stages={stages}; allowed with stages='auto' only"
    return ""


def _problem_of_schedule(
    stages: Stages | None, schedule: str, micro_batches: int, pieces: int | None, activations: str | None
) -> str:
    if schedule not in SCHEDULES:
        return f"schedule={schedule!r}; allowed: {', '.join(SCHEDULES)}"
    if activations not in (None, "bf16"):
        return f"activations={activations!r}; allowed: None, 'bf16'"
    if micro_batches < 1:
        return f"micro_batches={micro_batches}; allowed: 1 or more"
    if schedule == "interleaved":
        return _problem_of_interleaved(stages, micro_batches, pieces)
    if pieces is not None:
        return f"pieces={pieces} with {schedule}, where a rank has one piece; leave it out, or use interleaved"
    return ""


def _problem_of_interleaved(stages: Stages | None, micro_batches: int, pieces: int | None) -> str:
    if stages is None:
        return "interleaved with stages='auto' and no num_stages; give num_stages"
    if not isinstance(stages, int):
        return f"stages={list(stages)} with interleaved; allowed: the number of stages"
    if stages < 2 or (pieces is not None and pieces < 2):
        return (
            f"interleaved with stages={stages} and pieces={2 if pieces is None else pieces}; allowed: 2 or more of both"
        )
    if micro_batches % stages:
        return f"interleaved with micro_batches={micro_batches}; allowed: a multiple of the {stages} stages"
    return ""


_MIB = 2**20


def num_stages_of(world: World, stages: Stages, num_stages: int | None) -> int:
    """Return the number of stages, which is also the number of ranks of each pipeline.

    Raises:
        ConfigError: it does not divide the number of ranks. Raised on every rank.
    """
    if isinstance(stages, str):
        count = world.size if num_stages is None else num_stages
    else:
        count = stages if isinstance(stages, int) else len(stages)
    if count < 1 or world.size % count:
        raise everywhere(
            ConfigError(
                f"{world.size} ranks cannot form pipelines of {count} stages; the number of stages must "
                f"divide that of the ranks. Start a multiple of {max(count, 1)} ranks, or set stages to a divisor of "
                f"{world.size}"
            )
        )
    return count


def cut_layers(stages: int | Sequence[int], num_pieces: int, num_layers: int) -> list[range]:
    """Return the layers of each piece, in the order of the model: equal numbers, or those of `stages`.

    Raises:
        ConfigError: there are fewer layers than pieces, or `stages` does not place each layer.
    """
    if not isinstance(stages, int):
        if min(stages) < 1 or sum(stages) != num_layers:
            raise ConfigError(
                f"stages={list(stages)} places {sum(stages)} layers; the model has {num_layers}, and each stage needs "
                "one or more. Give the number of layers of every stage"
            )
        ends = list(accumulate(stages))
        return [range(end - count, end) for end, count in zip(ends, stages, strict=True)]
    check_num_layers(stages, num_pieces, num_layers)
    count = stages * num_pieces
    parts = [part_of(num_layers, number, count) for number in range(count)]
    return [range(part.start, part.stop) for part in parts]


def check_num_layers(stages: int, num_pieces: int, num_layers: int) -> None:
    """Raise ConfigError if there are fewer layers than pieces."""
    if num_layers < stages * num_pieces:
        raise ConfigError(
            f"{num_layers} layers cannot be cut into {stages} stages{f' of {num_pieces} pieces' * (num_pieces > 1)}: "
            f"each needs a layer. Use at most {num_layers // num_pieces} stages, or give the model as more layers"
        )


def costs_of_stages(costs: Sequence[Sequence[LayerCost]], num_stages: int) -> list[list[LayerCost]]:
    """Return the cost of each layer on each stage, from the costs on each rank: the slowest pipeline counts."""
    return [[max(of_ranks) for of_ranks in zip(*costs[stage::num_stages], strict=True)] for stage in range(num_stages)]


def balanced_cut(costs: Sequence[Sequence[LayerCost]], num_pieces: int) -> list[range]:
    """Return the layers of each piece, in the order of the model, so that the slowest piece takes the least time.

    Among equally good cuts, it takes one whose other pieces differ little. It is found by dynamic
    programming, from the best cuts of the first layers into fewer pieces.

    Args:
        costs: of each layer, on each stage.
        num_pieces: on each stage. Piece i is on stage i % len(costs).

    Raises:
        ConfigError: too few layers have parameters: each piece needs one layer that has some.
    """
    num_stages, num_layers = len(costs), len(costs[0])
    before = [[0.0, *accumulate(layer.seconds for layer in of_stage)] for of_stage in costs]
    trained = [0, *accumulate(layer.parameter_bytes for layer in costs[0])]
    # By the number of layers: the time of the slowest piece so far, the squares of all, and where the pieces end.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for number in range(num_stages * num_pieces):
        times, longer = before[number % num_stages], {}
        for end in range(1, num_layers + 1):
            ways = []
            for begin, (slowest, squares, ends) in best.items():
                if begin < end and trained[begin] < trained[end]:
                    seconds = times[end] - times[begin]
                    ways.append((max(slowest, seconds), squares + seconds**2, [*ends, end]))
            if ways:
                longer[end] = min(ways)
        best = longer
    if num_layers not in best:
        raise ConfigError(
            f"{num_layers} layers cannot be cut into {num_stages * num_pieces} pieces that have parameters to train. "
            "Use fewer stages, or give the model as more layers"
        )
    ends = best[num_layers][2]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def table_of(layers: Sequence[range], costs: Sequence[Sequence[LayerCost]]) -> str:
    """Return lines with the stage and the cost of each layer, and the sums of each stage."""
    rows = ["layer  stage        ms  parameters MiB  activations MiB"]
    sums = [[0.0, 0, 0] for _ in costs]
    for number, piece in enumerate(layers):
        stage = number % len(costs)
        for layer in piece:
            cost = costs[stage][layer]
            rows.append(f"{layer:5}  {stage:5}  {_columns(*cost)}")
            sums[stage] = [one + more for one, more in zip(sums[stage], cost, strict=True)]
    rows += [f"  all  {stage:5}  {_columns(*of_stage)}" for stage, of_stage in enumerate(sums)]
    return "\n".join(rows)


def _columns(seconds: float, parameter_bytes: float, activation_bytes: float) -> str:
    return f"{seconds * 1e3:8.3f}  {parameter_bytes / _MIB:14.2f}  {activation_bytes / _MIB:15.2f}"
