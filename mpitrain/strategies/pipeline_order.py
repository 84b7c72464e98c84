"""In which order a rank of a pipeline makes its forward and backward passes.

    gpipe, 4 micro-batches, stage 1 of 2      F0 F1 F2 F3 B0 B1 B2 B3
    1f1b, 4 micro-batches, stage 0 of 2       F0 F1 B0 F2 B1 F3 B2 B3

Both take (m + s - 1) times the time of a micro-batch, for m micro-batches and s stages. GPipe keeps the activations of
m micro-batches, 1F1B those of at most s. With `interleaved`, each rank has several pieces of the model, and waits less.

Sources: Huang et al., GPipe, arXiv:1811.06965; Harlap et al., PipeDream, SOSP 2019 (1F1B); Narayanan et al., Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv:2104.04473, section 2.2 (1F1B with a flush,
and interleaved).
"""

from __future__ import annotations

from typing import NamedTuple

SCHEDULES = ("1f1b", "gpipe", "interleaved")


class Pass(NamedTuple):
    """One forward or backward pass: of a micro-batch, through one of this rank's pieces of the model."""

    is_forward: bool
    piece: int
    micro: int


def order(schedule: str, stage: int, num_stages: int, num_pieces: int, num_micro: int) -> list[Pass]:
    """Return the passes of a rank, in order.

    No rank waits for ever, also if all ranks of a pipeline leave out the same micro-batches.

    Args:
        schedule: one of SCHEDULES.
        stage: of the rank, from 0.
        num_pieces: of each rank; 1 unless the schedule is "interleaved". Then num_stages divides num_micro.
    """
    count = num_pieces * num_micro
    if schedule == "gpipe":
        num_first = count
    elif schedule == "1f1b":
        num_first = num_stages - stage - 1
    else:
        num_first = 2 * (num_stages - stage - 1) + (num_pieces - 1) * num_stages
    num_first = min(num_first, count)
    passes = [_nth(True, number, num_stages, num_pieces) for number in range(num_first)]
    for number in range(num_first, count):
        passes.append(_nth(True, number, num_stages, num_pieces))
        passes.append(_nth(False, number - num_first, num_stages, num_pieces))
    return passes + [_nth(False, number, num_stages, num_pieces) for number in range(count - num_first, count)]


def _nth(is_forward: bool, number: int, num_stages: int, num_pieces: int) -> Pass:
    """The pieces take turns, each with as many micro-batches as there are stages. Backwards, the last is first."""
    if num_pieces == 1:
        return Pass(is_forward, 0, number)
    group, place = divmod(number, num_stages * num_pieces)
    piece, micro = divmod(place, num_stages)
    return Pass(is_forward, piece if is_forward else num_pieces - 1 - piece, group * num_stages + micro)
