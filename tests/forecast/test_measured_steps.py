"""What is read from the times that ranks have written: enough steps, and the same training on all hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpitrain.errors import DataError
from mpitrain.forecast.measured_steps import HostTimes, described, read_times


def part(ranks: int, samples: float, num_steps: int) -> dict[str, Any]:
    step = {"seconds": samples / 10, "ready": [samples / 20]}
    return {"ranks": ranks, "samples": samples, "steps": [step] * num_steps}


def entry(host: str, *parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    plain = {
        "host": host, "parameters": [["p", 4000]], "parts": parts, "num_steps": 20, "is_fixed": False,
        "memory_bytes": 10**8, "cores": 2.0, "busy_cores": 1.0, "sums": {},
    }  # fmt: skip
    return {**plain, **changes}


def read(folder: Path, *entries: dict[str, Any]) -> list[HostTimes]:
    path = folder / "times.json"
    path.write_text(json.dumps(entries))
    return read_times(path, "train.py")


def test_few_steps(tmp_path: Path) -> None:
    (one,) = read(tmp_path, entry("a", part(1, 8.0, 5), part(2, 4.0, 4), part(4, 2.0, 3)))
    assert [part.num_ranks for part in one.parts] == [1, 2]
    assert "half of only 5 steps within 0%" in described([one])
    (many,) = read(tmp_path, entry("a", part(1, 8.0, 10)))
    assert "half of the steps within 0%" in described([many])
    with pytest.raises(
        DataError, match=r"train.py ended after 6 steps, too few to measure on b\. .* at least 4 of them"
    ):
        read(tmp_path, entry("a", part(1, 8.0, 4)), entry("b", part(1, 8.0, 3), num_steps=6))


@pytest.mark.parametrize(
    ("changed", "samples", "expected"),
    [
        ({"is_fixed": True}, 8.0, "8 samples a rank, however many ranks there are on b, and 1 gradients"),
        ({"parameters": [["p", 400]]}, 8.0, r"1 gradients \(p to p\) of 400 bytes, 8 samples a step on b, and "),
        ({}, 6.0, "6 samples a step on b, and "),
    ],
)
def test_hosts_that_train_otherwise(tmp_path: Path, changed: dict[str, Any], samples: float, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        read(tmp_path, entry("a", part(1, 8.0, 4)), entry("b", part(1, samples, 4), **changed))
