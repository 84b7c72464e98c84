"""The lines that a rank of `mpitrain run` writes."""

from __future__ import annotations

import os
import subprocess
import sys

from mpitrain.context import JOB


def test_a_print_of_several_words_is_one_write() -> None:
    """Another rank's line would come between two of them."""
    reading, writing = os.pipe2(os.O_DIRECT)  # each read returns one write
    source = "import sys, mpitrain\nprint('loss', 0.5)\nprint('a', 1, file=sys.stderr)\nprint('no', 'end', end='')"
    rank = {"PMI_RANK": "0", "PYTHONUNBUFFERED": "1", JOB: "one"}
    environment = {**os.environ, **rank}
    subprocess.run([sys.executable, "-c", source], env=environment, stdout=writing, stderr=writing, check=True)
    os.close(writing)
    assert [os.read(reading, 100) for _ in range(4)] == [b"loss 0.5\n", b"a 1\n", b"no end", b""]
    os.close(reading)
