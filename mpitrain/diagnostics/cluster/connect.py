"""The way to a node's agent: one login by Fabric, which checks host keys and asks nobody."""

from __future__ import annotations

import base64
import json
import logging
import os
import shlex
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from fabric import Connection
from paramiko import AuthenticationException, BadHostKeyException, RejectPolicy, SSHException
from paramiko.ssh_exception import NoValidConnectionsError

from mpitrain.diagnostics.cluster.identities import Identities
from mpitrain.diagnostics.cluster.ssh_settings import LoginError, gateway, ssh_settings
from mpitrain.launch.hostfile import Host

LOGIN_SECONDS = 8.0
# A machine that is slow or busy takes its time to start a Python; only a shell that hangs is meant here.
_BEGIN_SECONDS = 20.0
_PYTHON = "/usr/bin/python3"
# When nobody has asked for so long, as where a cable was pulled out; and in any case.
_IDLE_SECONDS = 300
_LIFE_SECONDS = 7200
_MOST_NOISE = 1 << 16
_MOST_ANSWER = 1 << 23
_MODULES = ("children", "machine", "system", "account", "share", "links", "jobs", "gpu", "rates")
_NODE = "mpitrain.diagnostics.cluster.node"

# What goes wrong is said by us; Paramiko's threads would print tracebacks of it.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


# A program of several lines, as a word that every shell takes: csh knows no line breaks in quotes.
def _in_a_word(program: str) -> str:
    return f"import base64;exec(base64.b64decode({base64.b64encode(program.encode()).decode()!r}))"


# The first line has the modules. Python reads it byte by byte, to leave the questions to the agent.
_BOOT = """
import json, sys, types
if sys.version_info < (3, 8):
    print(json.dumps({"old": sys.version.split()[0]})); sys.exit()
bundle = json.loads(open(0, "rb", buffering=0, closefd=False).readline() or "null")
if bundle:
    sys.modules[bundle["package"]] = types.ModuleType(bundle["package"])
    for name, text in bundle["modules"] + [bundle["agent"]]:
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(text, name, "exec"), module.__dict__)
    module.main(bundle)
"""


class UnansweredError(Exception):
    """A question got no answer; the text says why."""


class Agent:
    """A node that answers. `noise` is what came before its first line, `hello` what it says of itself."""

    def __init__(self, host: Host) -> None:
        """Log in and start the agent.

        Raises:
            LoginError: it did not come to that.
        """
        started = time.monotonic()
        self.host = host
        self._connection = _connect(host)
        self._questions: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._number = 0
        self._why = ""
        self.heard = started  # when the last answer came
        transport = self._connection.transport
        assert transport is not None
        # Whatever the far side does or does not: a shell that hangs, a byte now and then.
        watchdog = threading.Timer(_BEGIN_SECONDS, transport.close)
        watchdog.daemon = True
        watchdog.start()
        try:
            self.login_seconds = time.monotonic() - started
            self.host_key = transport.get_remote_server_key().fingerprint
            self._channel = transport.open_session(timeout=LOGIN_SECONDS)
            program = shlex.join([_PYTHON, "-I", "-u", "-c", _in_a_word(_BOOT)])
            self._channel.exec_command(f"exec timeout -k 2 {_LIFE_SECONDS} {program}")
            # A far side that ended already does not take it all; what it printed is read below and says why.
            with suppress(OSError):
                self._channel.sendall(json.dumps(_bundle()).encode() + b"\n")
            self._lines = self._channel.makefile("rb")
            self.noise, self.hello = self._wait_for_hello()
            watchdog.cancel()
        except BaseException as error:
            watchdog.cancel()
            is_slow = not transport.is_active()
            self._connection.close()
            if is_slow:
                raise LoginError("agent", f"{_PYTHON} did not start our probe within {_BEGIN_SECONDS:g} s") from None
            if isinstance(error, SSHException | OSError | EOFError | ValueError):
                raise LoginError("agent", f"the login went through, then: {error or type(error).__name__}") from None
            raise
        threading.Thread(target=self._read, daemon=True).start()

    def begin(self, call: str, wish: Mapping[str, Any], user: str) -> Future[Any]:
        """Put a question to the agent that runs as `user` ("login": whoever logged in). Several may wait at once."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._why:
                answer.set_exception(UnansweredError(self._why))
                return answer
            self._number += 1
            question = {"id": self._number, "as": user, "call": call, "wish": wish}
            self._questions[self._number] = answer
        try:
            self._channel.sendall(json.dumps(question).encode() + b"\n")
        except OSError as error:
            self._lose(f"the connection was lost: {error}")
        return answer

    def ask(self, call: str, wish: Mapping[str, Any], *, user: str, seconds: float) -> Any:
        """The answer to one question.

        Raises:
            UnansweredError: none came in time, or what was asked failed there.
        """
        return wait_for(self.begin(call, wish, user), seconds)

    def close(self) -> None:
        """Hang up; the far side then ends by itself with all that it runs."""
        with suppress(SSHException, OSError, EOFError):
            self._channel.close()
            self._connection.close()

    def give_up(self, why: str) -> None:
        """Hang up on a node that does not answer any more; what was and will be asked fails at once."""
        self._lose(why)
        self.close()

    def _wait_for_hello(self) -> tuple[str, dict[str, Any]]:
        """Until the watchdog closes the connection."""
        noise = b""
        while True:
            line: bytes = self._lines.readline(_MOST_NOISE)
            if line.startswith(b'{"hello"'):
                # Tools of the system may write to stderr at each login; that is noise too, but hurts nobody.
                return noise.decode(errors="replace"), json.loads(line)
            if line.startswith(b'{"old"'):
                raise LoginError("agent", f"{_PYTHON} is version {json.loads(line)['old']}; 3.8 or newer is needed")
            if not line:
                words = self._channel.makefile_stderr("rb").read().decode(errors="replace").strip()
                code = self._channel.exit_status if self._channel.status_event.wait(1.0) else "unknown"
                raise LoginError(
                    "agent", f"{words.splitlines()[-1] if words else f'ended with code {code}'}{_after(noise)}"
                )
            noise += line
            if len(noise) >= _MOST_NOISE:
                raise LoginError("agent", f"something else than our probe answers{_after(noise)}")

    def _read(self) -> None:
        why = "the connection was closed by the node"
        try:
            while line := self._lines.readline(_MOST_ANSWER):
                answer = json.loads(line)
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
            why = f"it answers what is not ours: {line[:80]!r}"
        except (OSError, SSHException) as error:
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
        UnansweredError: none came in time, or what was asked failed there.
    """
    try:
        return answer.result(max(0.0, seconds))
    except FutureTimeout:
        raise UnansweredError("no answer in time") from None


