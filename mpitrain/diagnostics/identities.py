"""The keys that a login offers, in the order of ssh: the keys in ssh-agent, then those in files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paramiko import Agent, AuthenticationException, PKey, SSHException, Transport

_SECONDS = 5.0


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
                done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
            except (OSError, subprocess.TimeoutExpired):
                return ""
            words = done.stdout.split()
            if len(words) > 1:
                return words[1]
    return ""
