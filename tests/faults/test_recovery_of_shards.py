"""A rank is killed that has a part of the optimizer: the others do not go on without it, and a restart does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy
import pytest

from faults.outcome import failed, succeeded
from faults.recovering import reckoned, train


@pytest.mark.parametrize("place", ["gradients", "exchange", "after_step"])
def test_the_part_of_a_lost_rank_is_lost(tmp_path: Path, place: str) -> None:
    """In the middle of a step or after it: the job ends, with the reason and what to do."""
    job = train(tmp_path, 3, strategy="mt.ShardedSync()", **{place: "if me == 1 and now == 7: die()"})
    failed(job, "its part of the optimizer's state, which ShardedSync keeps on one rank only", "With --restarts")
    assert "went on" not in job.stderr
    assert not list(tmp_path.glob("rank*.json"))


@pytest.mark.parametrize("recover", [False, True])
def test_a_restart_goes_on_from_the_copy_in_memory(tmp_path: Path, recover: bool) -> None:
    """The copy has all parts, and the result is that of one process."""
    kill = "if me == 1 and now == 7 and not (folder / 'killed').exists(): (folder / 'killed').touch(); die()"
    options = ["--restarts", "1"]
    job = train(tmp_path, 3, *options, strategy="mt.ShardedSync()", recover=recover, exchange=kill)
    succeeded(job)
    assert re.search(r"^\[0\] resumed from memory at step [1-6]$", job.stdout, re.M), job.output
    w, _, _ = reckoned()
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert len({(one["w"], one["optimizer"]) for one in said}) == 1
    numpy.testing.assert_allclose(numpy.frombuffer(bytes.fromhex(said[0]["w"])), w, rtol=1e-12, atol=1e-13)
