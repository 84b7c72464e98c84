"""Segments in pieces, of which WINDOW are under way at a time: the pipeline of direct on the CPU and on a GPU.

A rank starts piece n only after it has finished piece n - WINDOW. This also bounds how much a slow rank must receive
ahead of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Protocol

from mpitrain.allreduce.algorithm import Progress, Steps
from mpitrain.allreduce.group import Group, pieces_of, segments
from mpitrain.arrays import Array
from mpitrain.waiting.pieces import Pace
from mpitrain.watching.activity import count_moved

WINDOW = 4  # pieces under way at one time
_FLIGHT_BYTES = 3 * 2**20  # of a window, both ways, before compression; bounds the scratch memory
_LARGEST_PIECE, _SMALLEST_PIECE = 256 * 1024, 16 * 1024
_TAG = 10  # and 2 WINDOW more


class PieceSteps(Protocol):
    """The work on one piece of every segment."""

    def __call__(
        self, slot: int, tag: int, flat: Array, parts: Sequence[slice], residual: Array | None, /
    ) -> Iterator[bool]:
        """Yield whether anything has happened.

        Args:
            slot: below WINDOW; no two pieces under way have the same slot.
            tag: of the messages of the first phase; the next one is free too.
            parts: the piece in `flat`, by the place in the group of the segment's owner.
        """
        ...


def piece_bytes(group: Group) -> int:
    """Return the largest length of a piece of a segment; whole blocks of a codec."""
    fitting = min(max(_FLIGHT_BYTES // WINDOW // max(group.size - 1, 1), _SMALLEST_PIECE), _LARGEST_PIECE)
    return fitting - fitting % 1024


def in_pieces(group: Group, piece_steps: PieceSteps, wire_bytes: Callable[[int], int] | None = None) -> Steps:
    """Run both phases of `piece_steps` on all pieces of a buffer.

    The pieces, and so the roundings, are the same wherever `piece_steps` codes and adds: on the CPU or on a GPU.

    Args:
        wire_bytes: returns the length of that many values in a codec's form.
    """
    run = windowed(group, piece_steps, 2, wire_bytes)
    return lambda flat, residual=None: run(flat, None, residual)


def windowed(
    group: Group, piece_steps: PieceSteps, phases: int, wire_bytes: Callable[[int], int] | None = None
) -> Callable[..., Progress]:
    """Run `piece_steps` on all pieces of a buffer's segments. The result also takes their lengths and a residual.

    Args:
        phases: of `piece_steps`, 1 or 2.
        wire_bytes: as for in_pieces.
    """
    longest = piece_bytes(group)
    pace = Pace()

    @lru_cache(maxsize=256)
    def cut(count: int, itemsize: int, lengths: tuple[int, ...] | None) -> list[tuple[slice, ...]]:
        """The slices of each piece, by the place of the segment's owner."""
        owned = segments(count, group.size, lengths)
        largest = max(segment.stop - segment.start for segment in owned)
        num_pieces = -(-largest * itemsize // longest)
        return list(zip(*(pieces_of(segment, num_pieces) for segment in owned), strict=True))

    def run(flat: Array, lengths: Sequence[int] | None = None, residual: Array | None = None) -> Progress:
        if group.size == 1:
            return
        pieces = cut(flat.size, flat.itemsize, None if lengths is None else tuple(lengths))
        started, num_pieces = 0, len(pieces)
        active: dict[int, Iterator[bool]] = {}  # by slot: piece n has slot n modulo WINDOW, and its tag, on every rank
        share = flat.nbytes // group.size
        wire, wire_piece = share, min(share, longest)
        if wire_bytes is not None:
            wire, wire_piece = (wire_bytes(num_bytes // flat.itemsize) for num_bytes in (wire, wire_piece))
        pace.begin(phases * (group.size - 1) * wire, wire_piece)
        while True:
            while started < num_pieces and (slot := started % WINDOW) not in active:
                active[slot] = piece_steps(slot, _TAG + 2 * slot, flat, pieces[started], residual)
                started += 1
            if not active:
                break
            progress = False
            for slot, piece in tuple(active.items()):
                state = next(piece, None)
                if state is None:
                    del active[slot]
                progress |= state is not False
            if progress:
                count_moved()
            else:
                yield pace.nap()
        pace.end()

    return run