def _after(noise: bytes) -> str:
    return f"; it printed {noise[:80].decode(errors='replace')!r}" if noise else ""


def _connect(host: Host) -> Connection:
    settings = ssh_settings(host)
    user = settings["user"][0]
    connection = Connection(
        settings["hostname"][0],
        user=user,
        port=int(settings["port"][0]),
        connect_timeout=LOGIN_SECONDS,
        gateway=gateway(settings),
        connect_kwargs={
            "auth_strategy": Identities(user, settings),
            "banner_timeout": LOGIN_SECONDS,
            "auth_timeout": LOGIN_SECONDS,
        },
    )
    client = connection.client
    assert client is not None
    for setting in ("globalknownhostsfile", "userknownhostsfile"):
        for path in _existing(settings.get(setting, [])):
            client.load_system_host_keys(str(path))
    client.set_missing_host_key_policy(RejectPolicy())  # Fabric itself would take any
    try:
        connection.open()
    except BaseException as error:
        connection.close()
        raise _why(error) from None
    return connection


def _existing(paths: Sequence[str]) -> list[Path]:
    """The files of ssh's settings that are there; ssh passes over the others too."""
    return [path for path in (Path(name).expanduser() for name in paths) if os.path.isfile(path)]  # noqa: PTH113


def _why(error: BaseException) -> BaseException:
    """What failed, as a LoginError; other errors as they are."""
    if isinstance(error, BadHostKeyException):
        got, known = (key.fingerprint for key in (error.key, error.expected_key))
        found = f"its host key is {got} ({error.key.get_name()}); known is {known}"
        return LoginError("host key", found, {"got": got, "known": known})
    if isinstance(error, AuthenticationException) and "imeout" in str(error):
        return LoginError("login", f"it does not say within {LOGIN_SECONDS:g} s whether it takes the key")
    if isinstance(error, AuthenticationException):
        return LoginError("key", str(error))
    if isinstance(error, NoValidConnectionsError):
        reasons = {inner.strerror or str(inner) for inner in error.errors.values()}
        return LoginError("login", f"{' and '.join(sorted(reasons))}")
    if isinstance(error, TimeoutError | socket.timeout):
        return LoginError("login", f"no answer within {LOGIN_SECONDS:g} s")
    if isinstance(error, SSHException) and "known_hosts" in str(error):
        return LoginError("host key", "its host key is not known on this machine")
    if isinstance(error, SSHException) and "banner" in str(error):
        return LoginError("login", f"it takes connections, but its sshd says nothing within {LOGIN_SECONDS:g} s")
    if isinstance(error, SSHException | EOFError | OSError):
        return LoginError("login", f"{error or type(error).__name__}")
    return error


def _bundle() -> dict[str, Any]:
    """What is sent to a node: our modules as text, and after what time the agent ends itself."""
    source = files(_NODE)
    texts = {name: (source / f"{name}.py").read_text() for name in (*_MODULES, "agent")}
    named = [(f"{_NODE}.{name}", text) for name, text in texts.items()]
    return {
        "boot": _in_a_word(_BOOT),
        "package": _NODE,
        "seconds": _IDLE_SECONDS,
        "life_seconds": _LIFE_SECONDS,
        "modules": named[:-1],
        "agent": named[-1],
    }
