"""Calls to a service that may not answer: nobody waits for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# For so long the caller waits in each outage of the service, and once more at the end of a run. A call that succeeds
# ends an outage.
PATIENCE_SECONDS = 10.0


class ServiceCalls:
    """Makes calls one after the other, each in a thread of its own. Only one thread may use it.

    A call that is not answered in time goes on by itself: libraries try again for minutes, and cannot be interrupted.
    Its thread ends with the process.
    """

    def __init__(self, service: str) -> None:
        """`service` is a name for messages."""
        self._service = service
        self._patience = PATIENCE_SECONDS  # what is left of it in this outage
        self._thread: threading.Thread | None = None
        self._begun = 0.0
        self._error: BaseException | None = None  # of the last call that has ended

    def get(self, call: Callable[[], None]) -> None:
        """Make a call, and return when it has ended.

        Raises:
            TimeoutError: it has not ended yet, or the one before has not ended, so that it was not made.
            Exception: what it raises.
        """
        self._wait()
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._make, args=(call,), name=self._service, daemon=True)
        self._thread.start()
        self._wait()
        if self._error is not None:
            raise self._error

    def _make(self, call: Callable[[], None]) -> None:
        self._error = None
        try:
            call()
        except Exception as error:
            self._error = error

    def _wait(self) -> None:
        if self._thread is None:
            return
        waits = time.monotonic()
        self._thread.join(self._patience)
        self._patience = max(0.0, self._patience - (time.monotonic() - waits))
        if self._thread.is_alive():
            self._patience = 0.0
            waited = time.monotonic() - self._begun
            raise TimeoutError(f"{self._service} has not answered for {waited:.0f} s")
        if self._error is None:
            self.renew_patience()

    def renew_patience(self) -> None:
        """Wait again for the service, although it has not answered before."""
        self._patience = PATIENCE_SECONDS
