"""Copies of a state in memory, which of them a restart finds; and of parameters that are loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

import mpitrain as mt
from keeping import keeper
from mpitrain.launch.kept import KeeperLine
from mpitrain.state import memory_slot
from mpitrain.state.copies import KeptCopies, part_name, slots_of, state_name
from mpitrain.state.memory_slot import MemorySlot, read_copy
from mpitrain.state.names import split
from mpitrain.state.state_copies import StateCopies


@pytest.mark.parametrize("copies_before", [0, 1, 2])
@pytest.mark.parametrize("growth", [0, 10_000])
def test_a_step_that_is_copied_again(copies_before: int, growth: int) -> None:
    """An order in a pause changes the state after a step. The newest copy counts, whichever slot has it.

    The copy before stays until the new one is whole, also where the state grows and a slot needs more memory.
    """
    factor, text = 1.0, ""
    trained: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0, size=1, node_rank=0, node_ranks=(0,)),
        step_number=0,
        own_state=lambda *, reads: {},
        state=lambda: {"w": numpy.zeros(5), "factor": factor, "text": text},
    )

    def kept(line: KeeperLine) -> dict[tuple[int, int], float]:
        slots = slots_of(line, state_name(1))
        found = {slot.version: read_copy(slot.content()).state["factor"] for slot in slots if slot.step}
        for slot in slots:
            slot.close()
        return found

    with keeper() as name, closing(KeeperLine(name, "try")) as line:
        copies = StateCopies(SimpleNamespace(), 1, 0)
        copies._line = line
        for trained.step_number in range(1, copies_before + 1):
            copies._copy(trained)
        trained.step_number = 3
        before: dict[tuple[int, int], float] = {}
        for edition, factor in enumerate((0.5, 0.25, 0.125)):
            text += "x" * growth
            assert copies._copy(trained)[1] == ""
            found = kept(line)
            assert found[max(found)] == factor
            assert max(found) == (3, edition)
            assert before.items() <= found.items()
            before = {max(found): factor}
        copies._let_go()


def test_a_copy_that_is_being_written_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer may be killed at any array. Whoever has the memory must not find the header of the copy before."""
    slot, found = MemorySlot(), []

    def copy_to_host(value: Any, host: numpy.ndarray) -> None:
        seen = MemorySlot(os.dup(slot.descriptor))
        found.append((seen.step, seen.version))
        seen.close()
        host[...] = value

    monkeypatch.setattr(memory_slot, "copy_to_host", copy_to_host)
    for step in (3, 4):
        slot.write(step, 1, 1, *split({"v": numpy.full(2, step), "w": numpy.full(3, step)}))
        assert slot.version == (step, 1)
    assert found == [(0, (0, 0))] * 4
    slot.close()


def test_an_edition_that_is_not_complete() -> None:
    """A rank was killed before it copied its part of a later edition. A restart continues from the one before.

    What is left of the later one is dropped: the ranks that continue may copy another state as this edition.
    """
    world = mt.init()
    with keeper() as name, closing(KeeperLine(name, "try")) as line:
        for kept, editions in ((state_name(1), (0, 1)), (part_name(1, 0), (0,))):
            slots = [MemorySlot(), MemorySlot()]
            line.keep(kept, [slot.descriptor for slot in slots])
            for edition in editions:
                slots[edition].write(3, edition, 1, *split({"edition": edition}))
            for slot in slots:
                slot.close()
        for _ in range(2):  # the second time after the first has dropped it
            copies = KeptCopies(world, line, 1)
            assert (copies.version, copies.step) == ((3, 0), 3)
            copy = copies.read()
            assert (copy.step, copy.edition, copy.state) == (3, 0, {"edition": 0})
            assert copies.part(0) == {"edition": 0}
            copies.drop_newer()
            slots = slots_of(line, state_name(1))
            assert sorted(slot.version for slot in slots) == [(0, 0), (3, 0)]
            for slot in slots:
                slot.close()


def array_function() -> Any:
    values = {"w": numpy.zeros((3, 2), "float32"), "b": numpy.zeros(4, "float32")}
    return mt.ArrayFunction(lambda *_: 0.0, values, mt.optim.SGD(1.0))


def accumulated() -> Any:
    return mt.Accumulate(array_function(), per_rank_batch=2)


def module() -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def torch_module() -> Any:
    made = module()
    torch = pytest.importorskip("torch")
    return mt.TorchModule(made, lambda *_: 0.0, torch.optim.SGD(made.parameters(), lr=0.1))


def loop_model() -> Any:
    made = module()
    torch = pytest.importorskip("torch")
    from mpitrain.adapters.torch_buffers import ModuleBuffers
    from mpitrain.adapters.torch_trained import Trained
    from mpitrain.torch.local_gradients import LoopModel

    model = LoopModel(Trained(made, "a test"), ModuleBuffers(made), torch.optim.SGD(made.parameters(), lr=0.1))
    model.kept = made  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize("make", [array_function, accumulated, torch_module, loop_model])
def test_the_values_are_copied(make: Callable[[], Any]) -> None:
    model = make()
    values = {name: numpy.full_like(value, 2) for name, value in model.parameters().items()}
    assert len(values) > 1
    model.load_parameters(values)
    for value in values.values():
        value[...] = 3
    for name, value in model.parameters().items():
        numpy.testing.assert_array_equal(value, numpy.full_like(values[name], 2))
