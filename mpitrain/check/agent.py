"""This side of a node's agent: its code is sent there as text, then questions are sent and answers come back."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from importlib.resources import files
from typing import Any, Protocol

from mpitrain.check.target import LoginError
from mpitrain.launch.hostfile import Host
from mpitrain.reading import message_of, shown_text

# The agent ends itself after this time without questions, as after a pulled cable, and in any case after the second.
_IDLE_SECONDS = 300
LIFE_SECONDS = 7200
_NODE = "mpitrain.check.node"
# Each module comes after those that it imports.
_MODULES = (
    "children",
    "network",
    "machine",
    "account",
    "share",
    "sshd",
    "ways",
    "shell",
    "jobs",
    "gpu",
)
# A slow or busy machine takes long to start Python. This deadline is only for hanging shells.
_BEGIN_SECONDS = 20.0
_MOST_NOISE = 1 << 16
_MOST_ANSWER = 1 << 23


# A program of several lines, as one word that every shell accepts: csh allows no line breaks in quotes.
def in_a_word(program: str) -> str:
    return f"import base64;exec(base64.b64decode({base64.b64encode(program.encode()).decode()!r}))"


# Sent first: a startup file of the login's shell may read a line that is not meant for it.
BAIT = b"# mpitrain-check\n"
# The next line has the modules. Python reads it byte by byte, to leave the questions to the agent.
BOOT = """
import json, sys, types
if sys.version_info < (3, 8):
    print(json.dumps({"old": sys.version.split()[0]})); sys.exit()
stream = open(0, "rb", buffering=0, closefd=False)
first = stream.readline()
bundle = json.loads((first if first.startswith(b"{") else stream.readline()) or "null")
if bundle:
    bundle["swallowed"] = first.startswith(b"{")
    for name, text in bundle["modules"] + [bundle["agent"]]:
        package = name.rpartition(".")[0]
        sys.modules.setdefault(package, types.ModuleType(package))
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(text, name, "exec"), module.__dict__)
    module.main(bundle)
