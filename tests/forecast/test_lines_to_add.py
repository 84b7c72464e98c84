"""What a plan says last: the line to add, with its time and its loss, by made-up times of four nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpitrain import measured_loss
from mpitrain.forecast.lines_to_add import _PLACES, PlannedTraining, lines_to_add
from mpitrain.forecast.machines import equal_machines
from mpitrain.forecast.measured_steps import HostTimes, PartTimes
from mpitrain.forecast.planner import Forecast, Planner, _additions, plan_report
from mpitrain.forecast.ways import ExchangeWay
from mpitrain.measured_loss import OF_FEW_ROUNDS, TABLE, MeasuredLoss
from mpitrain.profile import DEFAULT
from mpitrain.training.trainer import Trainer

CODECS = (("bf16", 1e12), ("int8", 1e12), ("int4", 1e12), ("top_k", 1e12))
COSTS = replace(DEFAULT, add_bytes_per_second=1e16, copy_bytes_per_second=1e16, codecs=CODECS)
LOSSES = {
    "bf16": "training loss +0.001 ± 0.001 nats (2 workers, 0.23 M parameters, 60 steps, 8 seeds)",
    "int8": "held-out loss -0.000 ± 0.005 nats (4 workers, 0.11 M parameters, 3000 steps, 3 seeds)",
    "DiLoCo": "held-out loss -0.000 ± 0.023 nats (4 workers, 0.11 M parameters, 3000 steps, 60 rounds, 3 seeds); but "
    "with a model of another size held-out loss +0.045 nats (4 workers, 0.92 M parameters, 3000 steps, 60 rounds, "
    "1 seed)",
}
OUTER = "outer=mt.optim.SGD(1.0, momentum=0.8, nesterov=True)"


def said(
    front: str,
    total_steps: int = 0,
    *,
    rate: float = 12.5e6,
    nodes: int = 4,
    ppn: int = 1,
    told: int | None = None,
    num_bytes: int = 4_000_000,
    ranks: int = 4,
) -> list[str]:
    """The lines after the summary. A step of 8 samples takes 0.4 s on one rank; 1 M parameters are 6 MB of 4 nodes."""
    numbers = (1, 2, 4, 8)
    parts = tuple(
        PartTimes(number, 8 / number, 0.4 / number, (0.4 / number,), 0.4 / number, 0.4 / number, 10)
        for number in numbers
    )
    host = HostTimes("one", (("w", num_bytes),), parts, False, 10**8, 2.0, 1.0, {}, front, total_steps)
    machines = replace(equal_machines(nodes, bytes_per_second=rate, latency_seconds=0, ranks_per_node=ppn), costs=COSTS)
    planner = Planner([host], machines, is_profiled=False)
    report = plan_report(
        planner, [host], [ranks], lambda row: row.way.command(ranks, [], "", ["t.py"]), shows_all=False,
        tell=lambda _: None, total_steps=told,
    )  # fmt: skip
    assert list(report.answers).count(report.title) == 1
    return list(report.answers[report.answers.index(report.title) + 1 :])


def test_a_trainer_of_many_steps() -> None:
    """6 MB at 12.5 MB/s are 480 ms, int8's 122 ms, those of DiLoCo(50) 9.6 ms a step; a rank computes 100 ms."""
    setting, local = said("Trainer", 3000)
    assert setting == (
        "4 ranks: add MPITRAIN_COMPRESSION=int8 before the command: 222 ms a step in place of 580 ms, 2.61 times as "
        f"fast; {LOSSES['int8']}; not measured with 1 M parameters"
    )
    assert local == (
        f"4 ranks: add mt.DiLoCo(sync_every=50, {OUTER}) as the strategy of mt.Parts(): 110 ms a step in place of 580 "
        f"ms, 5.29 times as fast; {LOSSES['DiLoCo']}; not measured with 1 M parameters"
    )
    *_, local = said("Trainer", 12_000)
    assert local.endswith("; not measured with 1 M parameters, 240 rounds")


def test_what_was_not_measured_is_said() -> None:
    *_, local = said("Trainer", 3000, rate=1e6, num_bytes=4 * 200_000)
    assert local.endswith(LOSSES["DiLoCo"])  # less than twice as large, 4 ranks, 60 rounds
    *_, local = said("Trainer", 3000, nodes=8, ranks=8)
    assert local.endswith("; not measured with 1 M parameters, 8 ranks")


