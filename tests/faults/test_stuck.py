"""A rank is stuck in the kernel, where even SIGKILL cannot end it. It is named, and the job goes on from memory."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import restarting
from faults.outcome import succeeded
from faults.restarting import HERE, parameters, train, tries
from jobs import until

# This fixture runs the same training without a fault.
uninterrupted = restarting.uninterrupted


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A disk on which every write waits in the kernel, also after SIGKILL."""
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    image.write_bytes(bytes(8 << 20))
    made = [["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, folder], ["fsfreeze", "--freeze", folder]]
    if os.geteuid() != 0:
        pytest.skip("to freeze a disk needs root")
    for command in made:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no disk can be frozen here: {done.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", folder], check=False)
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("vendor", ["mpich", pytest.param("openmpi", marks=pytest.mark.nightly)], indirect=True)
def test_a_rank_that_cannot_be_killed(tmp_path: Path, frozen: Path, vendor: str, uninterrupted: bytes) -> None:
    wrong = f"if rank == 1 and step == 7 and once('stuck'): pathlib.Path('{frozen}/file').write_text('x')"
    limits = {"MPITRAIN_STALL_SECONDS": "5", "MPITRAIN_HANG_SECONDS": "15", "MPITRAIN_MEMORY_STEPS": "1"}

    def thaw(process: subprocess.Popen[str]) -> None:
        """The disk answers again when the training is over. Then the process that was stuck ends."""
        until(lambda: (tmp_path / "w.npy").exists() or process.poll() is not None)
        subprocess.run(["fsfreeze", "--unfreeze", frozen], check=True)

    job = train(tmp_path, wrong, vendor=vendor, env=limits, during=thaw)
    succeeded(job)
    assert parameters(tmp_path) == uninterrupted
    stuck = rf"rank 1 on {HERE} is stuck in the kernel \(\w+\) in train\.py:\d+ \(wrong\)"
    assert re.search(rf"no progress for \d+ s: rank 0 .*{stuck}", job.stderr), job.output
    assert re.search(r"process \d+ could not be killed: .*train\.py", job.stderr), job.output
    first, last = tries(job)
    assert re.match(r"try 1 of 3 failed at step 7: ", first), first
    assert last == "try 2 of 3 succeeded"
    assert job.stdout.count("resumed from memory at step 6\n") == 1
