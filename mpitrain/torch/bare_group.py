"""A process group without its calls: its identity, and the steps with which all calls begin."""

# torch declares each call twice, for lists of tensors and for one tensor. It calls the first.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import numpy
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from mpitrain.allreduce.algorithm import Progress
from mpitrain.errors import ProcessGroupError
from mpitrain.torch import checks, reductions
from mpitrain.torch.arrivals import wait_for_all
from mpitrain.torch.channel import Channel
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.torch.versions import is_awaited
from mpitrain.torch.work import Call

Tensors: TypeAlias = Sequence[torch.Tensor]
# The devices of tensors. For a backend that supports GPUs, PyTorch's ShardedTensor makes its tensors there.
DEVICES = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)  # type: ignore[no-untyped-call]


@uncompiled
class BareGroup(dist.ProcessGroup):
    """The base class of the process group. backend.py adds the calls."""

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, channel: Channel, rank: int, size: int, store: Any, split: Callable[..., Any]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._channel = channel
        self._world = channel.world
        self._store = store
        self._name = channel.name
        self._description = ""
        self._split = split
        self._together: list[Call] | None = None  # calls begun since start_coalescing

    # -- who it is -------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """See torch."""
        return "mpitrain"

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        """See torch."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """See torch."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """See torch."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """See torch."""
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc  # type: ignore[assignment]
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in DEVICES]

    @property
    def options(self) -> Any:
        """The group's settings in PyTorch's form: the name of the backend and the timeout."""
        return _c10d.Backend.Options("mpitrain", timedelta(seconds=self._channel.timeout_seconds))

    def _get_backend(self, device: torch.device) -> BareGroup:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """True if FSDP2 may take memory from here."""
        return False

    def get_group_store(self) -> Any:
        """See torch."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls."""
        self._channel.timeout_seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the number begins with the group."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of calls of all ranks that this rank has begun in the group."""
        return self._channel.num_calls

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """See mpitrain.torch.monitored_barrier."""
        wait_for_all(self._channel, timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> BareGroup | None:
        """Make a group of these ranks of this group; None on other ranks. The ranks in the new group call this."""
        if self.rank() not in ranks:
            return None
        made: BareGroup = self._split(self, list(ranks), timeout, group_name)
        made._set_group_desc(group_desc or "")
        return made

    def shutdown(self) -> None:
        """Wait until all calls in flight have ended, and free the group's MPI objects."""
        self._channel.close()

    def abort(self) -> None:
        """End all calls in flight with an error. No call can follow."""
        self._channel.abort()

    def stop_collecting(self) -> None:
        """Stop collecting calls. Those begun since start_coalescing continue, without a common work."""
        self._together = None

    # -- the steps of the calls ------------------------------------------------------------------------------------

    def _call(self, name: str, results: Tensors, opts: Any) -> Call:
        channel = self._channel
        channel.check(name)
        seconds = opts.timeout.total_seconds() if opts is not None else -1.0
        return Call(channel, name, results, seconds if seconds > 0 else channel.timeout_seconds)

    def _begin(
        self,
        call: Call,
        work: Callable[[], Progress],
        lines: Callable[[], list[str]],
        opts: Any,
        root: int | None = None,
    ) -> Call:
        return self._noted(self._channel.begin(call, work, lines, is_awaited=is_awaited(opts), root=root))

    def _noted(self, call: Call) -> Call:
        if self._together is not None:
            self._together.append(call)
        return call

    def _moves(self, flat: numpy.ndarray) -> bool:
        return self._world.size > 1 and flat.size > 0

    def _refuse(self, name: str, error: Exception) -> None:
        """Raise `error` with this rank's name, and tell the other ranks."""
        self._channel.check(name)
        self._channel.refuse(name, type(error)(f"{self._world.name()}: {name}: {error}"))

    def _check(self, name: str, tensors: Tensors, *, dtypes: bool = True) -> None:
        try:
            checks.tensors(tensors, dtypes=dtypes)
        except (TypeError, ValueError) as error:
            self._refuse(name, error)

    def _one(self, name: str, tensors: Tensors) -> torch.Tensor:
        if len(tensors) != 1:
            self._refuse(name, ValueError(f"{len(tensors)} tensors; give one"))
        self._check(name, tensors)
        return tensors[0]

    def _list_of(self, name: str, lists: Sequence[Tensors], length: int, role: str = "tensors") -> Tensors:
        if len(lists) != 1 or len(lists[0]) != length:
            given = len(lists[0]) if len(lists) == 1 else f"{len(lists)} lists of"
            self._refuse(name, ValueError(f"{given} {role} in a list for {length} ranks; give one for each rank"))
        return lists[0]

    def _check_fits(self, name: str, tensor: torch.Tensor, other: torch.Tensor, role: str) -> None:
        if tensor.numel() != other.numel():
            text = f"a tensor of {tensor.numel()} elements, and {role} has {other.numel()}; they must be equal"
            self._refuse(name, ValueError(text))

    def _check_lengths(self, name: str, outputs: Tensors, inputs: Tensors) -> None:
        if len(outputs) != len(inputs):
            self._refuse(name, ValueError(f"{len(outputs)} outputs for {len(inputs)} inputs"))

    def _check_parts(self, name: str, whole: torch.Tensor, part: torch.Tensor, own: str, others: str) -> None:
        if whole.numel() != part.numel() * self.size():
            text = f"{own} has {whole.numel()} elements, {others} {part.numel()}; for {self.size()} ranks {own} needs "
            self._refuse(name, ValueError(text + str(part.numel() * self.size())))

    def _check_rank(self, name: str, root: int) -> None:
        if not 0 <= root < self.size():
            self._refuse(name, ValueError(f"root {root}; ranks of the group are 0 to {self.size() - 1}"))

    def _reduction(self, name: str, opts: Any, tensor: torch.Tensor) -> reductions.Reduction:
        try:
            return reductions.reduction(opts.reduceOp.op, tensor.dtype)
        except ProcessGroupError as error:
            self._refuse(name, error)
            raise

    def _peer(self, name: str, tensors: Tensors, rank: int, tag: int) -> torch.Tensor:
        self._channel.check(name)
        return checks.peer(tensors, rank, self.size(), tag, self._channel.largest_tag, f"{self._world.name()}: {name}")
