"""Who may connect to a server, and who can read what is sent.

Keys: a process with the workers' key may join; messages of all other processes are dropped. The keys are those of CURVE
(Curve25519, https://rfc.zeromq.org/spec/26/): both sides prove who they are before anything else is read, and all bytes
are encrypted. All workers of a job have the same key.

Tokens: the servers of a run have a common secret. A worker gets a token with each work unit, and shows it to further
servers with each pull and push. So it cannot make a server keep gradients of units that it never got. Where servers are
processes of `mpitrain serve`, they have another secret from their keys, and a further server shows the first one a
token of that. So a worker, which has only its own key, cannot pose as a server.

Connections without encryption are allowed only where no one else can read them: on this machine, or in a tunnel.
Encryption takes time, which counts on networks of 10 Gbit/s. A tunnel encrypts in the kernel, or with several cores.
A worker still has to prove that it has the key, by a password that follows from it.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain import own_addresses
from mpitrain.errors import ConfigError
from mpitrain.reading import read_file
from mpitrain.server.wire import number_in, the_zmq
from mpitrain.state_files import state_folder

_KEY_BYTES, _CHECK_BYTES = 32, 2


@dataclass(frozen=True)
class WorkerKey:
    """What a worker needs to join: the server's public key, and the secret key of the job's workers, 32 bytes each."""

    server_public: bytes
    worker_secret: bytes

    @property
    def text(self) -> str:
        """The key as 88 letters, digits, "-" and "_", which need no quoting in a shell. It is a secret."""
        both = self.server_public + self.worker_secret
        return base64.urlsafe_b64encode(both + _check(both)).decode()

    @property
    def worker_public(self) -> bytes:
        """The public key that all workers of the job have, of 32 bytes."""
        return _public(self.worker_secret)

    @property
    def password(self) -> bytes:
        """A text that proves this key on a connection without encryption. The key cannot be derived from it."""
        return hmac.new(self.server_public + self.worker_secret, b"mpitrain plain", "sha256").hexdigest().encode()


@dataclass(frozen=True)
class ServerKeys:
    """The keys of a server: its own secret key, of 32 bytes, and the workers' key. Further servers have the same."""

    server_secret: bytes
    worker: WorkerKey

    @property
    def among_servers(self) -> str:
        """A secret that no worker has, by which further servers prove that they are servers by a token."""
        return hmac.new(self.server_secret, b"mpitrain servers", "sha256").hexdigest()


def make_keys() -> ServerKeys:
    """Return new keys.

    Raises:
        ConfigError: the library for the connections is not installed.
    """
    server_public, server_secret = _pair()
    _, worker_secret = _pair()
    return ServerKeys(server_secret, WorkerKey(server_public, worker_secret))


def parse_key(text: str, source: str) -> WorkerKey:
    """Return the key that `WorkerKey.text` was.

    Args:
        source: the origin of the text, for the error.

    Raises:
        ConfigError: the text is not a key.
    """
    text = text.strip()
    try:
        both = base64.b64decode(text.encode(), b"-_", validate=True)
    except ValueError:
        both = b""
    keys, check = both[: 2 * _KEY_BYTES], both[2 * _KEY_BYTES :]
    if len(keys) != 2 * _KEY_BYTES or not hmac.compare_digest(check, _check(keys)):
        raise ConfigError(
            f"{source} is not a key: it has {len(text)} characters, and a key has 88 with a checksum; copy the "
            "whole line "
            "that `mpitrain serve` prints"
        )
    return WorkerKey(keys[:_KEY_BYTES], keys[_KEY_BYTES:])


def key_file(port: int) -> Path:
    """Return the file with the keys of the user's server at this port. Machines with a common home folder share it."""
    return state_folder() / f"serve-{port}.key"


def keys_of(path: Path) -> ServerKeys:
    """Return the keys in a file. A missing file is created, readable by this user only.

    So a restarted server has the keys that its workers know.

    Raises:
        ConfigError: the file cannot be read or made, is no key file, or others may read it.
    """
    if not path.exists():
        _write(path, make_keys())
    return read_keys(path)


def read_keys(path: Path) -> ServerKeys:
    """Return the keys in a file that `keys_of` has made.

    Raises:
        ConfigError: as for `keys_of`, or there is no such file.
    """
    try:
        about = path.stat()
    except OSError as error:
        raise ConfigError(f"the keys of the server cannot be read: {error}") from None
    text = read_file(path, ConfigError, most_bytes=1000, called=f"the keys of the server: {path}")
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ConfigError(
            f"{path} holds secret keys, and belongs to user {about.st_uid} with mode {stat.S_IMODE(about.st_mode):o}; "
            f"it must be yours, with mode 600. Remove it, and new keys are made: rm {path}"
        )
    try:
        secret, worker = text.decode().split()
        keys = ServerKeys(bytes.fromhex(secret), parse_key(worker, str(path)))
        fits = len(keys.server_secret) == _KEY_BYTES and _public(keys.server_secret) == keys.worker.server_public
    except ValueError:  # a ConfigError is one
        fits = False
    if not fits:
        raise ConfigError(f"{path} is not a file with a server's keys; remove it, and new keys are made: rm {path}")
    return keys


