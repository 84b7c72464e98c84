"""Batches for all ranks from one global cursor.

`ArrayData` (arrays in memory or mapped files), `MapData` (samples by number) and `StreamData` (samples in sequence) are
the data sources of a Trainer; `Prefetch` reads ahead of one.
"""

from mpitrain.data.indexed import ArrayData, MapData
from mpitrain.data.prefetch import Prefetch
from mpitrain.data.stream import StreamData

__all__ = ["ArrayData", "MapData", "Prefetch", "StreamData"]
