"""Horovod's operators on flat host arrays: Average, Sum, Adasum, Min, Max and Product, with factors."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy

from mpitrain.allreduce.algorithm import BFLOAT16, FLOATS, Progress, Sequential
from mpitrain.allreduce.group import Group
from mpitrain.torch import reductions
from mpitrain.world import World

if TYPE_CHECKING:
    from mpitrain.horovod.named_call import Reduced


class Operator(enum.IntEnum):
    """What a reduction makes of the ranks' values. The numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"op={value!r} is no operator; give one of {', '.join(op.name for op in cls)}")


_UFUNCS = {
    "Average": numpy.add,
    "Sum": numpy.add,
    "Min": numpy.minimum,
    "Max": numpy.maximum,
    "Product": numpy.multiply,
}


def reduction(op: str) -> reductions.Reduction:
    """Return the reduction of an operator other than Adasum. Average divides by the number of ranks."""
    return reductions.Reduction(op, _UFUNCS[op], op == "Average")


def check(op: Operator, dtype: numpy.dtype, *factors: float) -> None:
    """Check that an operator with these factors can be applied to values of a dtype.

    Raises:
        ValueError: it cannot.
    """
    if op is Operator.Adasum and dtype not in FLOATS:
        allowed = ", ".join(str(one) for one in FLOATS)
        raise ValueError(f"Adasum of {dtype}; it takes {allowed}: convert the tensor, or use Sum")
    if dtype.kind == "b" and (op is Operator.Average or any(factor != 1.0 for factor in factors)):
        raise ValueError(
            f"{op.name} of bool: booleans have no mean and take no factor; use Max or Min, or convert them"
        )
    if dtype.kind == "c" and op in (Operator.Min, Operator.Max):
        raise ValueError(f"{op.name} of {dtype}: complex numbers have no order")


def allreduce(world: World, sums: Sequential, flat: numpy.ndarray, reduced: Reduced) -> Progress:
    """Replace `flat` by the result of all ranks, with both factors."""
    scale(flat, reduced.prescale)
    if reduced.op == "Adasum":
        if world.size > 1 and flat.size:
            from mpitrain.horovod.adasum import adasum_steps

            group = Group(world.background.comm, tuple(range(world.size)), world.rank)
            yield from adasum_steps(group, [slice(0, flat.size)])(flat)
    else:
        yield from reductions.allreduce(world, sums, flat, reduction(reduced.op))
    scale(flat, reduced.postscale)


def scale(flat: numpy.ndarray, factor: float) -> None:
    """Multiply in place: integers in float64 and toward zero, 16-bit floats in float32, others in their own dtype."""
    if factor == 1.0:
        return
    if flat.dtype.kind in "iu":
        flat[:] = (flat.astype(numpy.float64) * factor).astype(flat.dtype)
    elif flat.dtype == numpy.float16 or flat.dtype == BFLOAT16:
        flat[:] = (flat.astype(numpy.float32) * numpy.float32(factor)).astype(flat.dtype)
    else:
        numpy.multiply(flat, flat.dtype.type(factor), out=flat)
