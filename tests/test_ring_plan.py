"""The plan of the ring, of one rank after the other, without MPI."""

from __future__ import annotations

import pytest

from mpitrain.allreduce.ring import plan

ITEMSIZE = 4


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("count", [7, 61, 1000])
def test_what_a_piece_waits_for(count: int, size: int) -> None:
    """It is sent on when it has been received, and overwritten when it has been sent: neither too soon nor too late.

    What is overwritten was last sent as a partial sum, half a round before. MPI may still read it.
    """
    for index in range(size):
        steps = plan(count, None, ITEMSIZE, index, size, 16 * ITEMSIZE, True, True)
        sends = [(step.send.start, step.send.stop) for step in steps]
        receives = [
            (ITEMSIZE * step.receive.start, ITEMSIZE * step.receive.stop)
            if step.adds
            else (step.receive.start, step.receive.stop)
            for step in steps
        ]
        for number, step in enumerate(steps):
            begin, end = sends[number]
            if begin < end:
                came = [earlier for earlier in range(number) if receives[earlier] == sends[number]]
                assert step.after == (came[-1] + 1 if came else 0), (index, number)
            begin, end = receives[number]
            if begin < end:
                sent = [earlier for earlier in range(number) if sends[earlier] == receives[number]]
                assert step.overwrites_after == (sent[-1] + 1 if sent else 0), (index, number)
