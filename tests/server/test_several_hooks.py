"""Hooks of a run with several servers: they see the whole model, and what they change reaches all servers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from several_servers import OPTIMIZERS, SHAPES, Everything, bits, several

import mpitrain as mt
from mpitrain.server.shards import Shards


def test_hooks_see_the_whole_model_and_cost_nothing_if_they_do_not_read_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: Counter[str] = Counter()
    tell = Shards._tell

    def counted(self: Any, kind: str, fields: Any) -> None:
        told[kind] += 1
        tell(self, kind, fields)

    monkeypatch.setattr(Shards, "_tell", counted)
    seen = []
    for number in (1, 3):
        hook = Everything()
        several(number, SHAPES["tensors"], OPTIMIZERS["adamw"], [hook])
        seen.append(hook.seen)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 7
    assert told["fetch"] == 7  # once for each step

    told.clear()
    hooks = [mt.Log(), mt.Record([mt.writers.JsonLines(tmp_path)], steps=1), mt.Checkpoint(tmp_path, steps=3)]
    several(3, SHAPES["tensors"], OPTIMIZERS["adamw"], hooks)
    assert told["fetch"] == 3  # steps 3 and 6, and the last one, 7


def test_what_hooks_change_reaches_all_servers() -> None:
    """Parameters before and after steps, and the optimizer: by restoring an earlier state of the model."""

    class Meddle(mt.Hook):
        def before_step(self, trainer: mt.Trainer) -> None:
            for value in trainer.adapter.parameters().values():
                value[...] = 1.5 * value
            if trainer.step_number == 2:
                state = trainer.adapter.state()
                self.kept = {
                    "parameters": {name: value.copy() for name, value in state["parameters"].items()},
                    "optimizer": {
                        key: value if isinstance(value, int) else {name: one.copy() for name, one in value.items()}
                        for key, value in state["optimizer"].items()
                    },
                }

        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            trainer.adapter.parameters()["d"][...] += 1.0
            if step.number == 5:
                trainer.adapter.restore(self.kept)

    found = [bits(several(number, SHAPES["tensors"], OPTIMIZERS["adamw"], [Meddle()])[0]) for number in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    assert found[0]["step"] == 4


def test_a_rate_that_a_hook_changes_is_the_rate_of_all_servers() -> None:
    """The schedule of the first server alone counts."""
    rate = [0.1]

    class Lower(mt.Hook):
        def after_step(self, trainer: mt.Trainer, step: mt.Step) -> None:
            rate[0] /= 2

    def optimizer() -> mt.optim.SGD:
        first, rates = not made, rate
        made.append(True)
        return mt.optim.SGD(lambda step: rates[0] if first else 1e6)

    found = []
    for number in (1, 3):
        rate[0], made = 0.1, []
        found.append(bits(several(number, SHAPES["tensors"], optimizer, [Lower()])[0]))
    assert found[0] == found[1]