"""


def bundle() -> dict[str, Any]:
    """The text that is sent to a node: the modules, and the time after which the agent ends itself."""
    named = [("mpitrain.facts", (files("mpitrain") / "facts.py").read_text())]
    named += [(f"{_NODE}.{name}", (files(_NODE) / f"{name}.py").read_text()) for name in (*_MODULES, "agent")]
    return {
        "boot": in_a_word(BOOT),
        "seconds": _IDLE_SECONDS,
        "life_seconds": LIFE_SECONDS,
        "modules": named[:-1],
        "agent": named[-1],
    }


class UnansweredError(Exception):
    """A question got no answer; the text says why."""


class AgentConnection(Protocol):
    """The connection to an agent: connect.py's to another machine, doctor.py's to a process on this one.

    Its calls raise OSError if the connection is lost.
    """

    python: str  # what runs the agent
    host_key: str  # the fingerprint that the far end has proved; empty if none is needed

    def open(self) -> None:
        """Start the agent."""

    def send(self, data: bytes) -> None:
        """Send all data."""

    def readline(self, most: int) -> bytes:
        """Return the next line, or at most so many bytes of it; empty at the end."""

    def last_words(self) -> str:
        """The reason why the far end has ended."""

    def cut(self) -> None:
        """Make every waiting call return."""

    def close(self) -> None:
        """Hang up; the far end then ends itself and everything that it runs. Does not raise."""


class AgentClient:
    """A node that answers. `noise` is the output before its first line, `hello` what the node says about itself."""

    def __init__(self, host: Host, connection: AgentConnection, seconds: float) -> None:
        """Send the bundle and wait for the first answer. `seconds`: the duration of the login so far.

        Raises:
            LoginError: no agent of mpitrain answers.
        """
        self.host = host
        self.host_key = connection.host_key
        self.login_seconds = seconds
        self.heard = time.monotonic() - seconds  # when the last answer came
        self._connection = connection
        self._questions: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._number = 0
        self._why = ""
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            connection.cut()

        # In force whatever the far side does: a shell may hang, or send a byte now and then.
        watchdog = threading.Timer(_BEGIN_SECONDS, give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.open()
            # A far side that has ended already does not accept all data. Its output is read below and tells the reason.
            with suppress(OSError):
                connection.send(BAIT + json.dumps(bundle()).encode() + b"\n")
            self.noise, self.hello = self._wait_for_hello()
        except BaseException as error:
            connection.close()
            if is_late.is_set():
                why = f"{connection.python} did not start our probe within {_BEGIN_SECONDS:g} s"
                raise LoginError("agent", why) from None
            if isinstance(error, OSError | ValueError):
                raise LoginError("agent", f"the login went through, then: {error or type(error).__name__}") from None
            raise
        finally:
            watchdog.cancel()
        threading.Thread(target=self._read, daemon=True).start()

    def begin(self, call: str, wish: Mapping[str, Any], user: str) -> Future[Any]:
        """Put a question to the agent that runs as `user` ("login": the login's own user). Several may wait at once."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._why:
                answer.set_exception(UnansweredError(self._why))
                return answer
            self._number += 1
            question = {"id": self._number, "as": user, "call": call, "wish": wish}
            self._questions[self._number] = answer
        try:
            self._connection.send(json.dumps(question).encode() + b"\n")
        except OSError as error:
            self._lose(f"the connection was lost: {error}")
        return answer

    def ask(self, call: str, wish: Mapping[str, Any], *, user: str, seconds: float) -> Any:
        """The answer to one question.

        Raises:
            UnansweredError: no answer came in time, or the question failed there.
        """
        return wait_for(self.begin(call, wish, user), seconds)

    def close(self) -> None:
        """Hang up; the far side then ends itself and everything that it runs."""
        self._connection.close()

    def give_up(self, why: str) -> None:
        """Hang up on a node that no longer answers; all pending and later questions fail at once."""
        self._lose(why)
        self.close()

    def _wait_for_hello(self) -> tuple[str, dict[str, Any]]:
        """Wait for the agent's hello, at most until the watchdog closes the connection."""
        noise = b""
        while True:
            line: bytes = self._connection.readline(_MOST_NOISE)
            if line.startswith(b'{"hello"'):
                # Tools of the system may write to stderr at each login; that noise is harmless.
                with suppress(ValueError):
                    return noise.decode(errors="replace"), message_of(line)
            if line.startswith(b'{"old"'):
                old = shown_text(line.decode(errors="replace"))
                raise LoginError("agent", f"{self._connection.python} is too old: {old}; 3.8 or newer is needed")
            if not line:
                raise LoginError("agent", f"{self._connection.last_words()}{_after(noise)}")
            noise += line
            if len(noise) >= _MOST_NOISE:
                raise LoginError("agent", f"something else than our probe answers{_after(noise)}")

    def _read(self) -> None:
        why = "the connection was closed by the node"
        try:
            while line := self._connection.readline(_MOST_ANSWER):
                answer = message_of(line)
                self.heard = time.monotonic()
                with self._lock:
                    waiting = self._questions.pop(answer["id"], None)
                if waiting is None:
                    continue
                if "error" in answer:
                    waiting.set_exception(UnansweredError(str(answer["error"])))
                else:
                    waiting.set_result(answer["result"])
        except (ValueError, KeyError, TypeError):
            why = f"it answers something unexpected: {line[:80]!r}"
        except OSError as error:
            why = f"the connection was lost: {error}"
        self._lose(why)

    def _lose(self, why: str) -> None:
        with self._lock:
            self._why = why
            questions, self._questions = self._questions, {}
        for waiting in questions.values():
            waiting.set_exception(UnansweredError(why))


def wait_for(answer: Future[Any], seconds: float) -> Any:
    """The answer to a question that was begun.

    Raises:
        UnansweredError: no answer came in time, or the question failed there.
    """
    try:
        return answer.result(max(0.0, seconds))
    except FutureTimeout:
        raise UnansweredError("no answer in time") from None


def _after(noise: bytes) -> str:
    return f"; it printed {noise[:80].decode(errors='replace')!r}" if noise else ""
