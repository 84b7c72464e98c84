"""The way to a node's agent: one login by Fabric, which checks host keys and asks nobody."""

from __future__ import annotations

import json
import logging
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from fabric import Connection
from paramiko import AuthenticationException, BadHostKeyException, RejectPolicy, SSHException
from paramiko.ssh_exception import NoValidConnectionsError

from mpitrain.launch.hostfile import Host

LOGIN_SECONDS = 8.0
_PYTHON = "/usr/bin/python3"
_MODULES = ("children", "machine", "system", "account", "share", "links", "jobs", "gpu", "rates")
_NODE = "mpitrain.diagnostics.cluster.node"

# What goes wrong is said by us; Paramiko's threads would print tracebacks of it.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

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


class LoginError(Exception):
    """A login failed. `kind`: the check that it belongs to; `found`: what was seen."""

    def __init__(self, kind: str, found: str) -> None:
        super().__init__(found)
        self.kind = kind
        self.found = found


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
        try:
            transport = self._connection.transport
            assert transport is not None
            self.login_seconds = time.monotonic() - started
            self._channel = transport.open_session(timeout=LOGIN_SECONDS)
            life = _bundle()["seconds"]
            self._channel.exec_command(f"exec timeout -k 2 {life + 5} {shlex.join([_PYTHON, '-I', '-u', '-c', _BOOT])}")
            self._channel.sendall(json.dumps(_bundle()).encode() + b"\n")
            self._lines = self._channel.makefile("rb")
            self.noise, self.hello = self._wait_for_hello()
        except BaseException as error:
            self._connection.close()
            if isinstance(error, (SSHException, OSError, EOFError)):
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

    def _wait_for_hello(self) -> tuple[str, dict[str, Any]]:
        self._channel.settimeout(LOGIN_SECONDS)
        noise = b""
        while True:
            try:
                line: bytes = self._lines.readline()
            except TimeoutError:
                raise LoginError(
                    "agent", f"{_PYTHON} did not start within {LOGIN_SECONDS:g} s{_after(noise)}"
                ) from None
            if line.startswith(b'{"hello"'):
                self._channel.settimeout(None)
                # Tools of the system may write to stderr at each login; that is noise too, but hurts nobody.
                return noise.decode(errors="replace"), json.loads(line)
            if line.startswith(b'{"old"'):
                raise LoginError("agent", f"{_PYTHON} is version {json.loads(line)['old']}; 3.8 or newer is needed")
            if not line:
                words = self._channel.makefile_stderr("rb").read().decode(errors="replace").strip()
                said = words.splitlines()[-1] if words else f"ended with code {self._channel.recv_exit_status()}"
                raise LoginError("agent", f"{said}{_after(noise)}")
            noise += line[: 1 << 12]
            if len(noise) > 1 << 16:
                raise LoginError("agent", f"something else than our probe answers{_after(noise)}")

    def _read(self) -> None:
        why = "the connection was closed by the node"
        try:
            for line in self._lines:
                answer = json.loads(line)
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
        raise UnansweredError(f"no answer within {seconds:.0f} s") from None


def _after(noise: bytes) -> str:
    return f"; it printed {noise[:80].decode(errors='replace')!r}" if noise else ""


def _connect(host: Host) -> Connection:
    settings = _ssh_settings(host)
    connection = Connection(
        settings["hostname"][0],
        user=settings["user"][0],
        port=int(settings["port"][0]),
        connect_timeout=LOGIN_SECONDS,
        gateway=_gateway(settings),
        connect_kwargs={
            "key_filename": [path for path in settings.get("identityfile", []) if Path(path).expanduser().is_file()],
            "look_for_keys": False,
            "allow_agent": "yes" not in settings.get("identitiesonly", []),
            "banner_timeout": LOGIN_SECONDS,
            "auth_timeout": LOGIN_SECONDS,
        },
    )
    client = connection.client
    assert client is not None
    for setting in ("globalknownhostsfile", "userknownhostsfile"):
        for path in settings.get(setting, []):
            with suppress(OSError):
                client.load_system_host_keys(str(Path(path).expanduser()))
    client.set_missing_host_key_policy(RejectPolicy())  # Fabric itself would take any
    try:
        connection.open()
    except BaseException as error:
        connection.close()
        raise _why(error, settings) from None
    return connection


def _why(error: BaseException, settings: Mapping[str, list[str]]) -> BaseException:
    """What failed, as a LoginError; other errors as they are."""
    if isinstance(error, BadHostKeyException):
        got, known = (key.fingerprint for key in (error.key, error.expected_key))
        return LoginError("host key", f"its host key is {got} ({error.key.get_name()}); known is {known}")
    if isinstance(error, AuthenticationException):
        offered = ", ".join(settings.get("identityfile", [])) or "keys of ssh-agent"
        return LoginError("key", f"it refuses {settings['user'][0]} with {offered}")
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


def _ssh_settings(host: Host) -> dict[str, list[str]]:
    """How ssh itself would log in, from its own configuration and the inventory: name -> values."""
    command = ["ssh", "-G"]
    for option, value in (
        ("-l", host.variables.get("ansible_user")),
        ("-p", host.variables.get("ansible_port")),
        ("-i", host.variables.get("ansible_ssh_private_key_file")),
    ):
        command += [option, value] if value else []
    for name in ("ansible_ssh_common_args", "ansible_ssh_extra_args"):
        command += shlex.split(host.variables.get(name, ""))
    command.append(host.address)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True)
    except FileNotFoundError:
        raise LoginError("login", "there is no ssh on this machine: apt-get install openssh-client") from None
    except subprocess.TimeoutExpired:
        raise LoginError("login", f"{shlex.join(command)} did not end") from None
    except subprocess.CalledProcessError as error:
        raise LoginError("login", f"{shlex.join(command)} failed: {error.stderr}") from None
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name, []).extend(shlex.split(value) if name.endswith("knownhostsfile") else [value])
    return found


def _gateway(settings: Mapping[str, list[str]]) -> str | None:
    """The command that brings us to a host behind another one, where ssh has one set."""
    where = f"{settings['hostname'][0]}:{settings['port'][0]}"
    if "proxyjump" in settings and settings["proxyjump"] != ["none"]:
        return f"ssh -o BatchMode=yes -W {where} {settings['proxyjump'][0]}"
    command = settings.get("proxycommand", ["none"])[0]
    return None if command == "none" else command.replace("%h", settings["hostname"][0]).replace("%p", where[-2:])


def _bundle() -> dict[str, Any]:
    """What is sent to a node: our modules as text. The agent ends itself after `seconds` whatever happens."""
    source = files(_NODE)
    texts = {name: (source / f"{name}.py").read_text() for name in (*_MODULES, "agent")}
    named = [(f"{_NODE}.{name}", text) for name, text in texts.items()]
    return {"boot": _BOOT, "package": _NODE, "seconds": 600, "modules": named[:-1], "agent": named[-1]}
