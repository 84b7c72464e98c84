"""The way to a node: one login by Fabric, which checks host keys and asks no questions."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fabric import Connection
from paramiko import AuthenticationException, BadHostKeyException, Channel, RejectPolicy, SSHException, Transport
from paramiko.ssh_exception import NoValidConnectionsError

from mpitrain.diagnostics.agent import AgentClient
from mpitrain.diagnostics.bundle import BOOT, LIFE_SECONDS, in_a_word
from mpitrain.diagnostics.identities import Identities
from mpitrain.diagnostics.ssh_settings import LoginError, gateway, ssh_settings
from mpitrain.launch.hostfile import Host

LOGIN_SECONDS = 8.0
_PYTHON = "/usr/bin/python3"

# mpitrain reports failures itself; Paramiko's threads would print tracebacks.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


def log_in(host: Host) -> AgentClient:
    """Log in to a node and start its agent.

    Raises:
        LoginError: the login or the start failed.
    """
    started = time.monotonic()
    connection = _connect(host)
    seconds = time.monotonic() - started
    return AgentClient(host, _OverSSH(connection), seconds)


class _OverSSH:
    """An `AgentConnection` over ssh."""

    python = _PYTHON

    def __init__(self, connection: Connection) -> None:
        """`connection` is open."""
        self._connection = connection
        transport = connection.transport
        assert transport is not None
        self._transport: Transport = transport
        self._channel: Channel | None = None
        self.host_key: str = transport.get_remote_server_key().fingerprint

    def open(self) -> None:
        program = shlex.join([_PYTHON, "-I", "-u", "-c", in_a_word(BOOT)])
        with _os_errors():
            self._channel = self._transport.open_session(timeout=LOGIN_SECONDS)
            self._channel.exec_command(f"exec timeout -k 2 {LIFE_SECONDS} {program}")
            self._lines = self._channel.makefile("rb")

    def send(self, data: bytes) -> None:
        assert self._channel is not None
        with _os_errors():
            self._channel.sendall(data)

    def readline(self, most: int) -> bytes:
        with _os_errors():
            line: bytes = self._lines.readline(most)
            return line

    def last_words(self) -> str:
        assert self._channel is not None
        words = self._channel.makefile_stderr("rb").read().decode(errors="replace").strip()
        code = self._channel.exit_status if self._channel.status_event.wait(1.0) else "unknown"
        return str(words.splitlines()[-1]) if words else f"ended with code {code}"

    def cut(self) -> None:
        self._transport.close()

    def close(self) -> None:
        with suppress(SSHException, OSError, EOFError):
            if self._channel is not None:
                self._channel.close()
            self._connection.close()


@contextmanager
def _os_errors() -> Iterator[None]:
    """Turn the exceptions of Paramiko into those of `AgentConnection`."""
    try:
        yield
    except (SSHException, EOFError) as error:
        raise ConnectionError(str(error) or type(error).__name__) from None


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
    """Return the existing files of ssh's settings; ssh ignores missing ones too."""
    return [path for path in (Path(name).expanduser() for name in paths) if os.path.isfile(path)]  # noqa: PTH113


def _why(error: BaseException) -> BaseException:
    """Return the failure as a LoginError; other errors stay as they are."""
    if isinstance(error, BadHostKeyException):
        got, known = (key.fingerprint for key in (error.key, error.expected_key))
        reason = f"its host key is {got} ({error.key.get_name()}); known is {known}"
        return LoginError("host key", reason, {"got": got, "known": known})
    if isinstance(error, AuthenticationException) and "imeout" in str(error):
        return LoginError("login", f"it does not say within {LOGIN_SECONDS:g} s whether it accepts the key")
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
        return LoginError("login", f"it accepts connections, but its sshd says nothing within {LOGIN_SECONDS:g} s")
    if isinstance(error, SSHException | EOFError | OSError):
        return LoginError("login", f"{error or type(error).__name__}")
    return error
