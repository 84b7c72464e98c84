"""The channel of one process set: it executes, in one order, the calls that all its ranks have submitted.

Small allreduces run together in one buffer, and every other call separately.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import numpy

from mpitrain.allreduce.algorithm import Progress
from mpitrain.errors import HorovodInternalError, MpitrainError, everywhere
from mpitrain.horovod.named_call import NamedCall, Operator, Reduced, WhileOpen
from mpitrain.horovod.negotiation import JOIN, Agreed, Negotiation, Submission
from mpitrain.torch.channel import Channel
from mpitrain.waiting.background import Begun

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.torch.engine import Engine
    from mpitrain.torch.work import Call
    from mpitrain.world.world import World

# Horovod's default of HOROVOD_FUSION_THRESHOLD.
FUSED_BYTES = 128 * 2**20
# A longer array runs separately, without a copy into the common buffer.
ALONE_BYTES = 4 * 2**20
_TAG = 21


class NamedChannel(Channel):
    """The named calls of one process set. Any thread may submit, in any order."""

    def __init__(self, engine: Engine, world: World, name: str) -> None:
        """`world` is the process set's own. Collective over its ranks."""
        super().__init__(engine, world, name, math.inf)
        self.steps: WeakSet[Any] = WeakSet()  # StepsMade of optimizers, which forget() when all ranks have joined
        self._numbers: Counter[str] = Counter()  # how many calls had no name, by kind
        self._open: dict[str, NamedCall] = {}  # submitted, and not agreed on, by key
        self._keys: set[str] = set()  # of the calls that have not ended
        self._naming = threading.Lock()  # two threads may take a name at the same time
        self._outbox: deque[Submission] = deque()
        self._mail = Mail(world.objects)
        self._negotiation = Negotiation(world.size, world.name) if world.rank == 0 else None

    def __str__(self) -> str:
        return f"Horovod's {self.name}"

    def numbered(self, kind: str) -> str:
        """Return the name of a call without a name: the next number of its kind, which is the same on all ranks."""
        with self._naming:
            self._numbers[kind] += 1
            return f"noname.{self._numbers[kind]}"

    def submit(self, call: NamedCall, *, hurries: bool = True) -> NamedCall:
        """Submit a call. It runs once all ranks have submitted it.

        Unless it `hurries`, the other ranks may be told only when this rank waits for this or another call.

        Raises:
            ValueError: a call of the same kind and name is under way on this rank.
            HorovodInternalError: the channel is closed, or an earlier call has left it unusable.
        """
        key = call.name
        try:
            self.check(key)
        except MpitrainError as error:
            raise HorovodInternalError(str(error)) from error
        with self._naming:
            if key in self._keys:
                raise ValueError(
                    f"{self.world.name()}: {key} is under way already; a name can be used again when synchronize() has "
                    "returned for its handle"
                )
            self._keys.add(key)
        self._open[key] = call
        self._add(call, is_for_all=True)
        self._outbox.append(call.submission)
        if hurries:
            self.engine.wake()
        return call

    def refuse(self, call: str, error: Exception) -> NoReturn:
        """Refuse a call that this rank cannot make, so that it fails on the other ranks too; then raise `error`.

        `call` is the key of the call.
        """
        if call not in self._keys:
            refused = NamedCall(self, call)  # runs if this rank is alone
            refused.tell(f"refused: {str(error).removeprefix(f'{self.world.name()}: {call}: ')}")
            self.submit(refused)
        raise error

    def absent(self, key: str) -> str:
        """Describe which ranks have not submitted a name, if this rank knows: only rank 0 of the set does."""
        missing = self._negotiation.missing(key) if self._negotiation is not None else []
        return f", so far without {', '.join(map(self.world.name, missing))}" if missing else ""

    def others(self, call: Call) -> Collection[int] | None:
        """Return the ranks that the call waits for; see Channel."""
        return WhileOpen(call) if isinstance(call, NamedCall) else super().others(call)

    def is_for_all(self, call: Call) -> bool:
        """True: all ranks make every named call."""
        return True

    def _end(self, call: Call, error: BaseException | None) -> None:
        self._keys.discard(call.name)
        super()._end(call, error)

    def _prepare(self) -> bool:
        try:
            self._negotiate()
        except Exception as error:
            self.break_off("the negotiation of names", error)
            return False
        return True

    def _negotiate(self) -> None:
        """Exchange submissions and agreements with the other ranks."""
        submissions = [self._outbox.popleft() for _ in range(len(self._outbox))]
        if self._negotiation is None:
            if submissions:
                self._mail.send(submissions, 0)
            for _, agreed in self._mail.arrived():
                self._execute(agreed)
            return
        agreed = self._negotiation.submit(0, submissions)
        for source, arrived in self._mail.arrived():
            agreed += self._negotiation.submit(source, arrived)
        if agreed:
            self._mail.send(agreed, *range(1, self.world.size))
            self._execute(agreed)

    def _execute(self, agreed: Iterable[Agreed]) -> None:
        calls: list[tuple[NamedCall | None, Agreed]] = []
        for item in agreed:
            call = self._open.pop(item.key, None)
            if call is not None:
                call.is_agreed, call.details = True, item.details
            if item.key == JOIN:
                self._begin_batches(calls)
                calls = []
                self._numbers.clear()  # joined ranks have numbered fewer calls than the others
            elif not item.error:
                calls.append((call, item))
                continue
            if call is not None:
                self._begin_batch(Batch([call]), partial(_nothing_or, item.error))
        self._begin_batches(calls)

    def _begin_batches(self, calls: Iterable[tuple[NamedCall | None, Agreed]]) -> None:
        for batch in batches(calls):
            if batch.reduced is not None:
                self._begin_batch(batch, partial(batch.reduced.steps, self.world, self.sums))
            else:
                (call,) = batch.calls
                self._begin_batch(batch, partial(call.work, call.details))

    def _begin_batch(self, batch: Batch, work: Callable[[], Progress]) -> None:
        Begun(self._queue, self._run(batch, batch.calls, self._mail.is_sent, work), batch)


