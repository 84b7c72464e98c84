"""Checkpoints: the state of a training on disk, by name, whole or not there at all.

names: nested state to flat names and back. manifest: what is in a checkpoint, with checksums. store: one directory of
checkpoints. writer: a copy of the state, and the thread that writes it. resume: which one all ranks go on from.
parts: what belongs to a rank.
"""

from mpitrain.training.checkpoint.store import latest, load, save

__all__ = ["latest", "load", "save"]
