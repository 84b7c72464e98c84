"""A job that is prepared beside the one that trains. A thread asks its hosts; it can be dropped at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from mpitrain.errors import ConfigError, LaunchError
from mpitrain.launch.over_hosts import JobOverHosts


class PreparedJob:
    """Make it, and `close` it, in the main thread.

    Attributes:
        job: what is prepared; it is not there if it could not be made.
        stack: what it has opened; it is closed with the job.
        error: why it cannot be prepared; None: nothing is known that is against it.
    """

    def __init__(self, make: Callable[[ExitStack], JobOverHosts], *, is_idle: bool = False) -> None:
        """Begin to ask the hosts.

        Args:
            make: returns the job; what it opens is closed with the stack.
            is_idle: it may be long until it is started, and must notice a host that falls silent meanwhile.
        """
        self.job: JobOverHosts
        self.stack = ExitStack()
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        try:
            self.job = make(self.stack)
            self.job.connect(None, is_idle=is_idle)
        except (ConfigError, LaunchError, OSError) as error:
            self.error = error
            return
        self.begin(self._ask_and_keep if is_idle else self.job.ask)

    def _ask_and_keep(self) -> None:
        self.job.ask()
        self.job.attempt.keep()

    def begin(self, work: Callable[[], None]) -> None:
        """Have a thread do something that takes long. `error` then is its error."""

        def try_it() -> None:
            try:
                work()
            except Exception as error:  # it may be closed meanwhile, and nobody looks at a thread's error
                self.error = error

        self._thread = threading.Thread(target=try_it, name="prepared job", daemon=True)
        self._thread.start()

    def is_done(self, seconds: float = 0.0) -> bool:
        """Wait at most so long. True if the thread has done its work, or has failed."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Drop it."""
        self.stack.close()
        self.is_done(threading.TIMEOUT_MAX)  # a wait for facts ends soon after its attempt has been left
