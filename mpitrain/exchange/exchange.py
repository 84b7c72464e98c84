"""An Exchange turns a flat buffer into its weighted mean over ranks."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy

from mpitrain.allreduce import make_algorithm
from mpitrain.allreduce.algorithm import Handle
from mpitrain.allreduce.compressed import compressed
from mpitrain.allreduce.costs import compression as compression_by
from mpitrain.allreduce.device import make_transport
from mpitrain.allreduce.device.coded import Coded, coded
from mpitrain.allreduce.device.sequential import DeviceSequential
from mpitrain.allreduce.group import num_lanes
from mpitrain.arrays import Array, is_device_array, namespace
from mpitrain.compression import CASTS, CODECS
from mpitrain.cuda import kernels
from mpitrain.cuda.memory import allocating
from mpitrain.cuda.streams import working_on
from mpitrain.errors import ConfigError, DataError
from mpitrain.world import World


class Exchange(Protocol):
    """What a GradientReducer needs of it.

    Attributes:
        may_overflow: finite gradients may have an infinite mean.
        division: which ranks of a node leave out what, in a word; "": by whole buckets.
    """

    may_overflow: bool

    @property
    def division(self) -> str: ...

    def mean(self, flat: Array, share: float) -> Handle:
        """Begin to replace `flat` by the sum over ranks of share x flat; the same bits on every rank.

        Args:
            flat: as for Algorithm.start, of a floating dtype.
            share: this rank's weight divided by the sum of all ranks' weights. Where it is 0 the content of `flat`
                is not looked at.
        """
        ...

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False) -> Array:
        """An uninitialised flat array that `mean` needs not copy, on the host or on this rank's GPU. Collective."""
        ...

    def state(self) -> dict[str, numpy.ndarray]:
        """What it keeps from step to step on this rank, by name; copies, on the host."""
        ...

    def restore(self, state: dict[str, Array]) -> None:
        """Go on from what `state` gave on this rank in an equal world, on the host or on a GPU."""
        ...


class PlainExchange:
    """Every element as it is, by an allreduce."""

    may_overflow = False
    division = ""

    def __init__(self, world: World, algorithm: str | None = None, transport: str | None = None) -> None:
        """
        Args:
            world: whose ranks take part.
            algorithm: for host arrays, a name in ALGORITHMS; default: the world's setting.
            transport: for device arrays, a name in TRANSPORTS; default: the world's setting.
        """
        self._world = world
        self._algorithm = make_algorithm(world, algorithm)
        self._transport_name = transport

    @cached_property
    def _transport(self) -> DeviceSequential:
        """Made when the first device array is allocated: that is collective, and needs a GPU."""
        return make_transport(self._world, self._transport_name)

    def mean(self, flat: Array, share: float) -> Handle:
        """See Exchange. The shares add up to 1, so no sum can overflow."""
        scale(flat, share)
        return (self._transport if is_device_array(flat) else self._algorithm).start(flat, agreed=True)

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False) -> Array:
        """See Exchange.

        Raises:
            DeviceError: some rank has no GPU, or not the memory. On every rank.
        """
        return (self._transport if on_device else self._algorithm).allocate(count, dtype)

    def state(self) -> dict[str, numpy.ndarray]:
        """See Exchange. There is nothing."""
        return {}

    def restore(self, state: dict[str, Array]) -> None:
        """See Exchange."""