def _write(path: Path, keys: ServerKeys) -> None:
    """Write the file atomically. If another process has created it in the meantime, that file stays."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # with mode 600
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{keys.server_secret.hex()}\n{keys.worker.text}\n")
            os.link(name, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(name)  # noqa: PTH108
    except OSError as error:
        raise ConfigError(
            f"the keys of the server cannot be kept in {path}: {error}; set XDG_STATE_HOME to a folder of yours"
        ) from None


def _check(keys: bytes) -> bytes:
    return hashlib.sha256(keys).digest()[:_CHECK_BYTES]


def _pair() -> tuple[bytes, bytes]:
    """Return a new public key and its secret key."""
    zmq = the_zmq()
    public, secret = zmq.curve_keypair()
    return _raw(public), _raw(secret)


def _public(secret: bytes) -> bytes:
    from zmq.utils import z85

    zmq = the_zmq()
    return _raw(zmq.curve_public(z85.encode(secret)))


def _raw(key: bytes) -> bytes:
    from zmq.utils import z85

    raw: bytes = z85.decode(key)
    return raw


def make_secret() -> str:
    """Return a secret for the servers of one run."""
    return secrets.token_hex(32)


def token_of(secret: str, ticket: str, number: int) -> str:
    """Return the token for a unit (its number) of a worker (its ticket)."""
    return hmac.digest(secret.encode(), f"{ticket} {number}".encode(), "sha256").hex()


def server_token(secret: str, number: Any) -> str:
    """Return the token of a further server with this number, for a secret of ServerKeys.among_servers."""
    return token_of(secret, "server", number)


def has_token(secret: str, fields: Mapping[str, Any]) -> bool:
    """Whether a message has the token of the unit that it names. Its content is not trusted."""
    ticket, number, shown = fields.get("ticket"), number_in(fields, "number"), fields.get("token")
    if not isinstance(ticket, str) or not isinstance(shown, str):
        return False
    return hmac.compare_digest(shown.encode(), token_of(secret, ticket, number).encode())


LOOPBACK = "lo"
_INTERFACES = Path("/sys/class/net")
# ARPHRD_NONE of if_arp.h: WireGuard, and tun as VPNs have it. A tunnel that does not encrypt (GRE, IPIP, SIT) has
# another type, and so has every card.
_TUNNEL = 65534
_ALLOWED = (
    f"allowed are {LOOPBACK}, for an ssh tunnel that ends on this machine, and an interface of WireGuard or a tun"
)


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface whose connections no one else can read.

    Raises:
        ConfigError: it is another kind of interface, there is none of this name, or it has no address.
    """
    if interface == LOOPBACK:
        return "127.0.0.1"
    _check_tunnel(interface)
    try:
        return own_addresses.address(interface)
    except OSError as error:
        why = "it has no IPv4 address" if error.errno == errno.EADDRNOTAVAIL else error.strerror
        raise ConfigError(f"--plain {interface}: {why}; see `ip address show dev {interface}`") from None


def check_way(host: str) -> None:
    """Refuse a server if any of its addresses is reached over a network that others can read.

    Raises:
        ConfigError: the route to an address of `host` uses such a network; or there is no route, or no address.
    """
    try:
        answers = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(f"--plain: there is no route to {host}: {error.strerror}; is the name right?") from None
    for answer in answers:
        if not way_to(ip := str(answer[4][0])):
            raise ConfigError(f"--plain: there is no route to {host} ({ip}); see `ip route get {ip}`")


def way_to(ip: str) -> str:
    """Return the interface by which this machine reaches an address; "" if there is no route now.

    Raises:
        ConfigError: others can read what goes over this interface.
    """
    try:
        (answer,) = socket.getaddrinfo(ip, 1, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        with socket.socket(answer[0], socket.SOCK_DGRAM) as way:
            way.connect(answer[4])
            own = str(way.getsockname()[0])
    except OSError:
        return ""
    if ipaddress.ip_address(own).is_loopback:
        return LOOPBACK
    interface = next((path.name for path in sorted(_INTERFACES.iterdir()) if _has(path.name, own)), "")
    # A server at a tunnel's own address is confined to the tunnel, and a socket that is confined to lo cannot reach it.
    if own == ip and not (interface and _is_tunnel(interface)):
        return LOOPBACK
    if not interface:
        raise ConfigError(f"--plain: the interface to {ip}, with the address {own}, is not known; {_ALLOWED}")
    _check_tunnel(interface)
    return interface


def _check_tunnel(interface: str) -> None:
    known = sorted(path.name for path in _INTERFACES.iterdir())
    if interface not in known:
        raise ConfigError(f"--plain {interface}: there is no such interface; there are {', '.join(known)}; {_ALLOWED}")
    if not _is_tunnel(interface):
        raise ConfigError(
            f"--plain: {interface} is not a tunnel, so others could read and change what is sent; {_ALLOWED}. "
            "Leave out "
            "--plain, and all bytes are encrypted"
        )


def _is_tunnel(interface: str) -> bool:
    return int((_INTERFACES / interface / "type").read_text()) == _TUNNEL


def _has(interface: str, address: str) -> bool:
    try:
        return own_addresses.address(interface) == address
    except OSError:
        return False
