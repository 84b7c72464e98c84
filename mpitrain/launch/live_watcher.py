"""A watcher of a job: its requests, and the answers that it has not read yet. Nothing here waits.

A watcher that reads slowly misses looks. A look is never cut, and at most one waits for a watcher to take it.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Mapping
from typing import Any

from mpitrain.launch.control import VERSION
from mpitrain.launch.log import Wanted
from mpitrain.reading import json_of, shown
from mpitrain.watching.ranges import ranks_in

LEAST_SECONDS, MOST_SECONDS = 0.2, 3600.0
_MOST_BYTES = 1 << 17  # of a request, such as a value that the job is told
_READ_BYTES = 1 << 16
# After a connection, a request must come within this time; what is to be read must be read within this time.
_PATIENCE_SECONDS = 10.0


class LiveWatcher:
    """A connection to the launcher's socket.

    Attributes:
        seconds: from look to look; None: nothing was asked for, or one look.
        due: when the next look is due, by the clock of the caller; None: none is.
        asked: when it asked for what it has not got yet; None: it has all.
        output: the lines of ranks that it has asked for, instead of looks; None: it has not.
        wish: what it tells the job, instead (control.py); None: it tells nothing. Who reads this sends the answer.
        hears: more requests may come. Where not, it still gets what it has asked for, once.
        is_closed: it is of no more use.
    """

    def __init__(self, line: socket.socket, now: float) -> None:
        line.setblocking(False)
        self.line = line
        self.seconds: float | None = None
        self.due: float | None = None
        self.asked: float | None = None
        self.output: Wanted | None = None
        self.wish: Mapping[str, Any] | None = None
        self.hears = True
        self.is_closed = False
        self._is_last = False  # nothing follows what is unsent
        self._received = b""
        self._unsent = b""
        self._since = now  # of the connection, or of what is unsent

    def fileno(self) -> int:
        """For select."""
        return self.line.fileno()

    @property
    def has_unsent(self) -> bool:
        """True while it has not taken what was sent last."""
        return bool(self._unsent)

    def receive(self, now: float) -> None:
        """Take in what it says."""
        try:
            data = self.line.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.hears, self.seconds = False, None
            self.is_closed = self.asked is None and not self._unsent
            return
        if self._is_last:  # garbage after an error
            return
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _MOST_BYTES or any(len(one) > _MOST_BYTES for one in lines):
            self.refuse(f"a request has at most {_MOST_BYTES} bytes, and ends with a newline", now)
            return
        for line in lines:
            if not self._is_last:
                self._take(line, now)

    def _take(self, line: bytes, now: float) -> None:
        try:
            self.seconds, self.output, self.wish = _request(line)
        except ValueError as fault:
            self.refuse(str(fault), now)
            return
        self.asked = self.due = now

    def refuse(self, sentence: str, now: float) -> None:
        """Send the reason for a refusal; then the connection ends."""
        self.due = self.asked = None
        self.send(json.dumps({"error": sentence}).encode() + b"\n", now)
        self._is_last = True
        self.flush()

    def look(self, line: bytes, now: float) -> None:
        """A look is due: send it if the one before was taken."""
        self.asked = None
        if self.seconds is None:
            self.due, self._is_last = None, True
        else:
            # At whole multiples, so that many watchers have one look together.
            self.due = (math.floor(now / self.seconds) + 1) * self.seconds
        if not self._unsent:
            self.send(line, now)

    def send(self, line: bytes, now: float) -> None:
        """Send a line now, as far as it is taken."""
        self._unsent += line
        self._since = now
        self.flush()

    def flush(self) -> None:
        """Continue with what has not been taken."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.line.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent, self.is_closed = b"", True
        if self._is_last:
            self.is_closed = True

    def judge(self, now: float) -> None:
        """Give up if it sends no request, or does not read its answers."""
        late = now - self._since > _PATIENCE_SECONDS
        if late and self._unsent:
            self.is_closed = True
        elif late and self.due is None and not self._is_last:
            self.refuse(f"no request has come within {_PATIENCE_SECONDS:g} s", now)

    def close(self) -> None:
        """Disconnect."""
        self.line.close()


def _request(line: bytes) -> tuple[float | None, Wanted | None, Mapping[str, Any] | None]:
    """Return the seconds of a watch, None for one answer; which lines of output are wanted instead of a look; and what
    the job is told instead.

    Raises:
        ValueError: what is wrong with the request, in a sentence.
    """
    forms = ", ".join(f'{{{form}, "version": {VERSION}}}' for form in ('"watch": seconds', '"look": 1', '"output": {}'))
    unknown = ValueError(f"this is no request; allowed are {forms}")
    try:
        request = json_of(line, ValueError, "the request", any_number=True)
    except ValueError:
        raise unknown from None
    if "version" not in request:
        raise unknown
    version = request["version"]
    if type(version) is not int or version != VERSION:
        raise ValueError(f"the version of the request is {shown(version)}, and this launcher speaks {VERSION}")
    if "watch" in request:
        return _seconds(request["watch"]), None, None
    if "output" in request:
        return None, _wanted(request["output"]), None
    if isinstance(request.get("wish"), dict):
        return None, None, request["wish"]
    if "look" not in request:
        raise unknown
    return None, None, None


def _seconds(seconds: Any) -> float:
    if type(seconds) not in (int, float) or not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise ValueError(
            f"the seconds of a watch are {shown(seconds)}; allowed are {LEAST_SECONDS:g} to {MOST_SECONDS:g}"
        )
    return float(seconds)


def _wanted(fields: Any) -> Wanted:
    is_known = isinstance(fields, dict) and fields.keys() <= {"ranks", "text"}
    if not (is_known and all(isinstance(value, str) for value in fields.values())):
        raise ValueError('the output of ranks is asked for by {"ranks": text, "text": text}; both may be left out')
    ranks = fields.get("ranks", "").strip()
    return Wanted(ranks_in(ranks) if ranks else None, fields.get("text", ""))
