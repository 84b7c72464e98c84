"""Batches for all ranks from one global cursor. One file, one idea.

`ArrayData` (arrays in memory or mapped files), `MapData` (samples by number) and `StreamData` (samples in a row) are
the sources of a Trainer; `Prefetch` reads ahead of one.
"""

from mpitrain.data.indexed import ArrayData, MapData
from mpitrain.data.prefetch import Prefetch
from mpitrain.data.stream import StreamData

__all__ = ["ArrayData", "MapData", "Prefetch", "StreamData"]
