"""Checkpoints: the state of a training on disk, by name, complete or absent.

names: nested state to flat names and back. manifest: the contents of a checkpoint, with checksums. store: one directory
of checkpoints. writer: a copy of the state, and the thread that writes it. resume: the choice of the checkpoint to
resume from. parts: what belongs to a single rank.
"""

from mpitrain.training.checkpoint.store import latest, load, save

__all__ = ["latest", "load", "save"]
