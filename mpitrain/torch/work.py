"""The result of a call: torch's Work, and its future."""

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
_futures = threading.Lock()  # a call may end in one thread while another gets its future


@uncompiled
class Call(dist.Work):
    """A call that has begun on a process group.

    Attributes:
        channel: the channel of the group.
        name: torch's name of the call, such as all_reduce.
        buffers: the memory that its messages come from and go to.
        results: the tensors that hold the result.
        deadline: the time, by time.monotonic(), at which the group gives up the call.
        is_done: whether the call has ended; `error` is None if it succeeded.
    """

    def __init__(self, channel: Channel, name: str, results: Sequence[torch.Tensor], seconds: float) -> None:
        super().__init__()
        self.channel = channel
        self.name = name
        self.results = results
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.buffers = FlatTensors()
        self.source = -1  # the sender, for a receive
        self.number = 0  # collective calls are numbered 1, 2 ... in the order in which they were begun
        self.is_done = False
        self.error: BaseException | None = None
        self._future: CallFuture | None = None

    def __str__(self) -> str:
        """The name of the call in reports."""
        amount = ""
        if self.results:
            first = self.results[0]
            count = sum(tensor.numel() for tensor in self.results)
            amount = f" of {count} {str(first.dtype).removeprefix('torch.')}"
        return f"{self.name}{amount} in {self.channel}"

    def end(self, error: BaseException | None) -> CallFuture | None:
        """End the call. If a future exists, return it; the caller must complete it."""
        with _futures:
            self.error = error
            self.is_done = True
            return self._future

    # -- what torch calls ------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = _NEVER) -> bool:
        """Drive the call until it has ended.

        Raises:
            MismatchError: the ranks have made different calls. Raised on every rank.
            ProcessGroupError: the call has not ended within `timeout`, but may still do so; or it has not ended within
                the group's timeout, and the group can no longer be used.
        """
        if not self.is_done:
            seconds = timeout.total_seconds() if timeout > _NEVER else None
            self.channel.engine.wait(self, seconds)
            if not self.is_done:
                raise ProcessGroupError(
                    f"{self.channel.world.name()}: {self} has not ended within the {seconds:g} s of wait(timeout); "
                    f"it continues. {self.channel.engine.who_waits()}"
                )
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """Wait as `wait` does: results are in place when the call ends, for every stream."""
        self.wait()

    def is_completed(self) -> bool:
        """True if the call has ended."""
        if not self.is_done:
            self.channel.engine.look()
        return self.is_done

    def is_success(self) -> bool:
        """True if the call has ended without an error."""
        return self.is_done and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error with which the call has ended, or None."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result."""
        return list(self.results)

    def source_rank(self) -> int:
        """Return the sender of a received message, as a rank of the group."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> CallFuture:
        """Return a future. Its value is the list of the tensors that hold the result."""
        self.channel.drive_here(self)
        with _futures:
            if self._future is not None:
                return self._future
            devices = {tensor.device for tensor in self.results if tensor.is_cuda}
            self._future = future = CallFuture(self, list(devices))
        if self.is_done:
            future.complete()
        else:
            self.channel.engine.wake()  # a thread that waits for a future does not drive calls
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
        """Complete the future of a call that has ended. Call this without any lock."""
        with _futures:
            if self._is_complete:
                return
            self._is_complete = True
        if self._has_callbacks:
            # A callback may make further calls and wait for them. The thread that drives must not do this.
            try:
                threading.Thread(target=self._set, name="mpitrain callback", daemon=True).start()
                return
            except RuntimeError:  # the interpreter is ending, and starts no more threads
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
        """Wait for the value and return it. Raise the call's error."""
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
    """The value of a future whose call has failed. Any use of it raises the call's error.

    torch has only values here. It passes them unchanged to C++ (DDP), which unpacks them by pickling.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error
