"""`mpitrain dashboard`: the runs of this user in a browser."""

from __future__ import annotations

import argparse
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.extras import missing

HELP = "show running and finished jobs in a browser"
PAGE = "how-to/monitor.md"

_EPILOG = """\
dashboard looks for records of runs (mpitrain.writers.JsonLines) in the folders and
below them, and for jobs of this user on this machine. It prints two links, one
for viewers and one for operators. It needs Starlette and uvicorn: pip install
'mpitrain[dashboard]'.

  mpitrain dashboard
  mpitrain dashboard runs /share/me/runs
"""
_FOLDER = Path("runs")
_ANSWER_SECONDS = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="where records are (runs)")
    add("-i", "--inventory", type=Path, metavar="FILE", help="hosts to show (cluster/hosts, else /etc/mpitrain/hosts)")
    add("--host", default="127.0.0.1", metavar="NAME", help="address to listen on; other than loopback needs TLS")
    add("--port", type=int, default=8600, help="port to listen on (8600); 0: any free port")
    add("--tls-certificate", type=Path, metavar="FILE", help="certificate for TLS, with its chain")
    add("--tls-key", type=Path, metavar="FILE", help="key of the certificate")
    add("--reindex", action="store_true", help="rebuild the index from the records")
    add("--new-links", action="store_true", help="make new links; earlier ones become invalid")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Return the exit code."""
    for folder in arguments.folders:
        if _answer(partial(_is_folder, folder)) is False:
            raise ConfigError(
                f"there is no folder {folder}; name the folders that mpitrain.writers.JsonLines was given"
            )
    if (arguments.tls_certificate is None) != (arguments.tls_key is None):
        raise ConfigError("--tls-certificate and --tls-key belong together; give both or none")
    if arguments.inventory is not None:
        from mpitrain.launch.hostfile import read_inventory

        if _answer(lambda: read_inventory(arguments.inventory)) is None:  # a wrong one is refused first
            raise ConfigError(
                f"the inventory {arguments.inventory} has not answered for {_ANSWER_SECONDS:g} s: is it a "
                "pipe, or is its network file system lost? Give -i a file that can be read"
            )
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}; allowed are 0 to 65535")
    try:
        from mpitrain.dashboard.server import serve
    except ImportError as error:
        raise missing("the dashboard", "Starlette and uvicorn", "dashboard", error) from None
    tls = (arguments.tls_certificate, arguments.tls_key) if arguments.tls_certificate else None
    folders = arguments.folders or [_FOLDER]
    return serve(
        folders,
        arguments.host,
        arguments.port,
        tls,
        arguments.inventory,
        anew=arguments.reindex,
        new_links=arguments.new_links,
    )


def _is_folder(folder: Path) -> bool:
    try:
        return stat.S_ISDIR(folder.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be read: {error.strerror}; name folders that you can read"
        ) from None


def _answer(call: Callable[[], Any]) -> Any:
    """Return what `call` returns, or raise what it raises; None: it has not answered, for example because a network
    file system is lost."""
    answers: list[Any] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(call())
        except Exception as error:  # the waiting caller gets it
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    if errors:
        raise errors[0]
    return answers[0] if answers else None
