"""Ends and removes what is left of a job on a host whose guard was killed: what that guard would have done.

Sent to the host as text, as the guard was (guard.py); one message comes back, as a guard's last one:

    {"ended": [[pid, command line]...], "immortal": [...], "lost": false}
"""

from __future__ import annotations

from typing import Any

from mpitrain.launch.guard import send
from mpitrain.launch.marked import Marked, remove
from mpitrain.launch.shared_files import SharedFiles


def main(wish: dict[str, Any], _probe: str) -> None:
    """The wish has `token` and `roll_call` of the guard, and since when it knew of which `files` of the job."""
    job = Marked(wish["token"])
    shared_files = SharedFiles(wish["since"], {(path, inode) for path, inode in wish["files"]})
    shared_files.look(job.find)
    ended, immortal = job.end(wish["linger_seconds"])
    shared_files.remove()
    remove(wish["roll_call"])
    send({"ended": ended, "immortal": immortal, "lost": False})
