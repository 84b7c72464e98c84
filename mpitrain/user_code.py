"""Who owns a line of a traceback or stack: the user, Python, an installed package, or mpitrain."""

from __future__ import annotations

import os
import re

_FOREIGN = re.compile(r"/(site-packages|dist-packages|lib/python3[^/]*|lib64/python3[^/]*)/|^<")
_OWN = f"{os.path.dirname(__file__)}/"  # noqa: PTH120 (pathlib costs the import some ms)


def is_of_user(path: str) -> bool:
    """True for a file of the user; False for a file of Python, of an installed package or of mpitrain, and for code
    without a file."""
    return not (_FOREIGN.search(path) or path.startswith(_OWN))
