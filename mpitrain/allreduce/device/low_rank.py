"""low_rank: PowerSGD's two sums for gradients on a GPU: products are made there, thin factors summed on the host.

    GPU      | M Q               P orthogonal, M^T P, M - P R^T               P Q^T
    to host      | P        ^                             | M^T P   ^
    host            | sum, P |                               | sum, Q |      Q orthogonal, for the next step

The steps are those of mpitrain/allreduce/low_rank.py, with the same sums of the same host arrays, and the kernels have
the bits of the host's products. So the means, what is left out, and the factors are those of host arrays, bit for bit.

Vectors, and matrices that are sent as they are, go through the host too. Q stays on the host, where checkpoints and the
comparison of the ranks look for it, and goes up again in the next step.

Cost a rank, of a matrix m x n with factors of rank r: (m + n) r values down and up, and n r up; an event looked at for
each of the two sums. Host memory, page-locked, and GPU memory: (m + n) r values each, and the vectors. GPU memory also
8 bytes times the largest m r of a bucket, to make columns orthogonal. Source: as in mpitrain/compression/power_sgd.py.
"""

from __future__ import annotations

import numpy

from mpitrain.allreduce.algorithm import Progress
from mpitrain.allreduce.device.sequential import DevicePlace, refuse
from mpitrain.allreduce.low_rank import NUM_MARKS, Thin
from mpitrain.arrays import Array
from mpitrain.compression.power_sgd import Plan
from mpitrain.cuda import kernels
from mpitrain.cuda.device import cupy_module
from mpitrain.cuda.memory import address, allocating, pinned
from mpitrain.cuda.streams import happened, make_event, working_on
from mpitrain.errors import DeviceError, everywhere
from mpitrain.waiting.control import until
from mpitrain.world import World

_FLOAT32 = numpy.dtype(numpy.float32)


def low_rank_place(world: World, name: str) -> DevicePlace:
    """Where a rank makes the products. Collective.

    Raises:
        DeviceError: some rank has no GPU, or the setting `transport` asks for one that cannot carry the sums. On every
            rank.
    """
    asked, place = world.config.transport, DevicePlace(world)
    if asked not in ("auto", "staged"):
        refuse(world, asked, f"compression {name} sums thin matrices on the host; use auto or staged with it")
    return place


class DeviceProducts:
    """ThinProducts on the current stream of a GPU."""

    def __init__(self, num_work: int) -> None:
        """`num_work` is the largest size of rows to be made orthogonal."""
        self._work: Array = cupy_module().empty(num_work, numpy.float64)

    def times(self, matrix: Array, left_out: Array, qt: Array, pt: Array) -> None:
        """See ThinProducts."""
        kernels.low_rank_times(matrix, left_out, qt, pt)

    def orthogonalise(self, rows: Array) -> None:
        """See ThinProducts."""
        kernels.low_rank_orthogonalise(rows, self._work)

    def project(self, matrix: Array, pt: Array, qt: Array, left_out: Array) -> None:
        """See ThinProducts."""
        kernels.low_rank_project(matrix, pt, qt, left_out)

    def product(self, pt: Array, qt: Array, out: Array) -> None:
        """See ThinProducts."""
        kernels.low_rank_product(pt, qt, out)


class OnDevice:
    """A LowRankSite on a GPU: one buffer's, for one sum at a time. Its methods run within the steps of an OnStream.

    Attributes:
        products: see LowRankSite.
    """

    def __init__(self, world: World, place: DevicePlace, plan: Plan) -> None:
        """Collective, with equal plans. `plan` is that of the whole buffer: parts of whole tensors need no more.

        Raises:
            DeviceError: some rank lacks the memory. On every rank.
        """
        self._place = place
        self._down, self._up = make_event(place.gpu), make_event(place.gpu)
        num_work = max((matrix.rank * matrix.rows for matrix in plan.matrices), default=0)
        num_bytes = 4 * (plan.num_first + NUM_MARKS + plan.num_second) + 8 * num_work
        with (
            allocating(world, place.gpu, num_bytes, "the factors of power_sgd"),
            working_on(place.gpu, place.stream),
        ):
            self._first, self._second = _thin(plan.num_first + NUM_MARKS), _thin(plan.num_second)
            self.products = DeviceProducts(num_work)

    def free(self) -> Progress:
        """See LowRankSite."""
        return until(lambda: happened(self._up))

    def memory(self, plan: Plan) -> tuple[Thin, Thin]:
        """See LowRankSite.

        Raises:
            DeviceError: the part cuts a tensor, which is then sent as it is, and there is no room for it. Plans are
                equal, so every rank raises it.
        """
        size, first, second = plan.num_first + NUM_MARKS, self._first, self._second
        if size > first.on_host.size:
            raise everywhere(
                DeviceError(
                    f"power_sgd on a GPU: a part of a buffer has {size} values for the first sum, but every rank has "
                    f"room for {first.on_host.size}, enough for whole tensors. Cut the buffer between tensors"
                )
            )
        return (
            Thin(first.here[:size], first.on_host[:size]),
            Thin(second.here[: plan.num_second], second.on_host[: plan.num_second]),
        )

    def down(self, thin: Thin) -> Progress:
        """See LowRankSite."""
        self._copy(address(thin.on_host), thin.here.data.ptr, thin, cupy_module().cuda.runtime.memcpyDeviceToHost)
        self._down.record(self._place.stream)
        return until(lambda: happened(self._down))

    def up(self, thin: Thin) -> None:
        """See LowRankSite."""
        self._copy(thin.here.data.ptr, address(thin.on_host), thin, cupy_module().cuda.runtime.memcpyHostToDevice)
        self._up.record(self._place.stream)

    def _copy(self, target: int, source: int, thin: Thin, kind: int) -> None:
        if thin.on_host.nbytes:
            stream = self._place.stream.ptr
            cupy_module().cuda.runtime.memcpyAsync(target, source, thin.on_host.nbytes, kind, stream)

    def add(self, total: Array, other: Array) -> None:
        """See LowRankSite."""
        kernels.add(total, other)


def _thin(count: int) -> Thin:
    return Thin(cupy_module().empty(count, _FLOAT32), pinned(4 * count).view(_FLOAT32))
