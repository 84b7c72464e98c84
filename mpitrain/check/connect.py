"""The connection to a node: one login by Fabric, with the keys that ssh would offer. It checks host keys and never
asks."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fabric import Connection
from paramiko import (
    Agent,
    AuthenticationException,
    BadHostKeyException,
    Channel,
    PKey,
    RejectPolicy,
    SSHException,
    Transport,
)
from paramiko.ssh_exception import NoValidConnectionsError

from mpitrain.check.agent import BOOT, LIFE_SECONDS, AgentClient, in_a_word
from mpitrain.check.target import LoginError, ssh_settings
from mpitrain.launch.hostfile import Host

LOGIN_SECONDS = 8.0
_PYTHON = "/usr/bin/python3"

# mpitrain reports failures itself; Paramiko's threads would print tracebacks.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
_KEYGEN_SECONDS = 5.0


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
    client.set_missing_host_key_policy(RejectPolicy())  # Fabric itself would accept any
    try:
        connection.open()
    except BaseException as error:
        connection.close()
        raise _why(error) from None
    return connection


def gateway(settings: Mapping[str, list[str]]) -> str | None:
    """The command by which ssh reaches a host behind another one, if one is set."""
    name, port = settings["hostname"][0], settings["port"][0]
    jumps = settings.get("proxyjump", ["none"])[0]
    if jumps != "none":
        *first, last = jumps.split(",")
        through = f"-J {shlex.quote(','.join(first))} " if first else ""
        last = last if last.startswith("ssh://") else f"ssh://{last}"
        return f"ssh -o BatchMode=yes {through}-W {shlex.quote(f'[{name}]:{port}')} {shlex.quote(last)}"
    command = settings.get("proxycommand", ["none"])[0]
    return None if command == "none" else command.replace("%h", name).replace("%p", port)


def _existing(paths: Sequence[str]) -> list[Path]:
    """Return the existing files of ssh's settings; ssh ignores missing ones too."""
    return [path for path in (Path(name).expanduser() for name in paths) if os.path.isfile(path)]  # noqa: PTH113


def _why(error: BaseException) -> BaseException:
    """Return the failure as a LoginError; other errors are returned unchanged."""
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


class Identities:
    """The keys of a login; Paramiko's SSHClient takes it as its `auth_strategy`."""

    def __init__(self, user: str, settings: Mapping[str, Sequence[str]]) -> None:
        """`settings` are ssh's own, as of `ssh -G`."""
        self._user = user
        self._paths = [Path(name).expanduser() for name in settings.get("identityfile", [])]
        self._named_only = "yes" in settings.get("identitiesonly", [])
        self._asks_agent = "none" not in settings.get("identityagent", [])
        self._locked: list[str] = []

    def authenticate(self, transport: Transport) -> None:
        """Offer one key after the other.

        Raises:
            AuthenticationException: no key was accepted; the text names those that could not be offered.
        """
        agent = Agent() if self._asks_agent else None
        try:
            for number, key in enumerate(self._keys(agent.get_keys() if agent else ())):
                try:
                    transport.auth_publickey(self._user, key)
                except AuthenticationException as error:
                    if "imeout" in str(error):
                        raise
                    if not transport.is_active():  # as sshd does after MaxAuthTries
                        raise AuthenticationException(self._hung_up(transport, number)) from None
                if transport.is_authenticated():
                    return
        finally:
            if agent:
                agent.close()
        locked = (
            f"; {' and '.join(self._locked)} has a passphrase, and ssh-agent does not hold it" if self._locked else ""
        )
        offered = ", ".join(map(str, self._paths)) or "keys of ssh-agent"
        raise AuthenticationException(f"it refuses {self._user} with {offered}{locked}")

    def _hung_up(self, transport: Transport, number: int) -> str:
        """If an sshd accepts the key but not the account, or after MaxAuthTries keys, it ends the login at once."""
        said = transport.auth_handler.banner if transport.auth_handler else None
        words = f" and says {said.decode(errors='replace').strip()!r}," if said else ","
        return f"it refuses {self._user}{words} and hangs up" + (f" after {number + 1} keys" if number else "")

    def _keys(self, held: Sequence[PKey]) -> Iterator[PKey]:
        named = {path: _fingerprint(path) for path in self._paths}
        chosen = [key for path in self._paths for key in held if key.fingerprint == named[path]]
        yield from chosen
        if not self._named_only:
            yield from (key for key in held if key not in chosen)
        offered = {key.fingerprint for key in held}
        for path in self._paths:
            if named[path] not in offered and os.path.isfile(path):  # noqa: PTH113 (may lie where we may not look)
                try:
                    yield PKey.from_path(path)
                except (SSHException, OSError, TypeError, ValueError) as error:
                    if "password" in str(error).lower():
                        self._locked.append(str(path))


def _fingerprint(path: Path) -> str:
    """Return a key's fingerprint from its public half, readable even if the private half is locked; "" if missing."""
    for place in (f"{path}.pub", str(path)):
        if os.path.isfile(place):  # noqa: PTH113
            try:
                command = ["ssh-keygen", "-l", "-E", "sha256", "-f", place]
                done = subprocess.run(command, capture_output=True, text=True, timeout=_KEYGEN_SECONDS, check=False)
            except (OSError, subprocess.TimeoutExpired):
                return ""
            words = done.stdout.split()
            if len(words) > 1:
                return words[1]
    return ""
