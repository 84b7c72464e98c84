"""Batches for all ranks from one global cursor. One file, one idea.

`ArrayData` (arrays in memory or mapped files), `MapData` (samples by number) and `StreamData` (samples in a row) are
the sources of a Trainer; `Prefetch` reads ahead of one.
"""
