"""Passes: what shows a further server that the first one has given a job to a worker, and who is a server at all.

The first server and the others have a common secret. A worker gets the pass of its job with the job, and shows it with
each pull and push. So it cannot have a server keep gradients of jobs that it never got.

Where servers are processes of `mpitrain serve`, they have another secret from their keys. A further server shows the
first one a pass of that. So a worker, which has only its own key, cannot be taken for a server.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from typing import Any


def make_secret() -> str:
    """Return a secret for the servers of one run."""
    return secrets.token_hex(32)


def pass_of(secret: str, ticket: str, number: int) -> str:
    """Return the pass for a job (its number) of a worker (its ticket)."""
    return hmac.digest(secret.encode(), f"{ticket} {number}".encode(), "sha256").hex()


def server_pass(secret: str, number: Any) -> str:
    """Return the pass of a further server with this number, for a secret of ServerKeys.among_servers."""
    return pass_of(secret, "server", number)


def is_valid(secret: str, fields: Mapping[str, Any]) -> bool:
    """Whether a message shows the pass of the job that it names. Nothing in it is trusted."""
    ticket, number, shown = fields.get("ticket"), fields.get("number"), fields.get("pass")
    if not isinstance(ticket, str) or type(number) is not int or not isinstance(shown, str):
        return False
    return hmac.compare_digest(shown.encode(), pass_of(secret, ticket, number).encode())
