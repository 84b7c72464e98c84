"""How long a training stands still when ranks are killed: `--recover` against a restart from the newest checkpoint.

    python benchmarks/recovery.py [--trials 50] [--kills 1] [--ranks 8]            on this machine
    python benchmarks/recovery.py --bed NAME --python venv/bin/python ...          on the nodes of a test bed

Needs Open MPI 5 in the environment that runs the ranks. On a bed, which the playbooks have set up, the ranks are dealt
out over all nodes; run it as root. Each trial is a job. In it, `--kills` of its ranks, any of them, get SIGKILL from a
timer of the kernel, all within `--within` seconds. `--moments` says when: at a random time of the steps, of the first
`build`, or of a save; or, for `recovery`, one at a random time and another one at most 50 ms later. The moments take
turns.

A trial counts if the job ends with 0, all ranks that are left have the same bits, and all samples of every step are
used exactly once. (Of the steps before the loss, the part of a lost rank is known only as what is left.) Its line says
if more ranks were lost than killed: when another rank is lost in it, Open MPI's shrink may end a rank by SIGSEGV. Every
fifth trial (`--restart-every`) is one of `--restarts` with a checkpoint every 20 steps in place of `--recover`.

The time is from the first kill to the end of the first step after the last loss, on the slowest rank. Printed are
median, lowest and highest, and the ratios to a step and to a restart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mpitrain.testbed import Bed, find

SHARE = "/home/cluster/nfs"
DEADLINE_SECONDS = 120.0
ENVIRONMENT = ("PATH=/usr/local/lib/mpitrain/bin:/usr/bin:/bin", "HOME=/home/cluster")

STEPS_TO_ARM, STEP_TO_SAVE = 5, 40  # from which the timers run
RECOVERY_SECONDS, SHORT_SECONDS = 0.05, 0.02  # the longest waits of a timer in a recovery, and in a build or a save

# Its arguments: folder, steps, seconds per step; and as JSON: whether it saves, the moment, the seconds by victim.
SCRIPT = """
import ctypes, hashlib, json, os, pathlib, signal, sys, time
import numpy
import mpitrain as mt

folder, steps, seconds, plan = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])
world = mt.init()
me = world.rank
made, used = [], []

def die(at):
    # A timer of the kernel: SIGKILL comes wherever this process is at that time.
    path = folder / f"killed{me}"
    if str(me) not in plan["victims"] or path.exists():
        return
    path.write_text(repr(at))
    libc = ctypes.CDLL(None, use_errno=True)
    timer, event = ctypes.c_void_p(), (ctypes.c_int * 16)(0, 0, signal.SIGKILL, 0)
    when = (ctypes.c_long * 4)(0, 0, int(at), int(at % 1 * 1e9))
    assert libc.timer_create(time.CLOCK_REALTIME, event, ctypes.byref(timer)) == 0
    assert libc.timer_settime(timer, 1, when, None) == 0

def regression(parameters, batch, on_gradient):
    x, y, number = batch
    used.append((trainer.world.generation, number.tolist()))
    time.sleep(seconds)
    error = x @ parameters["w"] - y
    on_gradient("w", 2 * x.T @ error / max(1, len(x)))
    return float((error**2).mean()) if len(x) else 0.0

def build(world):
    if plan["moment"] == "build":
        die(time.time() + plan["victims"].get(str(me), 0))
    random = numpy.random.default_rng(0)
    arrays = random.standard_normal((600, 1000)), random.standard_normal(600), numpy.arange(600)
    data = mt.ArrayData(world, arrays, global_batch=48, shuffle=False)
    return mt.Parts(mt.ArrayFunction(regression, {"w": numpy.zeros(1000)}, mt.Sgd(1e-5)), mt.Sync(), data)

class Stamps(mt.Hook):
    def after_step(self, trainer, step):
        made.append((step.number, time.time(), trainer.world.generation, *used[-1], step.samples))
        if plan["moment"] in ("step", "recovery") and step.number == ARM:
            die(trainer.world.broadcast(time.time()) + plan["victims"].get(str(me), 0))
        if plan["moment"] == "save" and step.number == SAVE:  # the hook that saves comes next
            die(time.time() + plan["victims"].get(str(me), 0))

