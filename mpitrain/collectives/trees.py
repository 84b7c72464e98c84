"""broadcast, sum and mean of whole trees: packed into flat buffers by dtype and device, exchanged, unpacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import accumulate

import numpy

from mpitrain.allreduce import ALGORITHMS
from mpitrain.allreduce.algorithm import DTYPES, FLOATS, Algorithm
from mpitrain.allreduce.exact import ExactSum, exact_sum
from mpitrain.arguments import weight_of
from mpitrain.arrays import Array, copy_to_host, is_array, is_device_array, like, namespace
from mpitrain.collectives.shares import scale, share_of
from mpitrain.cuda import kernels
from mpitrain.cuda.device import own_gpu
from mpitrain.cuda.sequential import DeviceSequential
from mpitrain.cuda.transports import exact_staged, make_transport
from mpitrain.errors import DeviceError, TreeError, everywhere
from mpitrain.tree import Leaf, Tree, describe, leaves, plain_leaves, rebuild
from mpitrain.waiting.transfer import broadcast_bytes
from mpitrain.world.world import World

_ALIGNMENT = 64  # bytes: a line of the processor's cache, and the alignment that XLA needs


class ArrayTrees:
    """The class behind World's tree calls. Results are new arrays: the caller's arrays are not overwritten."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._algorithm = ALGORITHMS[world.config.algorithm].make(world)  # all ranks have the same settings

    def broadcast(self, tree: Tree, root: int = 0) -> Tree:
        """See World.broadcast."""
        try:
            root = self._world.check_rank(root, "root")
            packed = _Packed(tree, operation="broadcast")
        except Exception as error:
            self._world.refuse("broadcast", error)
        self._world.agree(f"broadcast from rank {root}", packed.lines, anywhere=self._world.rank == root)
        if self._world.size > 1:
            for flat in packed.flats.values():
                broadcast_bytes(self._world.objects, flat.view(numpy.uint8), root, self._world.control.wait)
        return packed.unpack()

    def sum(self, tree: Tree) -> Tree:
        """See World.sum."""
        try:
            packed = _Packed(tree, operation="sum", allowed=DTYPES, world=self._world)
        except Exception as error:
            self._world.refuse("sum", error)
        self._world.agree("sum", packed.lines)
        self._add(packed)
        return packed.unpack()

    def mean(self, tree: Tree, weight: float = 1.0) -> Tree:
        """See World.mean."""
        try:
            packed = _Packed(tree, operation="mean", allowed=FLOATS, as_float=True, world=self._world)
            weight = weight_of(weight, f"{self._world.name()}: weight")
        except Exception as error:
            self._world.refuse("mean", error)
        records = self._world.agree("mean", packed.lines, weight=weight)
        share, _ = share_of(self._world, records["weight"].tolist())
        with packed.on_gpu():
            for flat in packed.flats.values():
                scale(flat, share)
        self._add(packed)
        return packed.unpack()

    def weighted_sum(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the exact sum of all trees of all ranks, each times its weight. Collective.

        Each product is rounded by itself, and their sum once. Every rank has at least one tree. All are alike, with
        numbers and host arrays of floating dtypes.
        """
        packed = [_Packed(tree, operation="weighted sum", allowed=FLOATS, as_float=True) for tree in trees]
        self._world.agree("weighted sum", packed[0].lines)
        for one, weight in zip(packed, weights, strict=True):
            for flat in one.flats.values():
                scale(flat, weight)
        first, *others = packed
        handles = [
            self._exact.start(flat, agreed=True, others=[one.flats[group] for one in others])
            for group, flat in first.flats.items()
        ]
        for handle in handles:
            handle.wait()
        return first.unpack()

    def _add(self, packed: _Packed) -> None:
        is_exact = self._world.config.reduction == "exact"
        if self._world.size == 1 and not is_exact:
            return
        if packed.misplaced:  # on every rank, since their lines are equal
            raise everywhere(DeviceError(f"{packed.misplaced}; move the array to this rank's GPU, or to the CPU"))
        handles = [
            self._algorithm_for(flat, is_exact=is_exact).start(flat, agreed=True) for flat in packed.flats.values()
        ]
        for handle in handles:
            handle.wait()

    def _algorithm_for(self, flat: Array, *, is_exact: bool) -> Algorithm:
        if is_exact and flat.dtype in FLOATS:
            return self._exact_on_device if is_device_array(flat) else self._exact
        return self._transport if is_device_array(flat) else self._algorithm

    @cached_property
    def _exact(self) -> ExactSum:
        """Created at the first sum of floats, by all ranks, which have agreed on this call."""
        return exact_sum(self._world)

    @cached_property
    def _exact_on_device(self) -> DeviceSequential:
        """Created at the first sum of GPU arrays of floats, by all ranks, which have agreed on this call."""
        return exact_staged(self._world, self._exact)

    @cached_property
    def _transport(self) -> DeviceSequential:
        """Created for the first GPU array, by all ranks, which have agreed on this call."""
        return make_transport(self._world)


class _Packed:
    """The leaves of a tree, in one flat buffer for each dtype and device."""

    def __init__(
        self,
        tree: Tree,
        *,
        operation: str,
        allowed: Sequence[numpy.dtype] | None = None,
        as_float: bool = False,
        world: World | None = None,
    ) -> None:
        """
        Args:
            tree: a tree as in World's calls.
            operation: the purpose, for errors.
            allowed: allowed dtypes of leaves; device arrays stay on their device. None: any, with all buffers on the
                CPU.
            as_float: convert Python's and NumPy's real numbers to float64, as a mean needs them.
            world: its ranks add up the GPU arrays, each on its own GPU.

        Raises:
            TreeError: a leaf has another dtype.
        """
        self._tree = tree
        self._leaves: list[Leaf] = []
        self._kinds: list[numpy.dtype] = []
        self.lines = describe(tree, any_number=as_float)
        values: list[Array] = []
        for path, leaf in plain_leaves(tree):
            value = leaf if is_array(leaf) else _array_of(leaf, path)
            if operation == "sum" and _is_whole(leaf):
                value = numpy.array([int(leaf) >> 32, int(leaf) & 0xFFFFFFFF])  # two sums that cannot overflow
            if as_float and not is_array(leaf) and value.dtype.kind in "biuf":
                value = value.astype(numpy.float64)
            self._leaves.append(leaf)
            self._kinds.append(value.dtype)
            values.append(value)
        if allowed is not None:
            self._check(operation, allowed)
        stay = [allowed is not None and is_device_array(value) for value in values]
        are_summed = world is not None and (world.size > 1 or world.config.reduction == "exact")
        gpu = own_gpu(world) if world is not None and are_summed and any(stay) else None
        self.misplaced = ""  # the description of the first array on a GPU other than the rank's; then nothing is packed
        for place, (value, stays) in enumerate(zip(values, stay, strict=True)):
            if stays and gpu is not None and value.device.id != gpu.number:
                self.lines[place] += f" on GPU {value.device.id}, and this rank has GPU {gpu.number}"
                self.misplaced = self.misplaced or self.lines[place]
            elif stays:
                self.lines[place] += " on a GPU"
        # The caller's current device may be another one. A context remembers that one, so each is used once.
        self.on_gpu: Callable[[], AbstractContextManager[None]] = gpu.current if gpu is not None else nullcontext
        # The key is the dtype, and "" or "on a GPU".
        groups = [(str(value.dtype), "on a GPU" * stays) for value, stays in zip(values, stay, strict=True)]
        self.flats: dict[tuple[str, str], Array] = {}
        self._views: list[Array] = [None] * len(values)
        with self.on_gpu():
            self._pack(groups, values)

    def _pack(self, groups: Sequence[tuple[str, str]], values: Sequence[Array]) -> None:
        for group in sorted(set(groups)) if not self.misplaced else ():
            places = [place for place, key in enumerate(groups) if key == group]
            members = [values[place] for place in places]
            if group[1]:
                xp = namespace(members[0])
                flat = xp.empty(sum(value.size for value in members), members[0].dtype)
                # Many leaves in one kernel launch.
                kernels.pack([xp.ascontiguousarray(value) for value in members], flat)
                ends = accumulate(value.size for value in members)
                views = [flat[end - value.size : end] for value, end in zip(members, ends, strict=True)]
            else:
                flat, views = aligned([value.size for value in members], members[0].dtype)
            self.flats[group] = flat
            for place, view in zip(places, views, strict=True):
                self._views[place] = view.reshape(values[place].shape)
                if not group[1]:
                    copy_to_host(values[place], self._views[place])

    def _check(self, operation: str, allowed: Sequence[numpy.dtype]) -> None:
        for (path, _), kind in zip(leaves(self._tree), self._kinds, strict=True):
            if kind not in allowed:
                raise TreeError(
                    f"{operation} of {path or 'the tree'}: its dtype is {kind}; "
                    f"allowed are {', '.join(str(dtype) for dtype in allowed)}"
                )

    def unpack(self) -> Tree:
        """Return a tree of the same form with the buffers' values: views, or copies of CPU buffers on a GPU."""
        values = (self._total(view, leaf) for view, leaf in zip(self._views, self._leaves, strict=True))
        return rebuild(self._tree, values.__next__)

    def _total(self, view: Array, leaf: Leaf) -> Array | float:
        if is_array(leaf) or view.ndim == 0:
            return _same_kind(view, leaf)
        total = (int(view[0]) << 32) + int(view[1])
        dtype = leaf.dtype if isinstance(leaf, numpy.integer) else numpy.dtype(numpy.int64)
        if not numpy.iinfo(dtype).min <= total <= numpy.iinfo(dtype).max:
            path = next(path for path, other in leaves(self._tree) if other is leaf)
            raise everywhere(
                TreeError(
                    f"sum of {path or 'the tree'}: {total} does not fit into {dtype}; give a float, or add Python's "
                    "integers, which have no limit: sum(world.allgather(n))"
                )
            )
        return dtype.type(total) if isinstance(leaf, numpy.generic) else total


def aligned(sizes: Sequence[int], dtype: numpy.dtype) -> tuple[numpy.ndarray, list[numpy.ndarray]]:
    """Return a flat CPU array with room for arrays of these sizes, and its parts for them; zeros in between.

    The parts are uninitialised, and begin at multiples of 64 bytes in memory: JAX takes such memory without a copy.
    """
    each = _ALIGNMENT // dtype.itemsize if dtype.itemsize and _ALIGNMENT % dtype.itemsize == 0 else 1
    begins = list(accumulate((-(-size // each) * each for size in sizes), initial=0))
    count = begins[len(sizes) - 1] + sizes[-1]
    memory = numpy.empty(count * dtype.itemsize + _ALIGNMENT, numpy.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    flat = numpy.ndarray(count, dtype, memory, first)
    parts = [flat[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]
    for begin, size, after in zip(begins, sizes, begins[1 : len(sizes)], strict=False):
        flat[begin + size : after] = 0
    return flat, parts


def aligned_copy(array: numpy.ndarray) -> numpy.ndarray:
    """Return a copy of a CPU array that begins at a multiple of 64 bytes in memory."""
    _, (memory,) = aligned([array.size], array.dtype)
    copied = memory.reshape(array.shape)
    copied[...] = array
    return copied


def _array_of(number: Leaf, path: str) -> numpy.ndarray:
    """Make an array from a number. Its dtype follows from the number's type alone, not from its value as in NumPy."""
    if isinstance(number, int) and not isinstance(number, bool):
        try:
            return numpy.asarray(number, numpy.int64)
        except OverflowError:
            raise TreeError(f"leaf {path or 'at the top'} is the number {number}; it must fit into 64 bits") from None
    return numpy.asarray(number)


def _is_whole(leaf: Leaf) -> bool:
    return isinstance(leaf, int | numpy.integer) and not isinstance(leaf, bool | numpy.timedelta64)


def _same_kind(view: Array, leaf: Leaf) -> Array | float:
    if is_array(leaf):
        return view if is_device_array(view) else like(view, leaf)
    return view[()] if isinstance(leaf, numpy.generic) else view.item()
