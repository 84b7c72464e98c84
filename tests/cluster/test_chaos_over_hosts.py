"""`scripts/testbed chaos`: a cable is pulled, a node loses power, a host freezes. The job continues each time."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from pathlib import Path

import pytest
from launching import NODES, SHARE, Job, as_user, training, write
from regression import REGRESSION

from jobs import HANG_SECONDS, REPOSITORY, clean_environment
from testbed import Bed

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("healed"), pytest.mark.nightly]

# Steps of 0.05 s, with a checkpoint every 20, until a file `enough` exists.
SCRIPT = """
import pathlib, time
import numpy
import mpitrain as mt

world = mt.init()

class Enough(mt.Hook):
    def after_step(self, trainer, step):
        time.sleep(0.05)
        if step.number == 10:
            world.print("made step 10")
        trainer.report({"enough": float(world.is_root and pathlib.Path("enough").exists())})
"""
SCRIPT += REGRESSION
SCRIPT += """
hooks = [Enough(), mt.StopWhen("enough", at_least=1.0), mt.Checkpoint("checkpoints", steps=20)]
mt.Trainer(build, hooks).run()
"""


def started(bed: Bed) -> tuple[Job, str]:
    """Start a job that makes steps. Return the job and its id."""
    arguments, begun = "-n 4 --max-restarts 9 chaos.py", "made step 10"
    # On a busy machine copies are made less often, and the power might be cut before the second copy.
    job = training(bed, "chaos.py", SCRIPT, arguments, begun=begun, setting="MPITRAIN_MEMORY_STEPS=1")
    listed = as_user(bed, "node1", "mpitrain ps --hosts node1").stdout
    return job, re.findall(r"^([0-9a-f]{8}) .*chaos\.py", listed, re.M)[0]


def bring_testbed(bed: Bed) -> None:
    """Bring what is in no wheel to the shared folder: testbed/ and its command, as in a checkout."""
    files = subprocess.run(
        ["tar", "-cz", "--exclude=__pycache__", "testbed", "scripts/testbed"],
        cwd=REPOSITORY, check=True, capture_output=True, timeout=60,
    ).stdout  # fmt: skip
    text = base64.b64encode(files).decode()
    done = as_user(bed, "node1", f"mkdir checkout && base64 -d <<<{text} | tar -xz -C checkout")
    assert done.returncode == 0, done.stderr


def test_over_ssh(bed: Bed) -> None:
    """One host freezes, as on real hosts, and the job continues."""
    job, token = started(bed)
    options = "--faults freeze --every 4s --hold 1s --count 1 --seed 2 --yes --report chaos-report"
    bring_testbed(bed)
    line = f"checkout/scripts/testbed chaos {token} --hosts {','.join(NODES)} {options} > chaos-output 2>&1"
    line = f"PATH={SHARE}/venv/bin:$PATH {line}"  # of the Python that has mpitrain
    until = "until grep -q 'the job continued' chaos-output || ! kill -0 $!; do sleep 0.5; done"
    done = as_user(bed, "node1", f"{line} & {until}; touch enough; wait $!; cat chaos-output; rm -r chaos-* checkout")
    end = job.end()
    assert end.code == 0, end.output
    for words in ("stopped for 1 s", "freeze: the job continued after 1 of 1", "left behind: nothing"):
        assert words in done.stdout, done.stdout + done.stderr


def test_cables_power_and_freezes(bed: Bed, tmp_path: Path) -> None:
    job, token = started(bed)
    command = [f"{REPOSITORY}/scripts/testbed", "chaos", token, "--bed", bed.name, "--faults", "link,host,freeze"]
    chaos = subprocess.Popen(
        [*command, "--every", "12s", "--hold", "4s", "--count", "3", "--report", str(tmp_path)],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = ""
    try:
        assert chaos.stdout is not None
        for line in chaos.stdout:
            said += line
            if said.count("the job continued after") == 3:
                break
        write(bed, "node1", f"{SHARE}/enough", "")
        said += chaos.communicate(timeout=HANG_SECONDS)[0]
    finally:
        chaos.terminate()
        chaos.wait(HANG_SECONDS)
    end = job.end()
    assert (end.code, chaos.returncode) == (0, 0), said + end.output
    for node in bed.names:
        assert bed.faults(node) == {}
    report = json.loads((tmp_path / "chaos.json").read_text())
    faults = {fault["kind"]: fault for fault in report["faults"]}
    assert sorted(faults) == ["freeze", "host", "link"]
    for kind in ("link", "host"):
        assert faults[kind]["victim"] in ("node2", "node3", "node4")
    assert faults["link"]["went_on_seconds"] >= 4.0
    assert faults["freeze"]["went_on_seconds"] >= 4.0
    assert faults["host"]["from_step"] > 1
    assert faults["host"]["victim"] in faults["host"]["named"]
    assert (report["error"], report["left"]) == ("", {node: [] for node in bed.names})