def _nothing_or(error: str) -> Progress:
    """The steps of a call that moves nothing, or fails on all ranks."""
    if error:
        raise everywhere(HorovodInternalError(error))
    return iter(())


@dataclass
class Batch:
    """The calls that run together.

    Attributes:
        calls: this rank's calls that end with it.
        reduced: for an allreduce, the arrays of one or several calls; None: the only call has its own steps.
    """

    calls: list[NamedCall] = field(default_factory=list)
    reduced: Reduced | None = None

    def __str__(self) -> str:
        if not self.calls:
            return "allreduce for the ranks that have not joined"
        more = f" and {len(self.calls) - 1} more" if len(self.calls) > 1 else ""
        return f"{self.calls[0]}{more}"


def batches(calls: Iterable[tuple[NamedCall | None, Agreed]]) -> Iterator[Batch]:
    """Divide calls into batches. All ranks get the same batches, because they have the same facts about each array."""
    current: Batch | None = None
    flats: list[numpy.ndarray] = []
    num_bytes = 0
    for call, agreed in calls:
        reduced = call.reduced if call is not None else _zeros(agreed)
        if reduced is None:
            if current is not None:
                yield current
            assert call is not None
            current = None
            yield Batch([call])
            continue
        for flat in reduced.flats:
            if current is not None and num_bytes + flat.nbytes <= FUSED_BYTES and _fits(current, reduced, flat):
                flats.append(flat)
                num_bytes += flat.nbytes
                continue
            if current is not None:
                yield current
            flats, num_bytes = [flat], flat.nbytes
            current = Batch(reduced=reduced._replace(flats=flats))
        assert current is not None  # a call has at least one array
        if call is not None:
            current.calls.append(call)
    if current is not None:
        yield current


def _fits(batch: Batch, reduced: Reduced, flat: numpy.ndarray) -> bool:
    if batch.reduced is None or batch.reduced[:3] != reduced[:3] or reduced.op is Operator.Adasum:
        return False
    first = batch.reduced.flats[0]
    return first.dtype == flat.dtype and max(first.nbytes, flat.nbytes) <= ALONE_BYTES


def _zeros(agreed: Agreed) -> Reduced:
    """The contribution of a rank that has joined."""
    assert agreed.zeros is not None
    op, prescale, postscale, *arrays = agreed.zeros
    return Reduced(op, prescale, postscale, [numpy.zeros(count, dtype) for dtype, count in arrays])


class Mail:
    """Messages of Python objects on a communicator of their own, sent and received without waiting.

    Those of one sender arrive in order.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._any, self._status = MPI.ANY_SOURCE, MPI.Status()
        self._sends: list[tuple[MPI.Request, bytes]] = []  # MPI reads the bytes until the request is complete
        self._incoming: tuple[int, bytearray, MPI.Request] | None = None

    def send(self, value: Any, *ranks: int) -> None:
        """Begin to send an object to these ranks."""
        content = pickle.dumps(value, protocol=5)
        self._sends += [(self._comm.Isend(content, rank, _TAG), content) for rank in ranks]

    def is_sent(self) -> bool:
        """Make progress without waiting. True if MPI has sent everything."""
        self._sends = [send for send in self._sends if not send[0].Test()]
        return not self._sends

    def arrived(self) -> Iterator[tuple[int, Any]]:
        """Yield the sender and the object of each message that has arrived."""
        while True:
            if self._incoming is None:
                message = self._comm.Improbe(self._any, _TAG, self._status)
                if message is None:
                    return
                content = bytearray(self._status.count)
                self._incoming = self._status.source, content, message.Irecv(content)
            source, content, request = self._incoming
            if not request.Test():
                return
            self._incoming = None
            yield source, pickle.loads(content)
