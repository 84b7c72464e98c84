"""The common part of all transports for GPU buffers: the order of sums, and events at both ends.

    the caller's stream:   ... fills flat | start()                          wait() | reads flat ...
                                          begin --+                  +--> done
    communication stream:                         +-- copies, adds --+

`start` marks the current stream. `wait` makes the current stream follow the end of the sum. The host waits only for the
hosts of other ranks. Whichever thread drives the work, each of its steps runs with the rank's GPU and the communication
stream as that thread's current ones.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy

from mpitrain.allreduce.algorithm import DTYPES, AllreduceHandle, Progress, Steps, compared
from mpitrain.arrays import Array, is_device_array
from mpitrain.cuda.device import Gpu, bind, cupy_module, raise_first
from mpitrain.cuda.memory import allocating
from mpitrain.cuda.streams import follow, happened, make_event, make_stream, mark, working_on
from mpitrain.errors import DeviceError, everywhere
from mpitrain.world.world import World


class DevicePlace:
    """Where a rank's sums are made: its GPU, and the stream that carries them."""

    def __init__(self, world: World) -> None:
        """Collective. Raises DeviceError on every rank where one has no GPU."""
        self.gpu: Gpu = bind(world)
        self.stream: Any = make_stream(self.gpu)


class Factory(Protocol):
    """Makes a transport. Transports that take turns behind another one get its `place`, and share its stream."""

    def __call__(self, world: World, place: DevicePlace | None = None) -> DeviceSequential:
        """Collective. Raises DeviceError on every rank if the transport is impossible on some rank."""
        ...


class DeviceHandle(AllreduceHandle):
    """A started sum of a GPU buffer. After `wait`, or a `test` that was true, the current stream sees it."""

    def __init__(self, world: World, name: str, flat: Array, steps: Progress, end: Any) -> None:
        """`end` is an event on its GPU, recorded after the steps have ended."""
        super().__init__(world, name, flat, steps)
        self._gpu, self._event = end

    def test(self) -> bool:
        """See AllreduceHandle."""
        if not super().test():
            return False
        follow(self._gpu, self._event)
        return True

    def wait(self) -> None:
        """See AllreduceHandle."""
        super().wait()
        follow(self._gpu, self._event)


def _nothing(_: Array, __: Array | None = None, /) -> Progress:
    return iter(())


