"""The search for the origin of NaN or infinity. It runs only after a step has failed, so it does not slow good
steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from mpitrain.allreduce.algorithm import FLOATS
from mpitrain.arrays import Array, is_array, namespace
from mpitrain.errors import NonFiniteError, TreeError, everywhere
from mpitrain.tree import Tree, leaves
from mpitrain.world.world import World


def located(
    world: World, error: NonFiniteError, *, step: int, batch: Tree, loss: float, parameters: Mapping[str, Array]
) -> NonFiniteError:
    """Return `error`, which all ranks have, with the step and all other non-finite values added. Collective.

    Args:
        step: the number of the step that failed, the same on all ranks.
        batch: this rank's part of the batch, as the data source returned it.
        loss: this rank's loss; 0 if it had no samples.
        parameters: this rank's parameters by name.
    """
    of_rank = world.allgather(", ".join([*_of_loss(loss), *_of_batch(batch), *_of_parameters(parameters)]))
    if len(set(of_rank)) == 1:
        everyone = "on all ranks" if world.size > 1 else world.name()
        besides = [f"{everyone}: {of_rank[0]}"] if of_rank[0] else []
    else:
        besides = [f"{world.name(rank)}: {text}" for rank, text in enumerate(of_rank) if text]
    text = "; ".join(besides) or "the losses, the batches and the parameters of all ranks are finite"
    return everywhere(NonFiniteError(f"{error}. Step {step}; also checked: {text}"))


def _of_loss(loss: float) -> Iterator[str]:
    if not math.isfinite(loss):
        yield f"the loss is {loss}"


def _of_batch(batch: Tree) -> Iterator[str]:
    """Name the first non-finite place in each leaf. Sample numbers count from 0 in this rank's part."""
    try:
        for path, leaf in leaves(batch):
            if is_array(leaf) and leaf.ndim and (place := _first(leaf)) is not None:
                yield f"the batch holds {leaf[place]} in {path or 'its array'}, sample {place[0]} of {len(leaf)}"
    except TreeError:
        yield "the batch is not a tree of arrays and was not checked"


def _of_parameters(parameters: Mapping[str, Array]) -> Iterator[str]:
    for name, value in parameters.items():
        if (place := _first(value)) is not None:
            yield f"the parameter {name} holds {value[place]}"
            return


def _first(array: Array) -> tuple[int, ...] | None:
    """Return the first place that is not finite, in the array's order."""
    if array.dtype.kind not in "fc" and array.dtype not in FLOATS:
        return None
    xp = namespace(array)
    bad = ~xp.isfinite(array)
    if not bad.any():
        return None
    return tuple(int(number) for number in xp.unravel_index(bad.argmax(), array.shape))
