"""The channel of one process set: it executes what all its ranks have submitted, in one order."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NoReturn

from mpitrain.allreduce.algorithm import Progress
from mpitrain.errors import MpitrainError, everywhere
from mpitrain.horovod.exceptions import HorovodInternalError
from mpitrain.horovod.fusion import Batch, batches, run_batch
from mpitrain.horovod.mail import Mail
from mpitrain.horovod.named_call import NamedCall, WhileOpen
from mpitrain.horovod.negotiation import JOIN, Agreed, Negotiation, Submission
from mpitrain.torch.channel import Channel
from mpitrain.waiting.background import Begun
from mpitrain.waiting.control import until

if TYPE_CHECKING:
    from mpitrain.torch.engine import Engine
    from mpitrain.torch.work import Call
    from mpitrain.world import World


class NamedChannel(Channel):
    """The named calls of one process set. Any thread may submit, in any order."""

    def __init__(self, engine: Engine, world: World, name: str) -> None:
        """`world` is the process set's own. Collective over its ranks."""
        super().__init__(engine, world, name, math.inf)
        self.numbers: Counter[str] = Counter()  # how many calls had no name, by kind
        self._open: dict[str, NamedCall] = {}  # submitted, and not agreed on, by key
        self._keys: set[str] = set()  # of the calls that have not ended
        self._naming = threading.Lock()  # two threads may take a name at the same time
        self._outbox: deque[Submission] = deque()
        self._mail = Mail(world.objects)
        self._negotiation = Negotiation(world.size, world.name) if world.rank == 0 else None

    def __str__(self) -> str:
        return f"Horovod's {self.name}"

    def key(self, kind: str, name: str | None) -> str:
        """Return the key of a call. A call without a name gets the next number; ranks number alike."""
        if name is None:
            with self._naming:
                self.numbers[kind] += 1
                name = f"noname.{self.numbers[kind]}"
        return f"{kind}.{name}"

    def submit(self, call: NamedCall, *, hurries: bool = True) -> NamedCall:
        """Submit a call. It runs once all ranks have submitted it.

        Unless it `hurries`, the other ranks may be told as late as when this rank waits for the call, or for another.

        Raises:
            ValueError: a call of the same kind and name is under way on this rank.
            HorovodInternalError: the channel is closed, or an earlier call has left it unusable.
        """
        key = call.submission.key
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
        self.world.control.count_call()
        call.number = self.world.control.calls
        self._open[key] = call
        self._add(call)
        self._outbox.append(call.submission)
        if hurries:
            self.engine.wake()
        return call

    def refuse(self, call: str, error: Exception) -> NoReturn:
        """Refuse a call that this rank cannot make, so that it fails on the other ranks too; then raise `error`.

        `call` is the key of the call.
        """
        if call not in self._keys:
            submission = Submission(call, (f"refused: {error}",))
            self.submit(NamedCall(self, submission, work=lambda _: iter(())))  # runs if this rank is alone
        raise error

    def absent(self, key: str) -> str:
        """Say which ranks have not submitted a name, as far as this rank knows: rank 0 of the set does."""
        missing = self._negotiation.missing(key) if self._negotiation is not None else []
        return f", so far without {', '.join(map(self.world.name, missing))}" if missing else ""

    def look(self) -> float | None:
        """Do what can be done without waiting. See Channel."""
        try:
            self._negotiate()
        except Exception as error:
            self.break_off("the negotiation of names", error)
            return None
        return super().look()

    def others(self, call: Call) -> Collection[int] | None:
        """Return the ranks that the call waits for; see Channel."""
        return WhileOpen(call) if isinstance(call, NamedCall) else super().others(call)

    def is_for_all(self, call: Call) -> bool:
        """True: all ranks make every named call."""
        return True

    def _end(self, call: Call, error: BaseException | None) -> None:
        self._keys.discard(call.name)
        super()._end(call, error)

    def _negotiate(self) -> None:
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
                call.is_agreed = True
            if item.key == JOIN:
                assert call is not None
                self._begin_batches(calls)
                calls = []
                self.numbers.clear()  # ranks that had joined have numbered fewer calls than the others
                call.output = item.details[0][0]
                Begun(self._queue, self._run_end(call, None), call)
            elif not item.error:
                calls.append((call, item))
            elif call is not None:
                Begun(self._queue, self._run_end(call, everywhere(HorovodInternalError(item.error))), call)
        self._begin_batches(calls)

    def _begin_batches(self, calls: Iterable[tuple[NamedCall | None, Agreed]]) -> None:
        for batch in batches(calls):
            Begun(self._queue, self._run_batch(batch), batch)

    def _run_end(self, call: NamedCall, error: HorovodInternalError | None) -> Progress:
        """End a call that moves nothing, once the other ranks can hear of its end."""
        yield from until(self._mail.is_sent)
        self._end(call, error)

    def _run_batch(self, batch: Batch) -> Progress:
        """Run calls that were agreed on. Their errors are those of `Channel._run`."""
        try:
            yield from until(self._mail.is_sent)
            yield from run_batch(self.world, self.sums, batch)
        except MpitrainError as error:
            if not error.known_everywhere:
                self.break_off(str(batch), error)
                return
            for call in batch.ends:
                self._end(call, error)
        except Exception as error:
            self.break_off(str(batch), error)
        else:
            for call in batch.ends:
                self._end(call, None)
