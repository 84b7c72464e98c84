"""In which state a run is, in a word and a sentence. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.training.run_document import DONE, LEFT, RunDocument

# The states that the page shows, besides those of a live job: starts, trains, restarts, ends.
TRAINS, DONE_STATE, FAILED, LOST, STALLED, UNKNOWN = "trains", "done", "failed", "lost", "stalled", "unknown"
PAUSED = "paused"
# A run that may be on another host counts as one that goes on while its record is so young.
_YOUNG_SECONDS = 60.0
_STALL_SECONDS = 10.0  # of a wait in which nothing moves, as of the report on stderr
_TROUBLE = ("stopped", "lost", "failed", "unknown")


def state_of(
    document: RunDocument | None, live: Mapping[str, Any] | None, *, is_alive: bool, age_seconds: float
) -> tuple[str, str]:
    """Return the state of a run, and why.

    Args:
        document: what the record says of the run.
        live: the last look at its job; None: no launcher here has it.
        is_alive: the process of rank 0 is alive on this host.
        age_seconds: since the record was last written.
    """
    if live is not None:
        return _of_job(live)
    age = f"the last row is {_ago(age_seconds)} old"
    if document is None:
        return (TRAINS, age) if age_seconds < _YOUNG_SECONDS else (UNKNOWN, f"the record has no run.json; {age}")
    if document.end == DONE:
        return DONE_STATE, "all steps were made"
    if document.end == LEFT:
        return LOST, "another try was to go on with it, and has not"
    if document.end:
        return FAILED, document.end
    host = document.process.partition(" ")[0]
    if is_alive:
        return TRAINS, f"rank 0 is alive on {host}; no launcher shows more"
    if age_seconds < _YOUNG_SECONDS:
        return TRAINS, age
    return LOST, f"rank 0 on {host} has ended without a word, or is not to be seen from here; {age}"


def _of_job(live: Mapping[str, Any]) -> tuple[str, str]:
    state = str(live.get("state", UNKNOWN))
    ended = live.get("ended")
    if isinstance(ended, Mapping):
        return (FAILED if ended.get("code") != 0 else DONE_STATE), str(ended.get("text", ""))
    ranks = [entry for entry in live.get("ranks", ()) if isinstance(entry, Mapping)]
    trouble = [f"rank {entry.get('rank')} {entry.get('phase')}" for entry in ranks if entry.get("phase") in _TROUBLE]
    still = max((entry.get("still", 0.0) for entry in ranks), default=0.0)
    if state == TRAINS and trouble:
        return STALLED, "; ".join(trouble[:5])
    if state == TRAINS and live.get("stall") and still >= _STALL_SECONDS:
        return STALLED, str(live["stall"])
    if state != "ends" and live.get("paused"):
        return PAUSED, str(live["paused"]).removeprefix("paused ")
    return state, ""


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} days"
