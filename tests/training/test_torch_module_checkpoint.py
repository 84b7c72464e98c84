"""What TorchModule restores from a checkpoint: everything, or nothing if it does not fit."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_modules import X, adapted, bits, one_step, small, squares, with_optimizer  # noqa: E402

from mpitrain import TorchModule  # noqa: E402
from mpitrain.errors import CheckpointError  # noqa: E402
from mpitrain.optim import LossScale  # noqa: E402
from mpitrain.state.names import join, split  # noqa: E402

OPTIMIZERS = [
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
    + (("Adafactor",) if hasattr(torch.optim, "Adafactor") else ())
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda its: its.__name__)
def test_any_optimizer_steps_as_alone_and_goes_on_from_a_checkpoint(optimizer: Any) -> None:
    adapter, module = adapted(optimizer), small()
    alone = optimizer(module.parameters(), lr=0.1)
    for _ in range(3):
        alone.zero_grad()
        squares(module, torch.from_numpy(X)).backward()
        alone.step()
        one_step(adapter)
    for name, value in module.state_dict().items():
        # A running mean is the old one plus a change, which is one rounding more.
        numpy.testing.assert_allclose(adapter.parameters()[name], value.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
    tensors, values = split(adapter.state())
    state = join({**{name: its.copy() for name, its in tensors.items()}, **values})
    given = {name: its.tobytes() for name, its in tensors.items()}
    resumed = adapted(optimizer, small(1))
    resumed.restore(state)
    assert bits(resumed) == bits(adapter)
    one_step(adapter), one_step(resumed)
    assert bits(resumed) == bits(adapter)
    assert {name: its.tobytes() for name, its in split(state)[0].items()} == given  # the state was copied


def another_adam() -> TorchModule:
    """An adapter that has made a step with an Adam that keeps more state."""
    adapter = with_optimizer(lambda module: torch.optim.Adam(module.parameters(), amsgrad=True))()
    one_step(adapter)
    return adapter


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: adapted(torch.optim.SGD), "optimizer has an option betas, this SGD has none"),
        (
            lambda: adapted(module=torch.nn.Linear(3, 2)),
            "the checkpoint has nothing for weight, the model float32 (2, 3)",
        ),
        (lambda: adapted(module=small().double()), "has float32 (4, 3) for 0.weight, the model float64 (4, 3)"),
        (
            with_optimizer(lambda m: torch.optim.Adam([{"params": [its]} for its in m.parameters()])),
            "has 1 groups of par",
        ),
        (another_adam, "the checkpoint's optimizer state for 0.weight is step, exp_avg, exp_avg_sq, that of this Adam"),
    ],
)
def test_a_checkpoint_of_another_training_changes_nothing(other: Any, text: str) -> None:
    adapter = adapted(precision="float32")
    one_step(adapter)
    state = adapter.state()
    found = other()
    before = bits(found)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        found.restore(state)
    assert bits(found) == before


def test_a_damaged_state_changes_nothing() -> None:
    def scheduled() -> TorchModule:
        module = small()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
        return TorchModule(module, squares, optimizer, schedule=schedule, loss_scale=LossScale(8.0))

    adapter = scheduled()
    one_step(adapter)
    good = adapter.state()
    found = scheduled()
    before = bits(found)
    for damage, text in (
        ({"schedule": numpy.arange(9, dtype="u1")}, "the checkpoint's schedule cannot be read for MultiStepLR"),
        ({"loss_scale": {"value": 3.0}}, "the loss scale's state is {'value': 3.0}"),
        ({"optimizer": {**good["optimizer"], "step": -1}}, "the optimizer's step is -1; allowed: an int >= 0"),
        ({"optimizer": {**good["optimizer"], "state": {"odd": {}}}}, "optimizer state for odd; the module has no such"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(text)):
            found.restore({**good, **damage})
        assert bits(found) == before
    found.restore(good)
    assert bits(found) == bits(adapter)
    for _ in range(3):
        one_step(adapter), one_step(found)
    assert bits(found) == bits(adapter)
    assert adapter.state()["optimizer"]["groups"]["0"]["lr"] == pytest.approx(1e-3)


def test_state_that_is_of_no_parameter() -> None:
    module = small()
    optimizer = torch.optim.Adam(module.parameters())
    adapter = TorchModule(module, squares, optimizer)
    optimizer.state["global"] = {"count": 3}
    with pytest.raises(CheckpointError, match="Adam keeps a state under 'global', which is not a parameter"):
        adapter.state()