saves = [mt.Checkpoint(folder / "checkpoints", steps=20)] if plan["saves"] else []
trainer = mt.Trainer(build, [mt.StopAtStep(steps), Stamps(), *saves])
trainer.run()
bits = hashlib.sha256(trainer.adapter.parameters()["w"].tobytes()).hexdigest()
(folder / f"end{me}.json").write_text(json.dumps({"bits": bits, "made": made}))
""".replace("ARM", str(STEPS_TO_ARM)).replace("SAVE", str(STEP_TO_SAVE))


class Machine:
    """Where jobs run: this machine, or the nodes of a bed. There the shared user starts them on the first node."""

    def __init__(self, bed: Bed | None, python: str, ranks: int) -> None:
        self._bed = bed
        self._run = f"{python} -m mpitrain run -n {ranks}"

    def shell(self, line: str) -> tuple[int, str]:
        """Exit code and output of a line of shell on the first node."""
        if self._bed is None:
            done = subprocess.run(
                ["bash", "-c", line], check=False, capture_output=True, text=True, timeout=DEADLINE_SECONDS
            )
            return done.returncode, done.stdout + done.stderr
        shell = ["env", "-i", "-C", SHARE, *ENVIRONMENT, "bash", "-c", line]
        done = self._bed.node_run("node1", ["runuser", "-u", "cluster", "--", *shell], timeout_seconds=DEADLINE_SECONDS)
        return done.returncode, done.stdout + done.stderr

    def job(self, folder: str, options: str, arguments: str) -> tuple[int, str]:
        """Run a job to its end."""
        return self.shell(f"{self._run} {options} {folder}/train.py {folder} {arguments} < /dev/null")


@dataclass
class Trial:
    """One job."""

    moment: str
    is_right: bool
    gap_seconds: float
    step_seconds: float
    words: str


def planned(options: argparse.Namespace, moment: str) -> dict[str, Any]:
    """The victims, the time of each death, and whether there are checkpoints."""
    kills = options.kills + (moment == "recovery")
    if moment in ("step", "recovery"):
        first, within = random.uniform(0.1, 0.6) * options.steps * options.seconds, options.within
        if moment == "recovery":
            within = RECOVERY_SECONDS
    else:
        first, within = random.uniform(0, SHORT_SECONDS), options.within
    after = [0.0, *(random.uniform(0, within) for _ in range(kills - 1))]
    victims = random.sample(range(options.ranks), kills)
    return {
        "moment": moment,
        "saves": moment == "save",
        "victims": {str(rank): first + seconds for rank, seconds in zip(victims, after, strict=True)},
    }


def trial(machine: Machine, options: argparse.Namespace, moment: str, *, is_restarted: bool) -> Trial:
    """Run a job in which ranks are killed, and see how it has ended."""
    plan = planned(options, moment)
    plan["saves"] |= is_restarted
    folder = machine.shell("mktemp -d -p .")[1].strip()
    machine.shell(f"cat > {folder}/train.py <<'END'\n{SCRIPT}\nEND")
    way = "--restarts 9" if is_restarted else "--recover"
    code, output = machine.job(folder, way, f"{options.steps} {options.seconds} '{json.dumps(plan)}'")
    texts = machine.shell(f"cd {folder}; grep -h . end*.json killed*; rm -rf ../{folder}")[1].splitlines()
    ends = [json.loads(text) for text in texts if text.startswith("{")]
    times = [float(text) for text in texts if text[0].isdecimal()]
    victims = ", ".join(f"{rank} in {moment}" for rank in plan["victims"])
    expected = options.ranks - (0 if is_restarted else len(plan["victims"]))
    if code or not 0 < len(ends) <= expected or len({end["bits"] for end in ends}) != 1:
        return Trial(
            moment, False, 0.0, 0.0, f"code {code}, {len(ends)} ranks ended, killed {victims}\n{output[-2000:]}"
        )
    if len(ends) < expected:
        victims += f"; {expected - len(ends)} more ended by a fault of MPI itself"
    return judged(moment, ends, options.steps, min(times), victims, is_restarted=is_restarted)


def judged(
    moment: str, ends: list[dict[str, Any]], steps: int, began: float, victims: str, *, is_restarted: bool
) -> Trial:
    """True if every step has all its samples once; and how long no step ended."""
    made = [end["made"] for end in ends]
    newest = max(step[2] for steps_of in made for step in steps_of)
    first_ends, wrong = [], []
    for steps_of in made:
        first_ends.append(min(at for _, at, generation, *_ in steps_of if at > began and generation == newest))
        numbers = [number for number, *_ in steps_of]
        once = list(dict.fromkeys(numbers))  # a hook may be called again for the step of the loss
        if numbers[-1] != steps or not (is_restarted or once == list(range(1, steps + 1))):
            wrong.append(f"steps {numbers}")
    last = [{number: rest for number, _, _, *rest in one} for one in made]  # generation, part, number of samples
    for number in set.intersection(*(set(of_rank) for of_rank in last)):
        generations, parts, samples = zip(*(of_rank[number] for of_rank in last), strict=True)
        epoch = -(-600 // 48)
        begin = (number - 1) % epoch * 48
        batch = set(range(begin, min(begin + 48, 600)))
        used = [sample for part in parts for sample in part]
        is_whole = set(generations) == {newest} or is_restarted
        if len(used) != len(set(used)) or not set(used) <= batch or set(samples) != {len(batch)}:
            wrong.append(f"step {number}: samples {sorted(used)} of {len(batch)}")
        if is_whole and set(used) != batch:
            wrong.append(f"step {number}: only {len(used)} of {len(batch)} samples")
    lengths = [b - a for one in made for (_, a, *_), (_, b, *_) in pairwise(one)]
    words = f"(killed: {victims})"
    if wrong:
        words += " " + "; ".join(wrong[:3])
    return Trial(moment, not wrong, max(first_ends) - began, statistics.median(lengths), words)


def main() -> None:
    """Run the trials, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--within", type=float, default=0.0, help="seconds between the first and the last kill")
    parser.add_argument("--moments", default="step", help="a list of step, build, save, recovery")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=0.02, help="that the computation of a step takes")
    parser.add_argument("--restart-every", type=int, default=5, help="0: never")
    options = parser.parse_args()
    random.seed(options.seed)
    moments = options.moments.split(",")
    machine = Machine(find(options.bed) if options.bed else None, options.python, options.ranks)
    trials: dict[bool, list[Trial]] = {False: [], True: []}
    while len(trials[False]) < options.trials:
        is_restarted = bool(options.restart_every) and len(trials[True]) * options.restart_every < len(trials[False])
        moment = "step" if is_restarted else moments[len(trials[False]) % len(moments)]
        one = trial(machine, options, moment, is_restarted=is_restarted)
        trials[is_restarted].append(one)
        kind, load = "restart" if is_restarted else "recover", os.getloadavg()[0]
        right = "" if one.is_right else "FAILED "
        print(f"{right}{kind} {one.gap_seconds:.3f} s, load {load:.0f} {one.words}", flush=True)
    for is_restarted, name in ((False, "--recover"), (True, "--restarts")):
        of_kind = trials[is_restarted]
        print(f"{name}: {sum(one.is_right for one in of_kind)} of {len(of_kind)} went on")
        for moment in dict.fromkeys(one.moment for one in of_kind):
            right = [one for one in of_kind if one.is_right and one.moment == moment]
            if not right:
                continue
            gaps, step = [one.gap_seconds for one in right], statistics.median(one.step_seconds for one in right)
            middle = statistics.median(gaps)
            print(
                f"    killed in {moment}, {len(right)} jobs: kill to next step: median {middle:.3f} s "
                f"({min(gaps):.3f} to {max(gaps):.3f}), {middle / step:.1f} steps of {step:.3f} s"
            )
    both = [
        [one.gap_seconds for one in trials[kind] if one.is_right and one.moment == "step"] for kind in (False, True)
    ]
    if all(both):
        print(f"killed in a step, ratio to a restart: {statistics.median(both[0]) / statistics.median(both[1]):.3f}")


if __name__ == "__main__":
    main()
