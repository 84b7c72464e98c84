"""Ends and removes what is left of a job on a host whose guard was killed, in place of that guard.

Sent to the host as text, like the guard (guard.py). One message comes back, like a guard's last one:

    {"ended": [[pid, command line]...], "immortal": [...], "lost": false}
"""

from __future__ import annotations

from typing import Any

from mpitrain.launch.guard import send
from mpitrain.launch.marked import Marked, remove
from mpitrain.launch.shared_files import SharedFiles, remove_of_ranks


def main(wish: dict[str, Any], _probe: str) -> None:
    """`wish` has the guard's `token` and `roll_call`, and of the job the `files` that it knew and the start `since`."""
    job = Marked(wish["token"])
    shared_files = SharedFiles(wish["since"], {(path, inode) for path, inode in wish["files"]})
    shared_files.look(job.find, job.find())
    ended, immortal = job.end(wish["linger_seconds"])
    shared_files.remove()
    remove_of_ranks(wish["token"])
    remove(wish["roll_call"])
    send({"ended": ended, "immortal": immortal, "lost": False})
