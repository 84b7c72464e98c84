"""What a rank does, in one word, for those who watch a job. A pure function.

starts     it has not come out of init() yet           busy      it does what the others wait for, such as a checkpoint
computes   the script works, or waits for < 0.1 s      done      its program has finished
waits      it waits for other ranks; nothing moves     failed    an error ends it, and the job with it
wire       it waits, and data arrives or leaves        ended     its process has ended
disk       its process is stuck in the kernel          stopped   its process is stopped, by SIGSTOP or a debugger

A rank publishes a wait after 0.1 s (activity.py). So what is shorter counts as `computes`.
"""

from __future__ import annotations

from mpitrain.watching.rank_record import BUSY, CALLED, ENDED, FAILED, STARTED, WAITS
from mpitrain.watching.view import RankView

# Data has moved in a wait of which nothing has moved for less than the first, and which began by the second before.
_STILL_SECONDS, _MOVED_SECONDS = 1.0, 0.05


# In these, `doing_seconds` of a view is about something else. Only who looks sees when they began.
SEEN_ONLY = ("starts", "stopped", "disk", "lost", "unknown")


def doing(view: RankView) -> str:
    """Return one of the words above. Only a view with the state of the process tells `disk` and `stopped`."""
    record = view.record
    if view.ended_seconds is not None or view.state in ("gone", "Z", "X"):
        return "ended"
    if record.phase == FAILED:
        return "failed"
    if view.state in ("T", "t"):
        return "stopped"
    if view.state == "D":
        return "disk"
    if record.phase in (STARTED, CALLED):
        return "starts"
    if record.status == WAITS:
        has_moved = view.seconds < _STILL_SECONDS and view.doing_seconds - view.seconds > _MOVED_SECONDS
        return "wire" if has_moved else "waits"
    return {BUSY: "busy", ENDED: "done"}.get(record.status, "computes")