class CompressedExchange:
    """float32 in a codec's shorter form where it crosses the network, with error feedback; in full inside a node.

    What the codec leaves out of a gradient is kept, and added to the same gradient of the next step: see
    mpitrain/allreduce/direct.py. It is kept for arrays that `allocate` made, once a step for each of their elements. A
    step that ends with an error may lose it, which costs no more than that step's rounding.

    Arrays on a GPU are coded there, and what is left out stays there, wherever it can be: see
    mpitrain/allreduce/device/coded.py.
    """

    def __init__(self, world: World, codec: str) -> None:
        """`codec` is a name in mpitrain.compression.CODECS. On one node nothing is shortened, and a line says so."""
        self._codec = codec
        self.may_overflow = codec in CASTS and world.num_nodes > 1
        self._world = world
        self._algorithm = compressed(world, codec)
        self._kept: list[tuple[Array, Array]] = []  # what `allocate` made, and its residual
        if world.num_nodes == 1:
            world.print(f"mpitrain: compression {codec}: all ranks are on one node, so nothing is sent and shortened")

    def mean(self, flat: Array, share: float) -> Handle:
        """See Exchange."""
        scale(flat, share)
        residual = self._residual_of(flat)
        algorithm = self._on_device.transport if is_device_array(flat) else self._algorithm
        return algorithm.start(flat, residual, agreed=True)

    def allocate(self, count: int, dtype: numpy.dtype, *, on_device: bool = False) -> Array:
        """See Exchange.

        Raises:
            ConfigError: `dtype` is not float32.
            DeviceError: some rank has no GPU, or not the memory. On every rank.
        """
        if dtype != numpy.float32:
            error = ConfigError(
                f"compression {self._codec} shortens float32 gradients; the model has gradients of {dtype}. "
                "Make its parameters float32, or leave compression out"
            )
            error.known_everywhere = True
            raise error
        flat = (self._on_device.transport if on_device else self._algorithm).allocate(count, dtype)
        if on_device and self._on_device.codes_on_device:
            place = self._on_device.transport.place
            with (
                allocating(self._world, place.gpu, flat.nbytes, "what a codec leaves out"),
                working_on(place.gpu, place.stream),
            ):
                residual = namespace(flat).zeros(count, numpy.float32)
        else:
            # Pages that are never touched, of what other ranks of the node take care of, take no memory.
            residual = numpy.zeros(count, numpy.float32)
        self._kept.append((flat, residual))
        return flat

    def state(self) -> dict[str, numpy.ndarray]:
        """See Exchange: the residuals, in the order in which their arrays were allocated."""
        return {f"residual {number}": self._fetched(residual) for number, (_, residual) in enumerate(self._kept)}

    def restore(self, state: dict[str, Array]) -> None:
        """See Exchange.

        Raises:
            DataError: the state is of other arrays.
        """
        shapes = {f"residual {number}": residual.shape for number, (_, residual) in enumerate(self._kept)}
        found = {name: residual.shape for name, residual in state.items()}
        if found != shapes:
            raise DataError(f"the state of the exchange has {found}; this one needs {shapes}")
        for number, (_, residual) in enumerate(self._kept):
            value = state[f"residual {number}"]
            host = value.get() if is_device_array(value) else value
            if is_device_array(residual):
                place = self._on_device.transport.place
                with place.gpu.current():
                    residual.set(host, stream=place.stream)
                    place.stream.synchronize()  # until then `host` must stay as it is
            else:
                residual[:] = host

    @property
    def division(self) -> str:
        """See Exchange."""
        # A GPU's array that is coded on the host goes there in pieces, and each piece is dealt out.
        by_pieces = any(is_device_array(flat) and not is_device_array(residual) for flat, residual in self._kept)
        return "pieces of staged" if by_pieces else ""

    @cached_property
    def _on_device(self) -> Coded:
        """Made when the first device array is allocated: that is collective, and needs a GPU."""
        return coded(self._world, self._codec, self._algorithm)

    def _fetched(self, residual: Array) -> numpy.ndarray:
        """A copy on the host, of what it is after all sums so far."""
        if not is_device_array(residual):
            copied: numpy.ndarray = residual.copy()
            return copied
        place = self._on_device.transport.place
        with working_on(place.gpu, place.stream):
            fetched: numpy.ndarray = residual.get()
            return fetched

    def _residual_of(self, flat: Array) -> Array | None:
        for whole, residual in self._kept:
            begin = (_address(flat) - _address(whole)) // flat.itemsize
            if 0 <= begin <= whole.size - flat.size:
                return residual[begin : begin + flat.size]
        return None


def _address(array: Array) -> int:
    return int(array.data.ptr if is_device_array(array) else array.__array_interface__["data"][0])


def make_exchange(world: World, algorithm: str | None = None, compression: str | None = None) -> Exchange:
    """The exchange that the world's settings, or the arguments, ask for. Collective.

    Raises:
        ConfigError: there is no algorithm or compression of that name, or the two exclude each other.
        MismatchError: the ranks ask for different ones.
    """
    compression = world.config.compression if compression is None else compression
    check_compression(compression)
    world.agree("make an exchange", [f"compression {compression}", f"algorithm {algorithm}"])
    if compression == "auto":
        compression = _by_profile(world)
    if compression == "none":
        return PlainExchange(world, algorithm)
    if algorithm is not None:
        raise ConfigError(f"compression={compression} chooses its algorithm itself; leave out algorithm={algorithm}")
    return CompressedExchange(world, compression)


def check_compression(name: str) -> None:
    """Raise ConfigError unless it can be a setting."""
    known = [*sorted(CODECS), "auto", "none"]
    if name not in known:
        raise ConfigError(f"there is no compression {name!r}; known: {', '.join(known)}")


def _by_profile(world: World) -> str:
    """bf16 where it pays; a line says what was chosen and why."""
    chosen = compression_by(world.profile, world.num_nodes, num_lanes(world))
    rate = world.profile.bytes_per_second / 1e6
    reason = f"{world.num_nodes} nodes, {rate:.0f} MB/s between them ({world.profile.origin})"
    if world.num_nodes > 1 and not world.profile.is_measured:
        reason = "the network is not known; measure it: mpitrain bench --save-profile FILE, then MPITRAIN_PROFILE=FILE"
    world.print(f"mpitrain: compression auto: {chosen}; {reason}")
    return chosen


def scale(flat: Array, share: float) -> None:
    """Multiply `flat`, of a floating dtype, by `share` in place; rounds once, also where the dtype is a short one."""
    if share == 0.0:
        flat.fill(0)  # not multiplied: 0 x NaN is NaN
    elif share != 1.0 and is_device_array(flat):
        kernels.scale(flat, share)
    elif share != 1.0:
        # A share rounded to 16 bits would be off by more than a sum is: multiply in float32 at least.
        dtype = flat.dtype if flat.itemsize > 2 else numpy.dtype(numpy.float32)
        numpy.multiply(flat, share, out=flat, casting="same_kind", dtype=dtype)


def share_of(world: World, weights: list[float]) -> tuple[float, float]:
    """This rank's part of a mean, and the sum of the weights of all ranks, given by rank.

    Raises:
        DataError: on every rank: a weight is negative or not finite, or all are 0.
    """
    total = sum(weights)
    if min(weights) >= 0 and 0 < total < float("inf"):
        return weights[world.rank] / total, total
    problem = "the weight is 0 on every rank: there is nothing to take the mean of"
    for rank, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            problem = f"{world.name(rank)} has weight {weight}; a weight is a number of samples, 0 or more"
            break
    else:
        if total > 0:
            problem = f"the weights of all ranks add up to {total}; a weight is a number of samples"
    error = DataError(problem)
    error.known_everywhere = True
    raise error
