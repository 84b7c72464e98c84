"""The placement of a value on the ranks: equal on all, parts of a batch, or summands of a sum."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy

from mpitrain.arguments import shortened
from mpitrain.arrays import Array, check_class, is_array, is_device_array
from mpitrain.errors import ConfigError, MismatchError, TreeError, everywhere
from mpitrain.watching.ranges import rank_ranges

if TYPE_CHECKING:
    from mpitrain.world.world import World

Expected: TypeAlias = Literal["equal", "parts", "sum"]


@dataclass(frozen=True)
class RankLayout:
    """How the arrays of all ranks differ, as far as shapes, dtypes and bits show. The same on every rank.

    Attributes:
        kind: "equal": shape, dtype and bits are equal on all ranks. "differs": shape and dtype are equal and the bits
            are not, so these may be parts of a batch, or summands of a sum; only the program knows which. "parts": the
            first dimensions differ and the others are equal, so nothing can be summed. "unlike": the dtypes, or further
            dimensions, differ.
        dtypes: by rank.
        shapes: by rank.
        groups: the ranks in groups of equal bits, shape and dtype; each group in ascending order.
    """

    kind: Literal["equal", "differs", "parts", "unlike"]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        """Describe the layout in one line."""
        first = f"{self.dtypes[0]} {self.shapes[0]}"
        if self.kind == "equal":
            return f"equal on all {len(self.shapes)} ranks: {first}"
        if self.kind == "differs":
            groups = "; ".join(rank_ranges(group) for group in self.groups)
            return f"{first} on every rank, with different bits: ranks with equal bits are {groups}"
        if self.kind == "parts":
            lengths = ", ".join(str(shape[0]) for shape in self.shapes)
            return f"parts of {sum(shape[0] for shape in self.shapes)} rows: {lengths} by rank, {self.dtypes[0]}"
        return "unlike: " + "; ".join(
            f"rank {rank} has {dtype} {shape}"
            for rank, (dtype, shape) in enumerate(zip(self.dtypes, self.shapes, strict=True))
        )


# The kinds that may be what the program expects.
_ALLOWED: dict[Expected, tuple[str, ...]] = {
    "equal": ("equal",),
    "parts": ("equal", "differs", "parts"),
    "sum": ("equal", "differs"),
}


def find_layout(world: World, array: Array, expected: Expected | None) -> RankLayout:
    """See World.where."""
    try:
        host = _checked(world, array, expected)
    except (ConfigError, TreeError) as error:
        world.refuse("where", error)
    digest = hashlib.blake2b(host.tobytes(), digest_size=16).digest()
    gathered = world._gather((str(host.dtype), host.shape, digest), f"where, expected={expected!r}")
    layout = _layout(gathered)
    if expected is not None and layout.kind not in _ALLOWED[expected]:
        raise everywhere(MismatchError(_difference(world, layout, expected)))
    if expected == "parts" and not layout.shapes[0]:
        raise everywhere(
            MismatchError(f"{world.name(0)}: a number is not a part of a batch; give it a first dimension")
        )
    return layout


def _checked(world: World, array: Array, expected: Expected | None) -> numpy.ndarray:
    """Return the array as a CPU array."""
    if expected is not None and not (isinstance(expected, str) and expected in _ALLOWED):
        allowed = ", ".join(map(repr, _ALLOWED))
        raise ConfigError(f"{world.name()}: expected={shortened(expected)}; allowed: {allowed}")
    if not is_array(array) and not isinstance(array, bool | int | float | complex | numpy.generic):
        raise TreeError(f"{world.name()}: where takes one NumPy or CuPy array or number, not {type(array).__name__}")
    check_class(array, f"{world.name()}: where of the array")
    host: numpy.ndarray = array.get() if is_device_array(array) else numpy.asarray(array)
    if host.dtype.hasobject:
        raise TreeError(f"{world.name()}: where does not take an array of Python objects; convert it to numbers")
    return host


def _layout(gathered: Sequence[tuple[str, tuple[int, ...], bytes]]) -> RankLayout:
    """Compute the layout from dtype, shape and digest of every rank. A pure function."""
    dtypes, shapes, _ = zip(*gathered, strict=True)
    groups = [tuple(rank for rank, other in enumerate(gathered) if other == one) for one in dict.fromkeys(gathered)]
    if len(groups) == 1:
        kind: Literal["equal", "differs", "parts", "unlike"] = "equal"
    elif len(set(zip(dtypes, shapes, strict=True))) == 1:
        kind = "differs"
    elif all(shapes) and len({(dtype, shape[1:]) for dtype, shape in zip(dtypes, shapes, strict=True)}) == 1:
        kind = "parts"
    else:
        kind = "unlike"
    return RankLayout(kind, dtypes, shapes, tuple(groups))


def _difference(world: World, layout: RankLayout, expected: Expected) -> str:
    """Describe the first rank whose array is not as expected."""
    items = [f"{dtype} {shape}" for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True)]
    if expected == "equal":
        rank = next(rank for rank in range(world.size) if rank not in layout.groups[0])
        other = items[rank] if items[rank] != items[0] else "other bits"
        return (
            f"{world.name(rank)}: {other}; {world.name(0)}: {items[0]}; where expected equal values on all ranks. "
            "world.broadcast gives every rank rank 0's values"
        )
    first = 1 if expected == "parts" else 0  # of the dimensions that must be equal
    must_be = [(dtype, len(shape), shape[first:]) for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True)]
    rank = next(rank for rank in range(world.size) if must_be[rank] != must_be[0])
    equal = "dtype, and all dimensions but the first," if expected == "parts" else "dtype and shape"
    name = "parts of a batch" if expected == "parts" else "summands of a sum"
    return f"{world.name(rank)}: {items[rank]}; {world.name(0)}: {items[0]}; {equal} of {name} are equal on all ranks"
