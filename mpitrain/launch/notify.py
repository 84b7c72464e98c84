"""`mpitrain run --notify`: tell a command or a URL that a job fails, is done or hangs, or that its loss is not finite.

A thread looks at the job once a second, and delivers. Nothing in the job waits for it. At the end of the job the
launcher waits for at most `MOST_SECONDS`, and a line says what could not be delivered.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from mpitrain.errors import ConfigError
from mpitrain.launch.live import Live
from mpitrain.launch.log import say
from mpitrain.launch.processes import start_beside
from mpitrain.launch.time_limit import EXIT_CODE
from mpitrain.watching.hang_report import NO_PROGRESS

FAILED, DONE, SAVED, STALLED, NOT_FINITE = "failed", "done", "saved", "stalled", "loss_not_finite"
MOST_SECONDS = 10.0  # for a delivery
_LOOK_SECONDS = 1.0
_MOST_BYTES = 500  # of what a command has printed, in a line
_SCHEMES = ("http", "https")
_ALLOWED = "allowed is a command that is here, or a URL that begins with https:// or http://"


def checked(target: str) -> str:
    """Return what --notify was given.

    Raises:
        ConfigError: it is neither a URL nor a command that is here.
    """
    try:
        scheme, host = _place(target)
        words = shlex.split(target)
    except ValueError as error:
        raise ConfigError(f"--notify {target!r:.80}: {error}; {_ALLOWED}") from None
    if scheme and (scheme not in _SCHEMES or not host):
        raise ConfigError(f"--notify {target!r:.80}; {_ALLOWED}")
    if not scheme and (not words or shutil.which(words[0]) is None):
        program = words[0] if words else ""
        raise ConfigError(
            f"--notify {target!r:.80}: there is no program {program!r:.80} here; {_ALLOWED}. A pipe needs a shell: "
            "sh -c '...'"
        )
    return target


def _place(target: str) -> tuple[str, str]:
    """The scheme and the host of a URL; two empty texts for a command. ValueError: neither can be told."""
    if not re.match(r"\w+://", target):
        return "", ""
    parts = urlsplit(target)
    return parts.scheme, parts.hostname or ""


class Notifier:
    """Use this in `with`, inside of that of the Live view: inside, it looks and delivers; at the end, it says how."""

    def __init__(self, target: str, live: Live) -> None:
        """`target` is a URL or a command, as `checked` returns it; "": nobody is told anything."""
        self._target, self._live = target, live
        self._reported_at = 0.0
        self._told_place: list[tuple[int, int]] = []  # the calls and steps of the ranks when a hang was told
        self._is_not_finite = False
        self._over = threading.Event()
        self._is_told = False  # the last message was delivered, or a line has said why not
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)

    def __enter__(self) -> Notifier:
        """Begin to look."""
        if self._target:
            self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Tell how the job has ended."""
        if not self._target:
            return
        self._live.end_by(error)
        self._over.set()
        self._thread.join(MOST_SECONDS)
        if not self._is_told:
            say(f"--notify: {_shown(self._target)} has not taken within {MOST_SECONDS:g} s how the job has ended")

    def _run(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            try:
                for event, why in self._news(self._live.answer()):
                    self._tell(event, why)
            except Exception as error:  # the job continues, and its end is told
                say(f"--notify: the job cannot be looked at: {error!r}")
                self._over.wait()
        try:
            answer = self._live.answer()
            code = answer["ended"]["code"]
            self._tell(SAVED if code == EXIT_CODE else FAILED if code != 0 else DONE, self._live.why)
        except Exception as error:
            say(f"--notify: nobody is told how the job has ended: {error!r}")
        self._is_told = True

    def _news(self, answer: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return what is new, and why: a wait in which nothing moves, and the first loss that is not finite."""
        news = []
        # The launcher reports a wait when it is due, and again while nothing moves.
        reports = [event for event in answer["events"] if str(event["text"]).startswith(NO_PROGRESS)]
        if reports and float(reports[-1]["at"]) > self._reported_at:
            self._reported_at = float(reports[-1]["at"])
            place = [(entry["calls"], entry["step"]) for entry in answer["ranks"]]
            if place != self._told_place:
                self._told_place = place
                news.append((STALLED, str(reports[-1]["text"])))
        loss = answer["metrics"].get("loss")
        if isinstance(loss, str) and not self._is_not_finite:  # JSON has no number for it
            self._is_not_finite = True
            news.append((NOT_FINITE, f"the loss is {loss}"))
        return news

    def _tell(self, event: str, why: str) -> None:
        message = message_of(event, why, self._live.answer())
        if problem := deliver(self._target, json.dumps(message).encode()):
            say(f"--notify: {_shown(self._target)} was not told {event!r}: {problem}")


def message_of(event: str, why: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message about a job, from a look at it (docs/reference/formats-and-protocols.md)."""
    step = max((entry["step"] for entry in answer["ranks"]), default=0)
    last = max((entry["last_step"] or 0 for entry in answer["ranks"]), default=0)
    host, seconds = socket.gethostname(), max(0.0, answer["at"] - answer["since"])
    name = " ".join([Path(answer["script"]).name, *answer["arguments"]])
    at_step = f" at step {step:,}" + f" of {last:,}" * bool(last) if step else ""
    words = {FAILED: "has failed", DONE: "is done", SAVED: "is saved", STALLED: "hangs"}
    what = words.get(event, "has a loss that is not finite")
    return {
        "event": event,
        "text": f"{name} on {host} {what}{at_step}, after {timedelta(seconds=round(seconds))}: {why}",
        "job": answer["job"],
        "ids": answer["ids"],
        "script": answer["script"],
        "arguments": answer["arguments"],
        "host": host,
        "at": answer["at"],
        "seconds": seconds,
        "step": step,
        "last_step": last or None,
        "metrics": answer["metrics"],
        "record": answer["record"],
        "exit_code": answer.get("ended", {}).get("code"),
    }


def deliver(target: str, body: bytes) -> str:
    """POST to a URL, or give to a command on its stdin. Return why that could not be; "": it was delivered."""
    return _post(target, body) if _place(target)[0] else _run(target, body)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that is sent elsewhere would become a GET without its message."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _post(url: str, body: bytes) -> str:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "mpitrain"})
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=MOST_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"it answers {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(error) or repr(error)


def _run(command: str, body: bytes) -> str:
    with ExitStack() as stack:
        output = stack.enter_context(
            tempfile.TemporaryFile()
        )  # a pipe may be held open by what the command has started
        try:
            how = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
            process = start_beside(stack, shlex.split(command), **how)
        except OSError as error:
            return str(error.strerror)
        try:
            process.communicate(body, MOST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it has not ended within {MOST_SECONDS:g} s, and was killed"
        if not process.returncode:
            return ""
        output.seek(0)
        said = output.read(_MOST_BYTES).decode(errors="replace").strip().replace("\n", "; ")
        return f"it ended with exit code {process.returncode}{f': {said}' if said else ''}"


def _shown(target: str) -> str:
    """What may be printed: the rest of a URL is often a secret, and so are arguments."""
    scheme, host = _place(target)
    return f"{scheme}://{host}" if scheme else shlex.split(target)[0]
