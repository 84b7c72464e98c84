"""Keys of a job with servers: whoever has the worker's key may join, and nobody else is listened to.

The keys are those of CURVE (Curve25519, https://rfc.zeromq.org/spec/26/): both sides prove who they are before anything
else is read, and all bytes are encrypted. All workers of a job have the same key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.serve.sockets import the_zmq
from mpitrain.state_files import state_folder

_KEY_BYTES, _CHECK_BYTES = 32, 2


@dataclass(frozen=True)
class WorkerKey:
    """What a worker needs to join: the server's public key, and the secret key of the job's workers, 32 bytes each."""

    server_public: bytes
    worker_secret: bytes

    @property
    def text(self) -> str:
        """The key as 88 letters, digits, "-" and "_", which a shell leaves alone. It is a secret."""
        both = self.server_public + self.worker_secret
        return base64.urlsafe_b64encode(both + _check(both)).decode()

    @property
    def worker_public(self) -> bytes:
        """The public key that all workers of the job have, of 32 bytes."""
        return _public(self.worker_secret)

    @property
    def password(self) -> bytes:
        """What proves this key on a connection without encryption, as text. The key does not follow from it."""
        return hmac.new(self.server_public + self.worker_secret, b"mpitrain plain", "sha256").hexdigest().encode()


@dataclass(frozen=True)
class ServerKeys:
    """The keys of a server: its own secret key, of 32 bytes, and the workers' key. Further servers have the same."""

    server_secret: bytes
    worker: WorkerKey

    @property
    def among_servers(self) -> str:
        """A secret that no worker has, by which further servers prove that they are servers (serve.passes)."""
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
        source: where the text is from, for the error.

    Raises:
        ConfigError: the text is no key.
    """
    text = text.strip()
    try:
        both = base64.b64decode(text.encode(), b"-_", validate=True)
    except ValueError:
        both = b""
    keys, check = both[: 2 * _KEY_BYTES], both[2 * _KEY_BYTES :]
    if len(keys) != 2 * _KEY_BYTES or not hmac.compare_digest(check, _check(keys)):
        raise ConfigError(
            f"{source} is no key: {len(text)} characters came, and a key has 88 that fit together; copy the whole line "
            "that `mpitrain serve` prints"
        )
    return WorkerKey(keys[:_KEY_BYTES], keys[_KEY_BYTES:])


def key_file(port: int) -> Path:
    """Return where the keys of the user's server at this port are. Machines with a common home folder share them."""
    return state_folder() / f"serve-{port}.key"


def keys_of(path: Path) -> ServerKeys:
    """Return the keys in a file, which is made, for this user's eyes alone, if it is not there.

    So a server that is started again has the keys that its workers know.

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
        with path.open() as file:
            about = os.fstat(file.fileno())
            lines = file.read(1000).split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys of the server cannot be read: {error}") from None
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise ConfigError(
            f"{path} holds secret keys, and belongs to user {about.st_uid} with mode {stat.S_IMODE(about.st_mode):o}; "
            f"it must be yours, with mode 600. Remove it, and new keys are made: rm {path}"
        )
    try:
        secret, text = lines
        keys = ServerKeys(bytes.fromhex(secret), parse_key(text, str(path)))
        fits = len(keys.server_secret) == _KEY_BYTES and _public(keys.server_secret) == keys.worker.server_public
    except ValueError:  # a ConfigError is one
        fits = False
    if not fits:
        raise ConfigError(f"{path} is no file with a server's keys; remove it, and new keys are made: rm {path}")
    return keys


def _write(path: Path, keys: ServerKeys) -> None:
    """Write the file at once and whole. If another process has made it meanwhile, that one stays."""
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
