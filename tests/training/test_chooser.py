"""What is chosen, from numbers alone: a trial after a forecast, the way back, step times, the probe's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mpitrain.forecast.ways import ExchangeWay
from mpitrain.reducer.means import Overlap
from mpitrain.strategies.chooser import Chooser, Decision, StepParts, StepSeconds
from mpitrain.strategies.virtual_ranks import ProbeFinding, judge

NONE, BF16, INT8 = ExchangeWay("auto"), ExchangeWay("auto", "bf16"), ExchangeWay("auto", "int8")
RING_1 = ExchangeWay("ring", bucket_mib=1)


class Run:
    """Steps that take as long as `true` says, with forecasts that say `told`."""

    def __init__(self, true: Mapping[ExchangeWay, float], told: Mapping[ExchangeWay, float], error: float = 0) -> None:
        self.true, self.told, self.error = dict(true), dict(told), error
        self.step = self.num_forecasts = 0
        self.least = 0.0
        self.chooser = Chooser(NONE, NONE, 0)
        self.lines: list[str] = []
        self.taken: list[ExchangeWay] = []
        self.decision = self.chooser.begin()

    def go(self, num_steps: int) -> Decision:
        end = self.step + num_steps
        while self.step < end:
            self.step += self.decision.num_steps
            way = self.decision.way
            self.taken += [way] * self.decision.num_steps
            steps = StepSeconds(self.true[way], self.error, self.least)
            self.decision = self.chooser.look(self.step, steps, self.forecasts)
            if self.decision.line:
                self.lines.append(f"{self.step}: {self.decision.line}")
        return self.decision

    def forecasts(self, present: ExchangeWay) -> Mapping[ExchangeWay, float]:
        self.num_forecasts += 1
        assert present in self.told
        return self.told


def test_a_way_that_is_faster_is_kept() -> None:
    run = Run({NONE: 0.390, BF16: 0.212}, {NONE: 0.4, BF16: 0.205})
    assert run.go(500).way == BF16
    assert run.lines == ["25: bf16 instead of none: 212 ms instead of 390 ms a step (predicted 205 ms)"]
    assert run.taken.count(NONE) == 13


def test_a_wrong_forecast_costs_a_trial() -> None:
    """A few steps of the first thousands, and fewer later. What is far slower ends sooner."""
    run = Run({NONE: 0.1, BF16: 0.3}, {NONE: 0.1, BF16: 0.01})
    assert run.go(1500).way == NONE
    assert run.lines == [
        "18: none again: bf16 was tried since step 13, 300 ms instead of 100 ms a step (predicted 10 ms)"
    ]
    assert run.taken.count(BF16) == 5
    run.go(20_000)
    assert run.taken.count(BF16) <= 5 * 4
    same = Run({NONE: 0.1, BF16: 0.099}, {NONE: 0.1, BF16: 0.01})
    assert same.go(1500).way == NONE
    assert same.taken.count(BF16) == 12


def test_another_way_is_tried_after_a_failure() -> None:
    run = Run({NONE: 0.1, BF16: 0.11, INT8: 0.05}, {NONE: 0.1, BF16: 0.01, INT8: 0.02})
    assert run.go(300).way == INT8
    assert [line.split(":")[0] for line in run.lines] == ["25", "87"]


def test_a_gain_within_the_noise_is_none() -> None:
    run = Run({NONE: 0.1, BF16: 0.09}, {NONE: 0.1, BF16: 0.08}, error=0.004)
    assert run.go(300).way == NONE
    assert Run({NONE: 0.1, BF16: 0.09}, {NONE: 0.1, BF16: 0.08}, error=0.001).go(300).way == BF16


def test_no_forecast_where_nothing_can_be_won() -> None:
    run = Run({NONE: 0.1, BF16: 0.05}, {NONE: 0.1, BF16: 0.05})
    run.least = 0.097
    assert run.go(5000).way == NONE
    assert run.num_forecasts == 0
    run.least = 0.09
    assert run.go(60).way == BF16


def test_a_change_of_the_step_time_is_looked_at() -> None:
    """The plain way has become the faster one again."""
    run = Run({NONE: 0.4, BF16: 0.2}, {NONE: 0.4, BF16: 0.2})
    assert run.go(200).way == BF16
    run.true, run.told = {NONE: 0.1, BF16: 0.13}, {NONE: 0.1, BF16: 0.13}
    assert run.go(150).way == NONE
    assert run.lines[1].endswith("none instead of bf16: 100 ms instead of 130 ms a step (predicted 100 ms)")


def test_step_times_that_go_up_and_down() -> None:
    """Each look differs from the one before by more than a quarter. What has failed is not tried each time."""
    run = Run({}, {NONE: 0.1, BF16: 0.01})
    for turn in range(200):
        run.true = {NONE: 0.1 if turn % 2 else 0.14, BF16: 0.3}
        run.go(50)
    assert 10 <= run.taken.count(BF16) <= 5 * 8


def test_forecasts_that_take_long() -> None:
    """2 s are a hundredth of 2000 steps."""
    run = Run({NONE: 0.1, BF16: 0.1}, {NONE: 0.1, BF16: 0.1})
    run.go(13)
    run.chooser.look_took(2.0)
    run.go(1950)
    assert run.num_forecasts == 1
    run.go(100)
    assert run.num_forecasts == 2


def test_what_a_checkpoint_has_is_no_trial() -> None:
    run = Run({NONE: 0.4, RING_1: 0.2}, {NONE: 0.4, RING_1: 0.2})
    trial = run.go(13)
    assert (trial.way, trial.kept) == (RING_1, NONE)
    assert run.go(12).kept == RING_1
    assert "none by ring in buckets of 1 MiB instead of none" in run.lines[0]


@pytest.mark.parametrize("predicted", [0.0951, 0.2])
def test_a_small_gain_is_not_tried(predicted: float) -> None:
    run = Run({NONE: 0.1, BF16: 0.01}, {NONE: 0.1, BF16: predicted})
    assert run.go(3000).way == NONE
    assert set(run.taken) == {NONE}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, process_time=lambda: self.now / 4)
        monkeypatch.setattr("mpitrain.strategies.chooser.time", clock)

    def step(self, parts: StepParts, computed: float, exposed: float) -> None:
        """Gradient 1 is in after half of the computation, gradient 0 at its end."""
        parts.begin()
        for index in (1, 0):
            self.now += computed / 2
            parts.ready(index)
        self.now += exposed
        parts.end(Overlap(computed, exposed, exposed))


def test_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, clock = StepParts(2), Clock(monkeypatch)
    parts.clear(2)
    assert parts.medians(with_ready=True) is None
    for computed, exposed in [(64, 64), (32, 32), (4, 1), (4, 3), (8, 0)]:  # the first two are left out
        clock.step(parts, computed, exposed)
    found = parts.medians(with_ready=True)
    assert found is not None
    assert (found.seconds, found.own_seconds, found.ready, found.busy_cores) == (7, 4, (4, 2), 0.25)
    assert found.error == pytest.approx(1.25 / 1.35 * 1.5 / 3**0.5)  # the quarters of 5, 7 and 8 are 6 and 7.5
    without = parts.medians(with_ready=False)
    assert without is not None
    assert without.ready == ()
    parts.clear(0)
    clock.step(parts, 2, 0)
    alone = parts.medians(with_ready=True)
    assert alone is not None
    assert (alone.seconds, alone.error) == (2, 0)


NAMES = ["rank 0 on lab1", "rank 1 on lab1", "rank 2 on lab2"]

GOOD = ProbeFinding(
    {"the gradient of w": "a", "the gradient of b": "b", "the loss": "c"},
    "",
    "",
    "openblas 1",
    "openblas 0.3 Zen",
    "EPYC",
)

OTHER = {**GOOD.digests, "the gradient of b": "x"}


def test_equal_findings_are_good() -> None:
    assert judge([GOOD] * 3, NAMES) == ""


def test_where_processors_differ_but_bits_do_not() -> None:
    assert judge([GOOD, GOOD, replace(GOOD, processor="Xeon", threads="openblas 4", kernels="mkl")], NAMES) == ""


@pytest.mark.parametrize(
    ("different", "remedy"),
    [
        ({"threads": "openblas 2"}, "Set OMP_NUM_THREADS to the same number on all hosts"),
        ({"processor": "Xeon"}, "OPENBLAS_CORETYPE"),
        ({"kernels": "openblas 0.3 Haswell"}, "Install the same versions"),
        ({}, "does the model read something that differs by rank"),
    ],
)
def test_a_rank_with_other_bits_and_what_to_do(different: dict[str, str], remedy: str) -> None:
    odd = replace(GOOD, digests=OTHER, **different)
    text = judge([GOOD, GOOD, odd], NAMES)
    assert text.startswith(
        "rank 2 on lab2: the gradient of b has other bits than on rank 0 on lab1, of the same samples"
    )
    assert odd.place in text and GOOD.place in text
    assert remedy in text


def test_a_missing_gradient_is_a_difference() -> None:
    digests = {"the gradient of w": "a", "the loss": "c"}
    assert "the gradient of b has other bits" in judge([GOOD, replace(GOOD, digests=digests)], NAMES[:2])


def test_a_second_pass_with_other_bits_comes_first() -> None:
    """A model that is not reproducible differs between ranks too, and that is not its fault."""
    text = judge([GOOD, replace(GOOD, digests=OTHER, again="the loss"), GOOD], NAMES)
    assert text.startswith("rank 1 on lab1: the loss has other bits when the same virtual rank is computed again")