class DeviceSequential:
    """An Algorithm for buffers on the rank's GPU, from a generator function; as Sequential is for the host.

    Work is done on a communication stream, one piece after the other, in the order of the World's queue.

    Attributes:
        name: of the transport.
        steps: the work on one buffer; it runs on the communication stream, and may leave work there when it ends.
        place: the rank's GPU and that stream.
        dtypes: those that it sums.
        has_own_memory: buffers that it allocates save it a copy.
    """

    def __init__(
        self,
        world: World,
        place: DevicePlace,
        name: str,
        steps: Steps = _nothing,
        allocate: Callable[[int, numpy.dtype], Array] | None = None,
        dtypes: Sequence[numpy.dtype] = DTYPES,
        *,
        alone: bool = False,
    ) -> None:
        """`alone`: there is work with one rank, too."""
        self.steps = steps
        self._has_work = world.size > 1 or alone
        self.dtypes = dtypes
        self.place = place
        self.has_own_memory = allocate is not None
        self.allocate_here = allocate or self._from_pool
        self._world = world
        self.name = name
        # Arrays that the GPU may still use, each with the event of its end. If an array went back to CuPy's pool too
        # early, a new array of another stream or thread could lie in the same memory.
        self._in_flight: deque[tuple[Any, object]] = deque()
        weakref.finalize(self, _settle, self._in_flight).atexit = False

    def allocate(self, count: int, dtype: numpy.dtype) -> Array:
        """See Algorithm.

        Raises:
            DeviceError: some rank's GPU lacks the memory. Raised on every rank.
        """
        self._world.queue.finish()
        return self.allocate_here(count, dtype)

    def start(self, flat: Array, residual: Array | None = None, *, agreed: bool = False) -> DeviceHandle:
        """See Algorithm; `flat` is a CuPy array on the rank's GPU.

        Earlier work of the current stream ends before the sum reads the array.
        """
        check_device_flat(flat, self.place.gpu, self.dtypes)
        steps = self.steps(flat, residual) if self._has_work and flat.size > 0 else iter(())
        return self.begin(flat, steps, (flat, residual), agreed=agreed)

    def begin(self, flat: Array, steps: Progress, used: object, *, agreed: bool = False) -> DeviceHandle:
        """Begin work that replaces `flat`. Earlier work of the current stream ends before the first step.

        `used` is all that the work uses: it is kept until the GPU is done. For `agreed` see Algorithm.
        """
        gpu = self.place.gpu
        while self._in_flight and happened(self._in_flight[0][0]):
            self._in_flight.popleft()
        begin, end = mark(gpu), make_event(gpu)
        steps = self._on_stream(steps, used, begin, end)
        if not agreed:
            steps = compared(self._world, self.name, flat, "a GPU's memory", steps)
        return DeviceHandle(self._world, self.name, flat, steps, (gpu, end))

    def _on_stream(self, steps: Progress, used: object, begin: Any, end: Any) -> Progress:
        gpu, stream = self.place.gpu, self.place.stream
        with gpu.current():
            stream.wait_event(begin)
        finished = object()
        while True:
            # Do not put this around a yield: the caller's own device and stream must be current there.
            with working_on(gpu, stream):
                nap = next(steps, finished)
            if nap is finished:
                break
            yield nap  # type: ignore[misc]
        with gpu.current():
            end.record(stream)
        self._in_flight.append((end, used))

    def _from_pool(self, count: int, dtype: numpy.dtype) -> Array:
        with allocating(self._world, self.place.gpu, count * dtype.itemsize, "a bucket"):
            return cupy_module().empty(count, dtype)


def _settle(in_flight: deque[tuple[Any, object]]) -> None:
    """Close: the memory of work on the GPU is freed only after that work."""
    if in_flight:
        in_flight[-1][0].synchronize()


def check_device_flat(flat: Array, gpu: Gpu, dtypes: Sequence[numpy.dtype] = DTYPES) -> None:
    """Raise ValueError unless `flat` is what DeviceSequential.start takes."""
    if not is_device_array(flat):
        kind = "a NumPy array on the host" if isinstance(flat, numpy.ndarray) else type(flat).__name__
        raise ValueError(
            f"this sum takes a CuPy array on {gpu}, not {kind}. Host arrays are for mpitrain.allreduce.make_algorithm"
        )
    if flat.device.id != gpu.number:
        raise ValueError(f"this sum takes a CuPy array on {gpu}, this rank's; the array is on GPU {flat.device.id}")
    if flat.ndim != 1 or not flat.flags.c_contiguous:
        raise ValueError(
            f"allreduce works in place on a one-dimensional, contiguous array; this one has shape {flat.shape}, "
            f"strides {flat.strides}. Pack it first: flat = cupy.ascontiguousarray(x).ravel()"
        )
    if flat.dtype not in dtypes:
        others = " Another transport can: MPITRAIN_TRANSPORT=staged" if flat.dtype in DTYPES else ""
        known = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"this allreduce cannot sum {flat.dtype}; allowed are {known}.{others}")


def outlived_by(world: World) -> str:
    """Return why transports whose GPU work waits for that of other ranks are not possible; "" unless ranks may be
    lost."""
    if world.committer is None:
        return ""
    return "with --recover the ranks continue without a lost one, but work on a GPU would wait for it; use staged"


def refuse(world: World, name: str, problem: str) -> None:
    """Raise the same DeviceError on every rank if some rank has a reason against this transport. Collective."""
    problems = world.allgather(problem)
    try:
        raise_first(world, problems)
    except DeviceError as error:
        raise everywhere(DeviceError(f"the transport {name} is not possible here: {error}")) from None
