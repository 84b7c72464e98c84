"""The remote end of a connection: it answers questions, one line of JSON each, until its stdin ends.

It does nothing by itself. Questions for the shared user go to a second agent, which this one starts as that
user with sudo. If the login is already the shared user's, this agent is both.
"""

from __future__ import annotations

import json
import os
import pwd
import queue
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain import facts
from mpitrain.check.node import children, shell

# The other agent may have to remove its folder from a slow or dead network file system.
_END_SECONDS = 6.0
_TERMINATE_SECONDS = 1.0
_BEGIN_SECONDS = 30.0


class Agent:
    """The agent of a process. `calls` are the possible questions by name; each takes the question's `wish`."""

    def __init__(self, bundle: dict[str, Any], calls: dict[str, Callable[[Any], Any]]) -> None:
        """`bundle` is the code that was sent here, for the second agent."""
        self._bundle = bundle
        self._calls = calls
        self._lock = threading.Lock()
        self._out_lock = threading.Lock()
        self._to_other: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._me = facts.own_user()
        self._other: subprocess.Popen[bytes] | None = None  # the second agent's process
        self._waiting: set[int] = set()  # numbers of questions that went to the second agent
        self._is_asked_for = False
        self._has_begun = False  # whether the second agent has answered anything
        self._why = ""  # why there is no second agent
        self._end_lock = threading.Lock()

    def serve(self) -> None:
        """Answer until stdin ends. Do not return."""
        self._heard = time.monotonic()
        threading.Thread(target=self._end_late, daemon=True).start()
        python = "{}.{}.{}".format(*sys.version_info[:3])
        hello = {"hello": self._me, "python": python, "family": facts.family(), "null": _null()}
        swallowed_by = (shell.startup() or "its shell") if self._bundle["swallowed"] else ""
        self._send({**hello, "swallowed_by": swallowed_by})
        for line in sys.stdin.buffer:
            self._heard = time.monotonic()
            try:
                question = json.loads(line)
            except (ValueError, RecursionError):  # only its own client talks to it
                continue
            if question["as"] in ("login", self._me):
                threading.Thread(target=self._answer, args=(question,), daemon=True).start()
            else:
                self._pass_on(question, line)
        self._end()

    def _answer(self, question: dict[str, Any]) -> None:
        try:
            result = self._calls[question["call"]](question["wish"])
            self._send({"id": question["id"], "result": result})
        except children.SlowError as error:
            self._send({"id": question["id"], "error": str(error), "slow": True})
        except Exception as error:
            self._send({"id": question["id"], "error": f"{type(error).__name__}: {error}"})

    def _send(self, message: dict[str, Any]) -> None:
        with self._out_lock:
            try:
                sys.stdout.write(json.dumps(message) + "\n")
                sys.stdout.flush()
            except OSError:  # the reader is gone
                self._end()

    def _pass_on(self, question: dict[str, Any], line: bytes) -> None:
        with self._lock:
            if not self._is_asked_for:
                self._is_asked_for = True
                self._to_other.put(json.dumps(self._bundle).encode() + b"\n")
                threading.Thread(target=self._start_other, args=(question["as"],), daemon=True).start()
            if not self._why:
                self._waiting.add(question["id"])
                self._to_other.put(line)
                return
        self._send({"id": question["id"], "error": self._why})

    def _start_other(self, user: str) -> None:
        life = str(self._bundle["life_seconds"])
        program = [sys.executable, "-I", "-u", "-c", self._bundle["boot"]]
        command = ["timeout", "-k", "2", life, "sudo", "-n", "-H", "-u", user, "--", *program]
        try:
            pwd.getpwnam(user)
            if children.sudo_hangs():
                self._lose(f"{self._me} cannot become {user}: sudo hangs")
                return
            other = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
            )
        except KeyError:
            self._lose(f"there is no user {user}")
            return
        except OSError as error:
            self._lose(f"{self._me} cannot become {user}: {error.strerror}")
            return
        self._other = other
        threading.Thread(target=self._tell, args=(other,), daemon=True).start()
        threading.Thread(target=self._relay, args=(user, other), daemon=True).start()
        late = threading.Timer(_BEGIN_SECONDS, self._give_up, args=(user, other))
        late.daemon = True
        late.start()

    def _tell(self, other: subprocess.Popen[bytes]) -> None:
        """Send the bundle. This runs in a thread: a hanging sudo reads nothing, and the bundle is larger than a
        pipe."""
        assert other.stdin is not None
        with suppress(OSError, ValueError):  # the thread that reads reports why
            while True:
                other.stdin.write(self._to_other.get())
                other.stdin.flush()

    def _give_up(self, user: str, other: subprocess.Popen[bytes]) -> None:
        """If sudo hangs, answer the questions for the other agent at once from then on."""
        if not self._has_begun:
            self._lose(f"{self._me} cannot become {user}: sudo does not answer within {_BEGIN_SECONDS:g} s")
            other.terminate()

    def _lose(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why
            waiting, self._waiting = self._waiting, set()
        for number in waiting:
            self._send({"id": number, "error": self._why})

    def _relay(self, user: str, other: subprocess.Popen[bytes]) -> None:
        assert other.stdout is not None and other.stderr is not None
        for line in other.stdout:
            self._has_begun = True
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(answer, dict) and "id" in answer:
                with self._lock:
                    self._waiting.discard(answer["id"])
                self._send(answer)
        words = other.stderr.read().decode(errors="replace").strip().splitlines()
        self._lose(f"{self._me} cannot become {user}: {words[-1] if words else 'its process ended'}")

    def _end_late(self) -> None:
        """End after a long time without a question, as after a connection that was cut without notice."""
        while (left := self._heard + self._bundle["seconds"] - time.monotonic()) > 0:
            time.sleep(left)
        self._end()

    def _end(self) -> None:
        """End all commands, and the other agent, which does the same when its stdin ends."""
        self._end_lock.acquire()  # a second caller would end the process before the first is done
        other = self._other
        if other is not None:
            assert other.stdin is not None
            with suppress(OSError):
                os.close(other.stdin.fileno())  # not close(), which waits for a hanging write
        children.end_all()
        if other is not None:
            if self._has_begun:
                with suppress(subprocess.TimeoutExpired):
                    other.wait(_END_SECONDS)
            if other.poll() is None:
                other.terminate()  # timeout(1) passes it on; a process of root ends by timeout's own deadline
                with suppress(subprocess.TimeoutExpired):
                    other.wait(_TERMINATE_SECONDS)
        os._exit(0)


def _null() -> str:
    """Return what is wrong with /dev/null; empty if nothing."""
    try:
        mode = Path("/dev/null").stat().st_mode
    except OSError as error:
        return str(error.strerror)
    if not stat.S_ISCHR(mode):
        return "it is not a device"
    return "" if mode & 0o666 == 0o666 else f"it has mode {stat.S_IMODE(mode):04o}"


def main(bundle: dict[str, Any]) -> None:
    """Serve, with the calls of all modules in the bundle."""
    calls: dict[str, Callable[[Any], Any]] = {}
    for name, _ in bundle["modules"]:
        calls.update(getattr(sys.modules[name], "CALLS", {}))
    Agent(bundle, calls).serve()
