"""The order of an epoch's samples: a permutation that is computed place by place and never stored.

A Feistel network is a permutation of 2^b numbers, whatever its round function: the number is cut into two halves, and
each round adds (by XOR) a function of one half to the other; the same round again would undo this. A result of n or
above goes through the network again, until it is below n. Because the network is a permutation, this walk along a cycle
from a number below n returns to a number below n, and different numbers lead to different ones. With 2^b < 2n, a number
goes through the network less than twice on average.

    5 samples, so b = 3, in epoch 2 of seed 0:

    place                 0  1  2  3  4
    through the network   5  7  6  1  4        5, 6 and 7 are not samples
    again                 2  0  3
    sample                2  0  3  1  4

Cost: the memory of one block, and some 0.1 us per sample (benchmarks/log/).

Sources: Luby and Rackoff, How to construct pseudorandom permutations from pseudorandom functions, SIAM J. Comput. 17
(1988); Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002 (cycle walking); Mitchell, Stokes, Frank
and Holmes, Bandwidth-Optimal Random Shuffling for GPUs, ACM Trans. Parallel Comput. 9 (2022) (both as a shuffle). The
round function is the finalizer of SplitMix64: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators,
OOPSLA 2014.
"""

from __future__ import annotations

import numpy

# More than the 4 that cryptography requires: with few samples, a half has only one or two bits.
_ROUNDS = 12
# The number of places (128 KiB) that are computed at once: enough that NumPy's calls cost little per sample.
_BLOCK = 2**14


class Order:
    """The order of `count` samples in any epoch, drawn from (seed, epoch); without `shuffle`, the order of the data."""

    def __init__(self, count: int, *, seed: int, shuffle: bool) -> None:
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1  # the epoch of the block
        self._begin = 0
        self._block = numpy.empty(0, numpy.int64)

    def samples(self, epoch: int, begin: int, end: int) -> numpy.ndarray:
        """Return the numbers of the samples at the places `begin` to `end` (exclusive) of an epoch, int64."""
        if not self._shuffle:
            return numpy.arange(begin, end)
        if epoch != self._epoch or begin < self._begin or end > self._begin + len(self._block):
            block_end = min(self._count, max(end, begin + _BLOCK))
            self._block = permuted(numpy.arange(begin, block_end), self._count, (self._seed, epoch))
            self._epoch, self._begin = epoch, begin
        return self._block[begin - self._begin : end - self._begin]


def permuted(places: numpy.ndarray, count: int, seed: tuple[int, ...]) -> numpy.ndarray:
    """Map each of `places` by a permutation of 0 to count - 1 that is drawn from `seed`; int64."""
    keys = numpy.random.SeedSequence(seed).generate_state(_ROUNDS, numpy.uint64)
    bits = (count - 1).bit_length()
    result = _network(places.astype(numpy.uint64), bits, keys)
    outside = numpy.flatnonzero(result >= count)
    while outside.size:
        again = _network(result[outside], bits, keys)
        result[outside] = again
        outside = outside[again >= count]
    return result.astype(numpy.int64)


def _network(values: numpy.ndarray, bits: int, keys: numpy.ndarray) -> numpy.ndarray:
    """Permute the numbers of `bits` bits. The halves may differ by a bit, so they are not swapped."""
    low_bits = numpy.uint64(bits // 2)
    high_mask = numpy.uint64(2 ** (bits - bits // 2) - 1)
    low_mask = numpy.uint64(2 ** (bits // 2) - 1)
    high, low = values >> low_bits, values & low_mask
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        high ^= _mixed(low, first) & high_mask
        low ^= _mixed(high, second) & low_mask
    return (high << low_bits) | low


def _mixed(values: numpy.ndarray, key: numpy.uint64) -> numpy.ndarray:
    """Return 64 bits, each of which depends on all bits of value and key."""
    mixed = values + key  # all of this overflows on purpose
    mixed ^= mixed >> numpy.uint64(30)
    mixed *= numpy.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> numpy.uint64(27)
    mixed *= numpy.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> numpy.uint64(31)
    return mixed
