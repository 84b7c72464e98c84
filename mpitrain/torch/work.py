"""What a call returns: torch's Work, and its future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpitrain.errors import ProcessGroupError
from mpitrain.torch.flat_tensors import FlatTensors
from mpitrain.torch.uncompiled import uncompiled

if TYPE_CHECKING:
    from mpitrain.torch.channel import Channel

_NEVER = timedelta(0)
_futures = threading.Lock()  # a call ends in one thread while another asks for its future


@uncompiled
class Call(dist.Work):
    """A call that has begun on a process group.

    Attributes:
        channel: of the group.
        name: torch's, such as all_reduce.
        buffers: the memory that its messages come from and go to.
        results: the tensors that hold the result.
        deadline: when the group gives it up, by time.monotonic().
        is_done: it has ended, and `error` says how.
    """

    def __init__(self, channel: Channel, name: str, results: Sequence[torch.Tensor], seconds: float) -> None:
        super().__init__()
        self.channel = channel
        self.name = name
        self.results = results
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.buffers = FlatTensors()
        self.source = -1  # of a receive
        self.number = 0  # of those of all ranks, in the order begun: 1, 2 ...
        self.is_done = False
        self.error: BaseException | None = None
        self._future: CallFuture | None = None

    def __str__(self) -> str:
        """What is waited for, in reports."""
        amount = ""
        if self.results:
            first = self.results[0]
            count = sum(tensor.numel() for tensor in self.results)
            amount = f" of {count} {str(first.dtype).removeprefix('torch.')}"
        return f"{self.name}{amount} in {self.channel}"

    def end(self, error: BaseException | None) -> CallFuture | None:
        """It has ended. The future, if one was asked for, is to be completed by the caller."""
        with _futures:
            self.error = error
            self.is_done = True
            return self._future

    # -- what torch calls ------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = _NEVER) -> bool:
        """Drive the call until it has ended.

        Raises:
            MismatchError: the ranks have made different calls; on every rank.
            ProcessGroupError: it has not ended within `timeout`, and may still do; or within the group's, and the
                group cannot be used any more.
        """
        if not self.is_done:
            seconds = timeout.total_seconds() if timeout > _NEVER else None
            self.channel.engine.wait(self, seconds)
            if not self.is_done:
                raise ProcessGroupError(
                    f"{self.channel.world.name()}: {self} has not ended within the {seconds:g} s of wait(timeout); "
                    f"it goes on. {self.channel.engine.who_waits()}"
                )
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """As `wait`: results are in place when the call ends, for every stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended."""
        if not self.is_done:
            self.channel.engine.look()
        return self.is_done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_done and self.error is None

    def exception(self) -> BaseException | None:
        """The error it has ended with."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result."""
        return list(self.results)

    def source_rank(self) -> int:
        """Of a receive: who has sent it, as a rank of the group."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> CallFuture:
        """A future whose value is the list of the tensors that hold the result."""
        self.channel.drive_here(self)
        with _futures:
            if self._future is not None:
                return self._future
            devices = {tensor.device for tensor in self.results if tensor.is_cuda}
            self._future = future = CallFuture(self, list(devices))
        if self.is_done:
            future.complete()
        else:
            self.channel.engine.wake()  # whoever waits for a future does not drive
        return future


@uncompiled
class CallFuture(torch.futures.Future):  # type: ignore[type-arg]
    """The future of a call. Waiting for it drives the call."""

    def __init__(self, call: Call, devices: list[int | str | torch.device]) -> None:
        super().__init__(devices=devices)
        self._call = call
        self._has_callbacks = False
        self._is_complete = False

    def complete(self) -> None:
        """The call has ended: tell whoever waits. Called without any lock."""
        with _futures:
            if self._is_complete:
                return
            self._is_complete = True
        if self._has_callbacks:
            # A callback may make further calls and wait for them, which the thread that drives them must not.
            try:
                threading.Thread(target=self._set, name="mpitrain callback", daemon=True).start()
                return
            except RuntimeError:  # the interpreter ends, and starts no threads any more
                pass
        self._set()

    def _set(self) -> None:
        error = self._call.error
        if error is None:
            self.set_result(list(self._call.results))
            return

        def fail(_: object) -> None:
            raise error

        self._set_unwrap_func(fail)
        self.set_result(_CallError(error))

    def wait(self) -> Any:
        """The value, once it is there. Raises the call's error."""
        self._call.wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """See torch."""
        self._has_callbacks = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """See torch."""
        self._has_callbacks = True
        super().add_done_callback(callback)


class _CallError(Exception):
    """The value of a future whose call has failed: raises the call's error wherever it is looked at.

    torch knows only values, and gives them to C++ (DDP) as they are, which takes them apart by pickling them.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error
