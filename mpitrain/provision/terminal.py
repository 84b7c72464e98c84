"""Questions to a user. There may be no terminal, and so no user."""

from __future__ import annotations

import sys

from mpitrain.errors import ClusterError


def is_there() -> bool:
    """True if there is a terminal at which a user can answer questions."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask(question: str) -> str:
    """Ask a question, and return the answer without spaces around it.

    Raises:
        ClusterError: the input has ended (Ctrl-D), or the user pressed Ctrl-C.
    """
    try:
        return input(question).strip()
    except (EOFError, KeyboardInterrupt):
        print()
        raise ClusterError("stopped at a question; nothing further is changed") from None


def confirm(question: str) -> bool:
    """Ask a question, and return whether the answer is yes."""
    while True:
        answer = ask(f"{question} [yes/no] ").lower()
        if answer in ("y", "yes"):
            return True
        if answer in ("n", "no"):
            return False
        print("Please answer yes or no.")