def test_a_loop_does_not_say_how_many_steps_it_makes() -> None:
    *_, local = said("prepare")
    assert (
        f"add strategy=mt.DiLoCo(sync_every=50, {OUTER}) in mpitrain.torch.prepare(), and "
        "mpitrain.torch.end_round(model) before the model is evaluated or saved: 110 ms a step"
    ) in local
    assert "; only for trainings of at least 3000 steps (--total-steps); not measured with" in local
    assert said("prepare", told=3000) == [
        line.replace("only for trainings of at least 3000 steps (--total-steps); ", "") for line in said("prepare")
    ]


@pytest.mark.parametrize(("steps", "setting"), [(2999, "bf16"), (60, "bf16"), (3000, "int8")])
def test_a_short_training(steps: int, setting: str) -> None:
    lines = said("TorchTrainer", steps)
    assert any(f"add MPITRAIN_COMPRESSION={setting} before" in line and LOSSES[setting] in line for line in lines)
    if steps == 3000:
        assert f"add strategy=mt.DiLoCo(sync_every=50, {OUTER}) in mpitrain.torch.Trainer(): " in lines[-1]
        return
    assert lines[0] == (
        f"4 ranks: mt.DiLoCo(sync_every=50, {OUTER}) would take 110 ms a step, but lost nothing only with 60 rounds, "
        f"which are 3000 steps; this training has {steps}"
    )
    assert "DiLoCo" not in " ".join(lines[1:])


def test_the_option_goes_before_the_script() -> None:
    assert said("Trainer", 10**6, told=500) == said("Trainer", 500)


def test_nothing_to_add() -> None:
    nothing = ["4 ranks: nothing to add: no way without loss is faster by more than noise"]
    assert said("Trainer", 3000, rate=1e12) == nothing
    assert said("Trainer", 59, rate=1e12) == nothing
    assert said("Trainer", 3000, nodes=1, ppn=4) == []  # on one node nothing travels


def test_local_updates_do_not_fit_a_gradient_reducer() -> None:
    (line,) = said("", 3000)
    assert "MPITRAIN_COMPRESSION=int8" in line


def test_a_row_of_the_table_is_enough_for_a_longer_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = MeasuredLoss("DiLoCo", 0.0, 0.01, 3, sync_every=250, outer=OF_FEW_ROUNDS, steps=15_000)
    monkeypatch.setattr(measured_loss, "TABLE", (*TABLE, rows))
    *_, local = said("Trainer", 15_000, rate=1e6)  # 120 ms a step with H = 50, 24 ms with 250
    assert "add mt.DiLoCo(sync_every=250, " in local
    lines = said("Trainer", 3000, rate=1e6)
    assert "sync_every=250" in lines[0] and "15000 steps; this training has 3000" in lines[0]
    assert "add mt.DiLoCo(sync_every=50, " in lines[-1]


def test_the_size_of_buckets_belongs_to_the_line() -> None:
    part = PartTimes(1, 8, 0.1, (0.1,), 0.1, 0.1, 10)
    host = HostTimes("one", (("w", 4_000_000),), (part,), True, 10**8, 2.0, 1.0, {})
    planner = Planner([host], equal_machines(4), is_profiled=False)
    plain = Forecast(4, ExchangeWay("ring"), 0.5, 32, 1.0, 6e6, "compute")
    resized = replace(plain, way=ExchangeWay("auto", "int8", 16), step_seconds=0.2, wire_bytes=2e6)
    (line,) = lines_to_add(planner, [resized, plain], plain, PlannedTraining("", 3000, 4_000_000))
    assert line.startswith("4 ranks: add MPITRAIN_COMPRESSION=int8 MPITRAIN_BUCKET_MIB=16 before the command: 200 ms a")


def test_another_size_of_buckets_alone() -> None:
    part = PartTimes(1, 8, 0.1, (0.1,), 0.1, 0.1, 10)
    host = HostTimes("one", (("w", 4_000_000),), (part,), True, 10**8, 2.0, 1.0, {})
    planner = Planner([host], equal_machines(4), is_profiled=False)
    plain = Forecast(4, ExchangeWay("ring"), 0.5, 32, 1.0, 6e6, "compute")
    resized = replace(plain, way=ExchangeWay("ring", bucket_mib=16), step_seconds=0.3)
    (line,) = _additions(planner, host, {4: [resized, plain]}, 3000)
    settings = "MPITRAIN_ALGORITHM=ring MPITRAIN_BUCKET_MIB=16"
    assert line == (
        f"4 ranks: add {settings} before the command: 300 ms a step in place of 500 ms, 1.67 times as fast; the loss "
        "does not change"
    )


def test_every_kind_of_trainer_has_its_place() -> None:
    assert Trainer.__name__ in _PLACES
    assert said("MyTrainer", 3000) == said("Trainer", 3000)
