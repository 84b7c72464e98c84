"""The error where a library of an extra of mpitrain (`pip install 'mpitrain[EXTRA]'`) is missing."""

from __future__ import annotations

import sys

from mpitrain.errors import ConfigError, MissingLibraryError


def missing(user: str, library: str, extra: str, error: ImportError) -> ConfigError:
    """Return the error to raise: `user` needs `library`, which `extra` installs into the environment of this Python."""
    return MissingLibraryError(f"{user} needs {library} ({error}); {sys.executable} -m pip install 'mpitrain[{extra}]'")
