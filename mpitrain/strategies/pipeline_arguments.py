"""Which arguments of Pipeline fit together."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.errors import ConfigError
from mpitrain.strategies.pipeline_order import SCHEDULES
from mpitrain.tree import Tree

Stages = int | str | Sequence[int]  # a text is "auto"


def check_arguments(
    stages: Stages,
    schedule: str,
    micro_batches: int,
    num_stages: int | None,
    sample: Tree,
    pieces: int | None,
    activations: str | None,
) -> None:
    """Raise ConfigError for arguments of Pipeline that are not allowed, whatever the World."""
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
