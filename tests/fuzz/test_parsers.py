"""No input makes a parser raise anything but an error of mpitrain, in one line; hang; or take much memory.

100,000 inputs (docs: CONTRIBUTING.md, Tests):

    .venv/bin/python -m pytest -m nightly tests/fuzz
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fuzz.mutations import mutated
from fuzz.parsers import PARSERS
from mpitrain.errors import MpitrainError
from mpitrain.watching import served_record

FEW, MANY = 60, 100_000
SHM = Path("/dev/shm")  # an index of runs waits for the disk
MOST_LETTERS = 1500
MOST_CPU_SECONDS = 30.0  # a guard: the longest takes some tenths
MOST_GROWTH_KIB = 1 << 20


def refusals(name: str, count: int) -> int:
    """Have a parser read inputs; return how many it has refused."""
    parser, refused = PARSERS[name], 0
    with TemporaryDirectory(prefix="mpitrain-fuzz-", dir=SHM if SHM.is_dir() else None) as top:
        for seed in range(count):
            data = parser.examples[seed] if seed < len(parser.examples) else mutated(parser.examples, seed)
            folder = Path(top) / str(seed)
            folder.mkdir()
            begin = time.process_time()
            try:
                parser.read(data, folder)
            except MpitrainError as error:
                refused += 1
                text = str(error)
                assert seed >= len(parser.examples), f"{name}: the example is refused: {text}"
                assert "\n" not in text and len(text) < MOST_LETTERS, (name, seed, text[:2000])
                text.encode(errors="surrogateescape")
            except BaseException as error:
                error.add_note(f"{name}, seed {seed}: {data[:300]!r}")
                raise
            assert time.process_time() - begin < MOST_CPU_SECONDS, (name, seed)
    return refused


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_record, "_PAUSE_SECONDS", 0.0)


@pytest.mark.parametrize("name", PARSERS)
def test_some_inputs(name: str) -> None:
    refusals(name, FEW)


@pytest.mark.nightly
def test_100_000_inputs() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    each = -(-MANY // len(PARSERS))
    for name in PARSERS:
        print(f"{name}: {each} inputs, {refusals(name, each)} refused, 0 tracebacks", flush=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_GROWTH_KIB
