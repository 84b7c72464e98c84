"""The keys that a login offers: from a real ssh-agent and from real files, in the order of ssh."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paramiko import AuthenticationException, PKey

from mpitrain.check.connect import Identities


class Server:
    """Accepts one key, by its fingerprint, and keeps a list of the offered keys. Hangs up after `patience` keys."""

    def __init__(self, taken: str = "", patience: int = 9) -> None:
        self.taken, self.patience = taken, patience
        self.offered: list[str] = []
        self.auth_handler: SimpleNamespace | None = None

    def auth_publickey(self, user: str, key: PKey) -> None:
        assert user == "ada"
        self.offered.append(key.fingerprint)
        if key.fingerprint != self.taken:
            raise AuthenticationException("Authentication failed.")

    def is_authenticated(self) -> bool:
        return self.offered[-1] == self.taken

    def is_active(self) -> bool:
        return len(self.offered) < self.patience


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Has keys: "held" is locked and in the agent, "other" in the agent alone, "plain" is a file, "locked" one too."""
    path = tmp_path_factory.mktemp("keys")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(path / "agent")], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    agent.stdout.readline()
    try:
        for name in ("held", "other", "plain", "locked"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path / name))
            if name in ("held", "other"):
                _run("env", f"SSH_AUTH_SOCK={path}/agent", "ssh-add", "-q", str(path / name))
            if name in ("held", "locked"):
                _run("ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(path / name))
        (path / "other").unlink()
        yield path
    finally:
        agent.terminate()
        agent.wait()
        agent.stdout.close()


@pytest.fixture
def keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The fingerprints."""
    monkeypatch.setenv("SSH_AUTH_SOCK", str(folder / "agent"))
    return {path.stem: _run("ssh-keygen", "-lf", str(path)).split()[1] for path in folder.glob("*.pub")}


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def offer(server: Server, folder: Path, *names: str, **settings: str) -> str:
    """The login's final message; empty if the login succeeded."""
    given: dict[str, Any] = {"identityfile": [str(folder / name) for name in names]}
    given |= {name: [value] for name, value in settings.items()}
    try:
        Identities("ada", given).authenticate(server)  # type: ignore[arg-type]
    except AuthenticationException as error:
        return str(error)
    return ""


def test_identities_only_are_those_of_the_agent_that_files_name(keys: dict[str, str], folder: Path) -> None:
    server = Server(keys["held"])
    assert offer(server, folder, "plain", "held", identitiesonly="yes") == ""
    assert server.offered == [keys["held"]]
    server = Server()
    assert offer(server, folder, "held", "plain", identitiesonly="yes")
    assert server.offered == [keys["held"], keys["plain"]]


def test_a_key_of_which_only_the_public_half_is_a_file(keys: dict[str, str], folder: Path) -> None:
    server = Server(keys["other"])
    assert offer(server, folder, "other", identitiesonly="yes") == ""
    assert offer(Server(keys["other"]), folder, "other.pub", identitiesonly="yes") == ""


def test_other_keys_of_the_agent_come_before_files(keys: dict[str, str], folder: Path) -> None:
    server = Server()
    assert offer(server, folder, "held", "plain", "missing")
    assert server.offered == [keys["held"], keys["other"], keys["plain"]]


def test_no_agent(keys: dict[str, str], folder: Path) -> None:
    server = Server()
    words = offer(server, folder, "held", "plain", identityagent="none")
    assert server.offered == [keys["plain"]]
    assert words.endswith(f"{folder}/held has a passphrase, and ssh-agent does not hold it")


def test_a_locked_key_that_nobody_holds_is_named(keys: dict[str, str], folder: Path) -> None:
    words = offer(Server(), folder, "locked", identitiesonly="yes")
    assert words.startswith(f"it refuses ada with {folder}/locked; ")
    assert words.endswith("has a passphrase, and ssh-agent does not hold it")


def test_a_server_that_hangs_up(keys: dict[str, str], folder: Path) -> None:
    server = Server(patience=2)
    assert offer(server, folder, "held", "plain") == "it refuses ada, and hangs up after 2 keys"
    assert len(server.offered) == 2


def test_a_server_that_says_why_it_hangs_up(keys: dict[str, str], folder: Path) -> None:
    """With /etc/nologin the key is right, and the server refuses the account."""
    server = Server(patience=1)
    server.auth_handler = SimpleNamespace(banner=b"Back at noon\n")
    assert offer(server, folder, "held") == "it refuses ada and says 'Back at noon', and hangs up"
