"""Reads batches ahead in a thread, while the ranks compute."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from mpitrain.errors import ConfigError, everywhere
from mpitrain.tree import Tree

# A read that takes longer than this does not delay the end of the program. The thread is a daemon.
_PATIENCE_SECONDS = 5.0


class DataSource(Protocol):
    """A data source that can be read ahead, such as ArrayData."""

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    def __next__(self) -> tuple[Tree, int]:
        """Called in the thread, so it must not be collective."""
        ...

    def share_out(self, samples_per_second: float) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class _Read:
    """A batch and the position in the data after it was read, or the error that occurred instead."""

    batch: Tree
    weight: int
    epoch: int
    state: dict[str, Any]
    error: BaseException | None = None


class Prefetch:
    """A data source that reads the batches of another data source in a thread, ahead of their use.

    `epoch` and `state` are those of the batch that was handed out last, whatever has been read since then. If the
    thread fails to read a batch, the `next` for that batch raises the error, and the `next` after it tries the batch
    again. The thread ends with `close`, with this object, or with the program. After `close`, the next batch starts a
    new thread.
    """

    def __init__(self, data: DataSource, *, batches: int = 2) -> None:
        """Not collective.

        Args:
            data: from now on, only this object may read it.
            batches: the most batches to read ahead of their use. Each takes memory.

        Raises:
            ConfigError: `batches` is not at least 1.
        """
        if not isinstance(batches, int) or isinstance(batches, bool) or batches < 1:
            raise ConfigError(f"Prefetch: batches={batches!r}; it must be an int of at least 1")
        self._data = data
        self._batches = batches
        self._epoch = data.epoch
        self._state = data.state()
        self._reader: _Reader | None = None
        self._interrupted = False  # the batches read ahead do not follow the batch that was handed out last
        self._at_exit: weakref.finalize[..., Prefetch] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """See ArrayData."""
        return self._data.steps_per_epoch

    @property
    def source(self) -> DataSource:
        """The data source that is read ahead."""
        return self._data

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was handed out last."""
        return self._epoch

    def __iter__(self) -> Iterator[tuple[Tree, int]]:
        return self

    def __next__(self) -> tuple[Tree, int]:
        """Wait for the next batch; return it and its number of samples. Raise the error of the thread, if any."""
        if self._interrupted:
            self.close()
        if self._reader is None:
            self._reader = _Reader(self._data, self._batches)
            # Also stop the thread at the end of the program: a thread that still runs Python then may crash the
            # process.
            self._at_exit = weakref.finalize(self, self._reader.end, _PATIENCE_SECONDS)
        self._interrupted = True  # Ctrl-C may come when the thread has given up the batch and it has not arrived here
        read = self._reader.next()
        if read.error is not None:
            self.close()
            raise read.error
        self._epoch, self._state, self._interrupted = read.epoch, read.state, False
        return read.batch, read.weight

    def close(self) -> None:
        """End the thread, and drop the batches that were read ahead. This does not change which batch comes next."""
        if self._reader is None:
            return
        self._interrupted = True
        self._reader.end()
        self._data.restore(self._state)
        if self._at_exit is not None:
            self._at_exit.detach()
        self._reader, self._interrupted = None, False

    def share_out(self, samples_per_second: float) -> None:
        """See ArrayData. The batches that were read ahead are read again, with the new parts. Collective."""
        self.close()
        self._data.share_out(samples_per_second)

    def cut(self, virtual_ranks: int) -> int:
        """See ArrayData.

        Raises:
            ConfigError: the source has no such method. Raised on every rank.
        """
        self.close()
        return cut_into(self._data, virtual_ranks)

    def state(self) -> dict[str, Any]:
        """Return the position in the data after the batch that was handed out last."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """See ArrayData."""
        self.close()
        self._data.restore(state)
        self._epoch, self._state = self._data.epoch, self._data.state()


def cut_into(data: Any, virtual_ranks: int) -> int:
    """Make a data source give whole virtual ranks to each rank. Return the number of samples of each. Collective.

    Raises:
        ConfigError: it cannot. Raised on every rank.
    """
    if not hasattr(data, "cut"):
        raise everywhere(
            ConfigError(
                f"{type(data).__name__} has no method cut(virtual_ranks), so it cannot give whole virtual ranks to "
                "each rank; ArrayData, MapData, StreamData and Prefetch have it"
            )
        )
    num_samples: int = data.cut(virtual_ranks)
    return num_samples


class _Reader:
    """The thread. It must hold no reference to the Prefetch, because it ends with the Prefetch."""

    def __init__(self, data: DataSource, batches: int) -> None:
        self._data = data
        self._free = threading.Semaphore(batches)
        self._ready: SimpleQueue[_Read] = SimpleQueue()
        self._ending = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpitrain prefetch", daemon=True)
        self._thread.start()

    def next(self) -> _Read:
        """Return the next batch or error. Nothing follows an error."""
        read = self._ready.get()
        self._free.release()
        return read

    def end(self, patience_seconds: float | None = None) -> None:
        """Read no more batches. Return when no read is under way, or after a time limit."""
        self._ending = True
        self._free.release()
        if threading.current_thread() is self._thread:  # this thread may be the one that garbage-collects the Prefetch
            return
        # If Ctrl-C interrupts join(), Python considers the thread ended. So join() comes last.
        if self._ended.wait(patience_seconds):
            self._thread.join()

    def _run(self) -> None:
        try:
            self._read()
        finally:
            self._ended.set()

    def _read(self) -> None:
        while True:
            self._free.acquire()
            if self._ending:
                return
            try:
                batch, weight = next(self._data)
                read = _Read(batch, weight, self._data.epoch, self._data.state())
            except BaseException as error:  # also SystemExit: the caller that waits for the batch must get it
                self._ready.put(_Read(None, 0, 0, {}, error))
                return
            self._ready.put(read)
            del batch, read  # otherwise the thread would hold it while it waits
