"""Runs the dashboard: one process, one socket, until Ctrl-C."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from mpitrain.dashboard.app import Routes
from mpitrain.dashboard.catalogue import Catalogue
from mpitrain.dashboard.cluster import ClusterView
from mpitrain.dashboard.gate import Gate, Tokens
from mpitrain.dashboard.index import RunIndex, index_path
from mpitrain.errors import ConfigError, MpitrainError

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_END_SECONDS = 5  # who waits for an answer gets one before; on a busy machine this takes a while


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(
    roots: Sequence[Path],
    host: str,
    port: int,
    tls: tuple[Path, Path] | None,
    inventory: Path | None,
    *,
    anew: bool,
    new_links: bool = False,
) -> int:
    """Serve until SIGINT or SIGTERM. Return the exit code.

    Args:
        roots: the folders with records.
        host: the address or name to listen on.
        port: 0 takes a free one.
        tls: the files of the certificate and of its key.
        inventory: see ClusterView.
        anew: make the index anew.
        new_links: make new links, so that those of earlier dashboards become invalid.

    Raises:
        ConfigError: `host` is not a loopback address and `tls` is missing; or it is not an address of this machine.
        MpitrainError: the port is in use, a file of `tls` cannot be used, or the index cannot be made, also because
            this user has no home folder.
    """
    if not is_loopback(host) and tls is None:
        raise ConfigError(
            f"{host} can be reached from other machines, so tokens and pages would be readable on the way. Give "
            "--tls-certificate and --tls-key, or leave --host out and open the page through `ssh -L`"
        )
    _give_memory_back()
    is_named = port != 0
    listener = _listener(host, port)
    with listener:
        port = listener.getsockname()[1]
        try:
            index = RunIndex(index_path(), anew=anew)
        except OSError as error:
            raise MpitrainError(f"the index {index_path()} cannot be made: {error}. Set XDG_CACHE_HOME") from None
        try:
            catalogue = Catalogue(index, roots)
            routes = Routes(catalogue, ClusterView(catalogue, inventory))
            # Dashboards at different ports have links of their own. A port that was free by chance has no next time.
            name = f"{socket.gethostname()}-{port}"
            tokens = Tokens.kept(name, anew=new_links) if is_named else Tokens.new()
            return _serve(routes, listener, host, port, tls, tokens)
        finally:
            index.close()


def _serve(
    routes: Routes, listener: socket.socket, host: str, port: int, tls: tuple[Path, Path] | None, tokens: Tokens
) -> int:
    gate = Gate(routes.app(), tokens, _names(host), port, is_secure=tls is not None)
    certificate, key = (str(path) for path in tls) if tls else (None, None)
    try:
        config = uvicorn.Config(
            gate,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=_END_SECONDS,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        config.load()
    except OSError as error:
        raise MpitrainError(f"TLS with {certificate} and {key} is not possible: {error}") from None
    server = _Server(config, routes)
    shown = "127.0.0.1" if is_loopback(host) else socket.gethostname() if _is_any(host) else host
    shown = f"[{shown}]" if ":" in shown else shown
    base = f"{'https' if tls else 'http'}://{shown}:{port}/?token="
    print(f"for viewers:   {base}{tokens.viewer}")
    print(f"for operators: {base}{tokens.operator}")
    print("Keep the links to yourself. Ctrl-C ends the dashboard; jobs continue.", flush=True)
    server.run(sockets=[listener])
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """Ends the streams when the server is to end: uvicorn waits for them."""

    def __init__(self, config: uvicorn.Config, routes: Routes) -> None:
        super().__init__(config)
        self._routes = routes

    def handle_exit(self, sig: int, frame: object) -> None:
        """See uvicorn.Server, which would raise the signal again after its end."""
        self._routes.end()
        self.should_exit = True


def _give_memory_back() -> None:
    """Return large blocks to the system when they are freed: glibc would keep ever larger ones, by thread."""
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):
        set_option(_MMAP_THRESHOLD, 128 << 10)


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{host} is neither an address nor a name: {error}") from None
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise MpitrainError(
                f"port {port} of {host} is in use, perhaps by another dashboard. Open that one, or give another --port "
                "(0 takes a free one)"
            ) from None
        raise ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}") from None


def _is_any(host: str) -> bool:
    return host in ("0.0.0.0", "::")


def _names(host: str) -> set[str]:
    """Return the names and addresses under which a browser may come."""
    if is_loopback(host):
        return {"127.0.0.1", "localhost", "::1"}
    if not _is_any(host):
        return {host}
    names = {socket.gethostname(), socket.getfqdn(), "localhost", "127.0.0.1"}
    try:
        names |= {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError as error:
        print(f"mpitrain dashboard: {socket.gethostname()} has no address: {error}", file=sys.stderr)
    return names
