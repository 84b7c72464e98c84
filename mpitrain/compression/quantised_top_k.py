"""top_k:d:b: what top_k keeps, with b bits for each kept value, 1 to 4, and about 2 + log2(1/d) bits for its place.

`top_k:0.02:2` keeps the 2 % of each block of 4096 values that top_k.py keeps, and rounds each to one of 2^(b-1) levels
with its sign. The wire has the levels of all blocks, then the bits of all blocks; those of a block fill whole bytes:

    | levels of block 0: 2^(b-1) float32 | levels of block 1 | ... | bits of block 0 | bits of block 1 | ...

The bits of a block that keeps k of its n values, with l = log2(n / k) rounded down:

    | k codes of b bits | the l lower bits of k places | the upper bits of the places: k + ((n - 1) >> l) bits | zeros

- A code is the sign, 1 for negative, and above it the number of the level.
- Levels: the kept |values| are split at their mean, and each part again at its own mean, until there are 2^(b-1) parts
  in the order of the |values|. A level is the mean of its part; 0 if the part is empty.
- Places are in order. Bit u + i of the upper bits is 1 if the place of the i-th kept value has the upper bits u.
  This is the code of Elias and Fano: 7.5 bits for a place with 2 %. A number below 4096 takes 12 bits, and no code can
  do with less than 7.0, the logarithm of the number of choices.

A block of eight values, density 0.5, b = 2. Bits from the lowest on, so the bytes are c4 be 04:

    values      3   -5   0.5    4    0    1    0   -8       k = 4, l = 1
    kept        3   -5          4                  -8       mean 5: levels 4, of 3 5 4, and 8
    codes      00   10         00                  11
    places      0    1          3                   7       lower bits 0 1 1 1, upper 0 0 1 3: 1101001
    decoded     4   -4     0    4    0    0    0   -8
    error      -1   -1   0.5    0    0    1    0    0       added to the next step's values

- Since levels are means, the sum of the squared errors is at most that of the values, whatever the values are. With
  steps of equal width, one large value could make it larger, and the error feedback would not converge.
- A mean is a sum in float64, made by halves: |value i| and |value i + h| are added for h = half of the least power of
  two that is at least k, then for half of that, until one is left. So every machine rounds it in the same way.
- Encoding what was decoded gives the same wire for b of 1 and 2. For 3 and 4, rounded levels may be split elsewhere.
- Infinity or NaN in a block: as in top_k.py, with levels of NaN and codes of 0.

Cost of a block of 4096: 106 bytes for top_k:0.02:2, 0.026 bytes per value. With 2 %, more than 4 bits would be more
bytes for the levels than for the codes.

Source: Sarfi, Therien, Lidin and Belilovsky, Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706
(2025): chunks of 4096 and 2 bits. The authors' code (github.com/tplr-ai/templar, compress.py) also sends the means of
its bins, but these are of equal width around the mean of a tensor, and its places have 12 bits. The places: Elias,
Efficient storage and retrieval by content and address of static files, JACM 1974; Fano, 1971.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy

from mpitrain.compression import kept_bits
from mpitrain.compression.codec import PIECE_VALUES, ArrayCodec, Codec, Passes
from mpitrain.compression.kept_bits import Form, Packing, places_of
from mpitrain.compression.top_k import BLOCK_VALUES, fast, kept_of, of_density, twin
from mpitrain.errors import ConfigError

MOST_BITS = 4
_LEVEL, _BITS = numpy.dtype(numpy.float32), numpy.dtype(numpy.uint8)


def of_setting(text: str) -> Callable[[bool], Codec]:
    """Return the factory for `top_k:TEXT`: a density, or a density and the bits of a value.

    Raises:
        ConfigError: the text is neither.
    """
    density, colon, bits = text.partition(":")
    plain = of_density(density)  # raises
    if not colon:
        return plain
    if bits not in [str(number) for number in range(1, MOST_BITS + 1)]:
        raise ConfigError(
            f"compression top_k:{text}: the bits of a value are {bits!r}; allowed are 1 to {MOST_BITS}, as in "
            "top_k:0.02:2; leave them out for float32"
        )
    return partial(quantised_top_k, density=float(density), bits=int(bits), name=f"top_k:{text}")


def quantised_top_k(compiled: bool, density: float, bits: int, name: str) -> Codec:
    """The largest values of each block in a few bits, with their places."""
    return ArrayCodec(
        name,
        partial(parts, density, bits),
        passes(density, bits, compiled=compiled),
        compiled,
        relative_error=1.0,
        gathered=True,
        places_exist=partial(places_exist, density, bits),
    )


def form_of(density: float, bits: int, count: int) -> Form:
    """Return the form of a block of `count` values, at least 1."""
    kept = kept_of(density, count)
    low = (count // kept).bit_length() - 1
    return Form(kept, low, -(-(kept * (bits + low + 1) + (count - 1 >> low)) // 8))


def parts(density: float, bits: int, count: int) -> list[tuple[numpy.dtype, int]]:
    """The levels of all blocks, then their bits."""
    num_whole, rest = divmod(count, BLOCK_VALUES)
    num_bytes = num_whole * form_of(density, bits, BLOCK_VALUES).num_bytes
    num_bytes += form_of(density, bits, rest).num_bytes if rest else 0
    return [(_LEVEL, (num_whole + (rest > 0)) << (bits - 1)), (_BITS, num_bytes)]


def places_exist(density: float, bits: int, arrays: tuple[numpy.ndarray, ...], count: int) -> bool:
    """Return whether each block of a wire of `count` values has its number of places, and all are in the block."""
    _, stream = arrays
    num_whole, rest = divmod(count, BLOCK_VALUES)
    whole = form_of(density, bits, BLOCK_VALUES)
    end = num_whole * whole.num_bytes
    rows = [(stream[:end].reshape(num_whole, -1), whole, BLOCK_VALUES)] if num_whole else []
    rows += [(stream[end:].reshape(1, -1), form_of(density, bits, rest), rest)] if rest else []
    for octets, form, length in rows:
        string = numpy.unpackbits(octets, axis=1, bitorder="little")
        upper = string[:, form.kept * (bits + form.low) :]
        if (upper.sum(axis=1) != form.kept).any() or (places_of(string, bits, form) >= length).any():
            return False
    return True


def passes(density: float, bits: int, *, compiled: bool) -> Passes:
    """Return passes in which top_k.py finds or spreads the kept values of a piece, and kept_bits.py codes them."""
    whole = form_of(density, bits, BLOCK_VALUES)
    choose: Passes = fast(density) if compiled else twin(density)
    coded: Packing = kept_bits.fast(bits, whole.kept) if compiled else kept_bits.twin(bits)
    blocks_at_once, num_levels = PIECE_VALUES // BLOCK_VALUES, 1 << (bits - 1)
    its_kept = numpy.empty(blocks_at_once * whole.kept, numpy.float32)
    its_places = numpy.empty(blocks_at_once * whole.kept, numpy.uint16)

    def pieces(wire: tuple[numpy.ndarray, ...], count: int) -> Iterator[tuple[slice, tuple[numpy.ndarray, ...], Form]]:
        """The values of each piece; where its kept values, places, levels and bits are; the form of the last block."""
        levels, stream = wire
        begin = 0
        for start in range(0, count, PIECE_VALUES):
            stop = min(start + PIECE_VALUES, count)
            num_before = (stop - start - 1) // BLOCK_VALUES
            last = form_of(density, bits, stop - start - num_before * BLOCK_VALUES)
            kept = num_before * whole.kept + last.kept
            end = begin + num_before * whole.num_bytes + last.num_bytes
            first = start // BLOCK_VALUES
            its_levels = levels[first * num_levels : (first + num_before + 1) * num_levels]
            yield slice(start, stop), (its_kept[:kept], its_places[:kept], its_levels, stream[begin:end]), last
            begin = end

    def encode(values: numpy.ndarray, wire: tuple[numpy.ndarray, ...], error: numpy.ndarray) -> None:
        for piece, (kept, places, levels, stream), last in pieces(wire, values.size):
            choose.encode(values[piece], (kept, places), error[piece])
            coded.pack(kept, places, levels, stream, error[piece], whole, last)

    def decode(wire: tuple[numpy.ndarray, ...], values: numpy.ndarray) -> None:
        for piece, (kept, places, levels, stream), last in pieces(wire, values.size):
            coded.unpack(kept, places, levels, stream, whole, last)
            choose.decode((kept, places), values[piece])

    def add(wire: tuple[numpy.ndarray, ...], total: numpy.ndarray) -> None:
        for piece, (kept, places, levels, stream), last in pieces(wire, total.size):
            coded.unpack(kept, places, levels, stream, whole, last)
            choose.add((kept, places), total[piece])

    return Passes(encode, decode, add)
