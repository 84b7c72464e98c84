"""The state of a training, by name, complete or absent: checkpoints on disk, and in-memory checkpoints for the next
attempt.

names: nested state to flat names and back. manifest: the contents of a checkpoint, with checksums. store: one directory
of checkpoints. resume: the choice of the checkpoint to resume from, and the parts of single ranks. memory_slot, copies,
state_copies, keep: in-memory checkpoints; state_copies also handles the takeover by the next attempt.
"""

from mpitrain.state.store import latest, load, save

__all__ = ["latest", "load", "save"]
