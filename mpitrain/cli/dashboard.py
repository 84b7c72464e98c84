"""`mpitrain dashboard`: the runs of this user in a browser."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from mpitrain.errors import ConfigError

HELP = "show the runs that go on, and those that have ended, in a browser"

_EPILOG = """\
dashboard looks for records of runs (mpitrain.JsonLines) in the folders and
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
    add("--port", type=int, default=8600, help="port to listen on (8600); 0 takes a free one")
    add("--tls-certificate", type=Path, metavar="FILE", help="certificate for TLS, with its chain")
    add("--tls-key", type=Path, metavar="FILE", help="key of the certificate")
    add("--reindex", action="store_true", help="make the index anew from the records")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Return the exit code."""
    for folder in arguments.folders:
        if _is_missing(folder):
            raise ConfigError(f"there is no folder {folder}; name the folders that mpitrain.JsonLines was given")
    if (arguments.tls_certificate is None) != (arguments.tls_key is None):
        raise ConfigError("--tls-certificate and --tls-key belong together; give both or none")
    if arguments.inventory is not None:
        from mpitrain.launch.hostfile import read_inventory

        read_inventory(arguments.inventory)  # a wrong one is refused before anything is served
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}; allowed are 0 to 65535")
    try:
        from mpitrain.dashboard.server import serve
    except ImportError as error:
        raise ConfigError(
            f"the dashboard needs Starlette and uvicorn ({error}); pip install 'mpitrain[dashboard]'"
        ) from None
    tls = (arguments.tls_certificate, arguments.tls_key) if arguments.tls_certificate else None
    folders = arguments.folders or [_FOLDER]
    return serve(folders, arguments.host, arguments.port, tls, arguments.inventory, anew=arguments.reindex)


def _is_missing(folder: Path) -> bool:
    """Return whether there is no such folder. The pages name one that does not answer, because its share is lost."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(folder.is_dir()), daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return answers == [False]
