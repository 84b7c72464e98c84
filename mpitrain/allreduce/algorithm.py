"""What an allreduce algorithm is: a plan that can be driven step by step as well as waited for.

No MPI library moves a large message while nobody calls into it, so whoever starts an allreduce drives it: by
`test()` now and then while computing, or by `wait()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import ml_dtypes
import numpy

from mpitrain.arrays import Array
from mpitrain.world import World

BFLOAT16 = numpy.dtype(ml_dtypes.bfloat16)
FLOATS = tuple(numpy.dtype(name) for name in ("float16", "float32", "float64")) + (BFLOAT16,)
INTEGERS = tuple(numpy.dtype(code + str(size)) for code in "iu" for size in (1, 2, 4, 8))
DTYPES = FLOATS + INTEGERS
_SUMMABLE = frozenset(DTYPES)

# The work of one allreduce. It does what can be done now at each `next`, yields while it has to wait (None: look again
# at once; a number: so many seconds one may sleep), and ends when the buffer holds the sum.
Progress: TypeAlias = Iterator[float | None]


class Steps(Protocol):
    """Makes the work for one buffer."""

    def __call__(self, flat: numpy.ndarray, residual: numpy.ndarray | None = None, /) -> Progress:
        """See Algorithm.start."""
        ...


class Handle:
    """A started allreduce. Those in one queue run one after the other, in the order in which they were started.

    Attributes:
        nap: after a `test` that was not the last: seconds that one may sleep before the next.
    """

    def __init__(self, world: World, queue: deque[Handle], name: str, flat: Array, steps: Progress) -> None:
        self.nap = 0.0
        self._world = world
        self._queue = queue
        self._name = name
        self._flat = flat
        self._steps = steps
        self._is_done = False

    def __str__(self) -> str:
        return f"allreduce {self._name} of {self._flat.size} {self._flat.dtype}"

    def test(self) -> bool:
        """Do what can be done without waiting; true once the buffer holds the sum."""
        while not self._is_done:
            first = self._queue[0]
            with self._world.control.unbroken(first):
                for nap in first._steps:
                    self.nap = nap or 0.0
                    return False
            first._end()
        return True

    def wait(self) -> None:
        """Drive until the buffer holds the sum."""
        while not self._is_done:
            first = self._queue[0]
            self._world.control.wait(first._steps, first)
            first._end()

    def _end(self) -> None:
        self._queue.popleft()
        self._is_done = True


class Algorithm(Protocol):
    """The result of a factory such as `ring(world)`. Owns its scratch memory."""

    def start(self, flat: Array, residual: Array | None = None) -> Handle:
        """Begin to replace `flat` by its sum over ranks; the same bits on every rank.

        Every rank starts the same number of elements of the same dtype, in the same order of calls. That is not
        checked here (a bucket's layout is compared once, when it is made); `World.sum` checks every time.

        Args:
            flat: one-dimensional, contiguous, writable host array of one of DTYPES, any length. It must not be
                touched until the handle is done. Sums are made in its own dtype; integers wrap.
            residual: where the algorithm sends a shortened form: float32 host array of as many elements, what earlier
                calls left out. It is added to what this rank sends, and overwritten by what is left out now. The
                others take no notice of it.

        Raises:
            ValueError: `flat` is not such an array. It is never copied in silence.
        """
        ...

    def allocate(self, count: int, dtype: numpy.dtype) -> Array:
        """An uninitialised flat array in the memory that this algorithm likes best.

        Collective, for the same `count` and `dtype`; what was started before ends first. Where ranks sum a part of such
        an array, all take the same part of the same one. It is freed with the last reference to it.
        """
        ...


class Sequential:
    """An Algorithm from a generator function.

    It runs what is started one after the other, so the messages of two buffers never meet, and one scratch buffer
    serves them all.
    """

    def __init__(
        self, world: World, name: str, steps: Steps, allocate: Callable[[int, numpy.dtype], Array] = numpy.empty
    ) -> None:
        self._world = world
        self._name = name
        self._steps = steps
        self._queue: deque[Handle] = deque()
        self._allocate = allocate

    def allocate(self, count: int, dtype: numpy.dtype) -> Array:
        """See Algorithm."""
        # Ranks may differ in how far they are with what has been started; none of it may wait for this.
        if self._queue:
            self._queue[-1].wait()
        return self._allocate(count, dtype)

    def start(self, flat: Array, residual: Array | None = None) -> Handle:
        """See Algorithm."""
        check_flat(flat)
        steps = self._steps(flat, residual) if self._world.size > 1 and flat.size > 0 else iter(())
        handle = Handle(self._world, self._queue, self._name, flat, steps)
        self._queue.append(handle)
        return handle


def check_flat(flat: Array) -> None:
    """Raise ValueError unless `flat` is what Algorithm.start takes."""
    if not isinstance(flat, numpy.ndarray):
        raise ValueError(f"allreduce takes a NumPy array on the host, not {type(flat).__name__}")
    if flat.ndim != 1 or not flat.flags.c_contiguous or not flat.flags.writeable:
        raise ValueError(
            f"allreduce works in place on a one-dimensional, contiguous, writable array; this one has shape "
            f"{flat.shape}, strides {flat.strides}, writable={flat.flags.writeable}. "
            "Pack it first: flat = numpy.ascontiguousarray(x).ravel()"
        )
    if flat.dtype not in _SUMMABLE or not flat.dtype.isnative:
        raise ValueError(f"allreduce cannot sum {flat.dtype}; it can {', '.join(str(dtype) for dtype in DTYPES)}")
