"""torch's reduce operations on CPU arrays, bitwise identical on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch

from mpitrain.allreduce.algorithm import DTYPES, Progress, Sequential, in_phases
from mpitrain.collectives import moves
from mpitrain.errors import ProcessGroupError
from mpitrain.waiting.control import until
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

# The key is the name of torch's operation.
_UFUNCS = {
    "SUM": numpy.add,
    "AVG": numpy.add,
    "PRODUCT": numpy.multiply,
    "MIN": numpy.minimum,
    "MAX": numpy.maximum,
    "BAND": numpy.bitwise_and,
    "BOR": numpy.bitwise_or,
    "BXOR": numpy.bitwise_xor,
}
_BITWISE = ("BAND", "BOR", "BXOR")


@dataclass(frozen=True)
class Reduction:
    """One operation.

    Attributes:
        name: torch's name, such as SUM.
        ufunc: combines two arrays.
        averages: the result of all ranks is divided by their number, for integers toward zero.
    """

    name: str
    ufunc: numpy.ufunc
    averages: bool

    def combine(self, total: numpy.ndarray, other: numpy.ndarray) -> None:
        """Overwrite `total` with the result of both."""
        with numpy.errstate(all="ignore"):
            self.ufunc(total, other, out=total)

    def end(self, flat: numpy.ndarray, size: int) -> None:
        """Finish the result of all ranks in `flat`, in place."""
        if not self.averages:
            return
        if flat.dtype.kind in "iu":
            # The exact sum is divided toward zero, as in NCCL. NumPy's own division of integers rounds down.
            divisor = numpy.array(size, numpy.result_type(flat.dtype, numpy.min_scalar_type(size)))
            flat[:] = (flat - numpy.fmod(flat, divisor)) // divisor
        else:
            numpy.divide(flat, size, out=flat)


@cache
def reduction(kind: Any, dtype: torch.dtype) -> Reduction:
    """Return the operation for torch's `kind`, which is opts.reduceOp.op.

    Raises:
        ProcessGroupError: this backend does not have the operation, or not for this dtype.
    """
    name = kind.name
    ufunc = _UFUNCS.get(name)
    if ufunc is None:
        raise ProcessGroupError(
            f"ReduceOp.{name} does not exist in the backend mpitrain; known are "
            f"{', '.join(_UFUNCS)}. Multiply before the call instead"
        )
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if name in _BITWISE and not whole:
        raise ProcessGroupError(f"ReduceOp.{name} of {dtype}: it is for integers and bool")
    if name == "AVG" and dtype == torch.bool:
        raise ProcessGroupError(
            "ReduceOp.AVG of torch.bool: booleans have no mean; use MAX or MIN, or convert to a float"
        )
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ProcessGroupError(f"ReduceOp.{name} of {dtype}: complex numbers have no order")
    if dtype.itemsize == 1 and dtype.is_floating_point:
        raise ProcessGroupError(f"{dtype} cannot be reduced; convert to bfloat16 or a wider dtype")
    return Reduction(name, ufunc, name == "AVG")


@in_phases
def allreduce(world: World, sums: Sequential, flat: numpy.ndarray, how: Reduction) -> Iterator[Progress]:
    """Replace `flat` with the result over all ranks. `sums` computes it where it supports the operation."""
    if world.size > 1 and flat.size:
        if how.ufunc is numpy.add and flat.dtype in DTYPES:
            yield sums.steps(flat, None)
        elif flat.nbytes * world.size <= moves.SHORT_BYTES:
            rows = numpy.empty((world.size, flat.size), flat.dtype)
            yield until(world.background.comm.Iallgather(flat.view(numpy.uint8), rows.view(numpy.uint8)).Test)
            fold(rows, flat, how)
        else:
            parts = [flat[part_of(flat.size, rank, world.size)] for rank in range(world.size)]
            yield moves.reduce_scatter(world, parts, parts[world.rank], how.combine)
            yield moves.allgather(world, parts)
    how.end(flat, world.size)


def reduce(world: World, flat: numpy.ndarray, root: int, how: Reduction) -> Progress:
    """Replace `root`'s `flat` with the result over all ranks. On other ranks `flat` does not change."""
    if world.size > 1 and flat.size:
        if flat.nbytes * world.size <= moves.SHORT_BYTES:
            rows = numpy.empty((world.size if world.rank == root else 0, flat.size), flat.dtype)
            yield from moves.gather(world, flat, list(rows), root)
            if world.rank == root:
                rows[root] = flat
                fold(rows, flat, how)
        else:
            slices = [part_of(flat.size, rank, world.size) for rank in range(world.size)]
            parts = [flat[part] for part in slices]
            own = parts[world.rank].copy()
            yield from moves.reduce_scatter(world, parts, own, how.combine)
            yield from moves.gather(world, own, parts, root)
            if world.rank == root:
                parts[root][:] = own
    if world.rank == root:
        how.end(flat, world.size)


def reduce_scatter(world: World, parts: list[numpy.ndarray], own: numpy.ndarray, how: Reduction) -> Progress:
    """Overwrite `own` with the result of all ranks' parts for this rank. `own` may be a view of `parts`."""
    total = own
    if any(numpy.may_share_memory(own, part) for part in parts):
        total = numpy.empty_like(own)  # data that is still to be sent must not be overwritten
    total[:] = parts[world.rank]
    yield from moves.reduce_scatter(world, parts, total, how.combine)
    how.end(total, world.size)
    if total is not own:
        own[:] = total


def fold(rows: numpy.ndarray, flat: numpy.ndarray, how: Reduction) -> None:
    """Overwrite `flat` with the result of the rows, in rank order."""
    flat[:] = rows[0]
    for row in rows[1:]:
        how.combine(flat, row)
