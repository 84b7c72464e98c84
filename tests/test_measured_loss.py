"""The table of what sending less costs in loss: what follows from its rows, and that the page has its figures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import mpitrain as mt
from mpitrain import measured_loss
from mpitrain.compression import CODECS, check_compression
from mpitrain.measured_loss import (
    OF_FEW_ROUNDS,
    OF_THE_PAPER,
    TABLE,
    MeasuredLoss,
    local_updates_without_loss,
    loss_in_words,
    loss_with,
    rounds_without_loss,
    without_loss,
)
from mpitrain.reducer.by_network import codecs_by_network

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("mean", "interval", "seeds", "sync_every", "expected"),
    [
        (-0.0003, 0.0052, 3, 0, True),
        (0.0, 0.0051, 3, 0, False),  # the interval ends too high to choose it for a user
        (0.0, 0.0051, 3, 10, True),
        (0.0, 0.0251, 3, 10, False),
        (0.003, 0.002, 8, 0, False),  # a small loss, but a certain one
        (-0.004, 0.002, 8, 0, True),
        (0.0, 0.001, 2, 0, False),
        (0.0, None, 1, 0, False),
    ],
)
def test_what_costs_nothing(mean: float, interval: float | None, seeds: int, sync_every: int, expected: bool) -> None:
    assert MeasuredLoss("x", mean, interval, seeds, sync_every=sync_every).costs_nothing is expected


@pytest.mark.parametrize(
    ("compression", "expected"),
    [
        ("none", "none"), ("bf16", "none"), ("fp16", "rare"), ("int8", "rare"), ("int4", "rare"), ("top_k", "costs"),
        ("top_k:0.1:2", "costs"), ("power_sgd", "costs"), ("power_sgd:8", "costs"), ("int2", "not measured"),
    ],
)  # fmt: skip
def test_the_loss_with_each_codec(compression: str, expected: str) -> None:
    assert loss_with(compression) == expected


def test_a_training_shows_nothing_about_a_shorter_one() -> None:
    assert [bool(without_loss("int8", steps)) for steps in (60, 2999, 3000, None)] == [False, False, True, True]
    assert [bool(without_loss("bf16", steps)) for steps in (59, 60)] == [False, True]
    for every, outer, least in ((50, OF_FEW_ROUNDS, 60), (10, OF_THE_PAPER, 300)):
        assert rounds_without_loss("DiLoCo", every, outer, every * least - 1) is None
        row = rounds_without_loss("DiLoCo", every, outer, every * least)
        assert row is not None and row.rounds == least
    assert rounds_without_loss("DiLoCo", 50, OF_THE_PAPER) is None
    assert [row.sync_every for row in local_updates_without_loss("DiLoCo")] == [10, 50]
    assert local_updates_without_loss("LocalSGD") == []


def test_a_new_row_changes_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_rows(*rows: MeasuredLoss) -> None:
        monkeypatch.setattr(measured_loss, "TABLE", (*TABLE, *rows))

    with_rows(MeasuredLoss("DiLoCo", 0.04, 0.01, 3, sync_every=50, outer=OF_FEW_ROUNDS, parameters=900_000))
    assert rounds_without_loss("DiLoCo", 50, OF_FEW_ROUNDS) is None  # as many rounds, and a loss
    short = MeasuredLoss("DiLoCo", 0.04, 0.01, 3, sync_every=50, outer=OF_FEW_ROUNDS, steps=1000)
    with_rows(short)
    assert rounds_without_loss("DiLoCo", 50, OF_FEW_ROUNDS) is not None
    with_rows(MeasuredLoss("DiLoCo", 0.0, 0.01, 3, sync_every=250, outer=OF_FEW_ROUNDS, steps=15_000))
    assert [row.sync_every for row in local_updates_without_loss("DiLoCo")] == [10, 50, 250]
    with_rows(MeasuredLoss("int4", 0.0, 0.002, 3))
    assert codecs_by_network() == ["bf16", "int8", "int4"]
    with_rows(MeasuredLoss("power_sgd:4", 0.0, 0.002, 3, warm_up=1000))
    assert without_loss("power_sgd:4") is None  # it needs plain steps first, which no choice makes
    assert loss_with("power_sgd:4") == "rare"


def test_a_row_in_words() -> None:
    row = rounds_without_loss("DiLoCo", 50, OF_FEW_ROUNDS)
    assert str(row) == (
        "held-out loss -0.000 ± 0.023 nats (4 workers, 0.11 M parameters, 3000 steps, 60 rounds, 3 seeds)"
    )
    assert str(MeasuredLoss("int4", 0.0022)) == (
        "held-out loss +0.002 nats (4 workers, 0.11 M parameters, 3000 steps, 1 seed)"
    )


def test_a_setting_in_words() -> None:
    assert loss_in_words("int8", 1) == f"int8: {without_loss('int8')}"
    assert loss_in_words("top_k", 1).startswith("top_k:0.01: held-out loss +0.920 ± 0.012 nats (")
    assert loss_in_words("power_sgd:8", 1).startswith("power_sgd:8: held-out loss +0.0")
    assert loss_in_words("int2", 1) == "int2: the loss was not measured"
    assert loss_in_words("none", 50).startswith("mt.DiLoCo(sync_every=50, outer=mt.optim.SGD(1.0, momentum=0.8, ")
    assert loss_in_words("none", 20) == "rounds of 20 steps: none of them is known to lose nothing"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.way}-{row.sync_every}-{row.steps}")
def test_every_row_is_of_something_that_exists(row: MeasuredLoss) -> None:
    if row.sync_every:
        assert issubclass(getattr(mt, row.way), mt.LocalSGD.__mro__[1])
        assert row.rounds >= 1
    else:
        check_compression(row.way)
    assert (ROOT / row.source).is_file()
    assert math.isfinite(row.mean) and (row.interval is None) == (row.seeds == 1)


def test_network_chooses_among_what_lost_nothing() -> None:
    assert codecs_by_network() == [name for name in CODECS if name in ("bf16", "int8")]


def test_the_page_has_the_figures() -> None:
    """Those of three seeds and 3,000 steps, and no other with an interval in the part about the loss."""
    page = (ROOT / "docs/how-to/low-communication.md").read_text()
    shown = [row for row in TABLE if row.is_certain and row.steps >= 3000]
    assert len(shown) >= 5
    for row in shown:
        assert row.difference in page, row


def test_plain_steps_and_a_known_fault_are_said() -> None:
    assert str(MeasuredLoss("power_sgd:4", 0.0283, warm_up=1000)).endswith(
        "3000 steps, the first 1000 uncompressed, 1 seed)"
    )
    assert str(MeasuredLoss("fp16", 0.0, hazard="it overflows")).endswith("1 seed); it overflows")
