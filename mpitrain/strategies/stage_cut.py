"""Which layers are on which stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.errors import ConfigError, everywhere
from mpitrain.shard import part_of
from mpitrain.world import World


def num_stages_of(world: World, stages: int | Sequence[int]) -> int:
    """Return the number of stages, in a World of which each pipeline has as many ranks.

    Raises:
        ConfigError: it does not divide the number of ranks. Raised on every rank.
    """
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
        ConfigError: there are fewer layers than pieces, or `stages` does not say where each layer is.
    """
    if not isinstance(stages, int):
        if min(stages) < 1 or sum(stages) != num_layers:
            raise ConfigError(
                f"stages={list(stages)} places {sum(stages)} layers; the model has {num_layers}, and each stage needs "
                "one or more. Give the number of layers of every stage"
            )
        ends = [sum(stages[: number + 1]) for number in range(len(stages))]
        return [range(end - count, end) for end, count in zip(ends, stages, strict=True)]
    count = stages * num_pieces
    if num_layers < count:
        raise ConfigError(
            f"{num_layers} layers cannot be cut into {stages} stages{f' of {num_pieces} pieces' * (num_pieces > 1)}: "
            f"each needs a layer. Use at most {num_layers // num_pieces} stages, or give the model as more layers"
        )
    parts = [part_of(num_layers, number, count) for number in range(count)]
    return [range(part.start, part.stop) for part in parts]
