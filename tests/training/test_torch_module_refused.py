"""What TorchModule refuses, and what it restores from a checkpoint: everything, or nothing if it does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from torch_modules import X, adapted, bits, one_step, small, squares, with_optimizer

from mpitrain import TorchModule
from mpitrain.errors import CheckpointError, ConfigError, DeviceError, GradientError
from mpitrain.optim import LossScale, constant
from mpitrain.state.names import join, split

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def with_buffer(value: Any) -> Any:
    module = small()
    module.register_buffer("odd", value)
    return module


def refused(**options: Any) -> Callable[[], Any]:
    return lambda: adapted(**options)


def plateau() -> Any:
    module = small()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return TorchModule(module, squares, optimizer, schedule=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def unequal(module: Any) -> Any:
    rest = [*module[1].parameters(), *module[2].parameters()]
    return torch.optim.SGD([{"params": module[0].parameters(), "lr": 0.5}, {"params": rest}], lr=0.1)


def of(make: Callable[[Any], Any]) -> Callable[[], Any]:
    return with_optimizer(lambda module: make(module.parameters()))


def coupled() -> Any:
    return adapted(schedule=torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(2)]), 1))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (of(torch.optim.LBFGS), ConfigError, "LBFGS computes the loss again with"),
        (of(torch.optim.SparseAdam), ConfigError, "SparseAdam needs sparse"),
        (of(lambda all_: torch.optim.SGD([*all_][:2])), ConfigError, "1.weight is trained (requires_gr"),
        (
            of(lambda all_: torch.optim.SGD([*all_, torch.nn.Parameter(torch.ones(7))])),
            ConfigError,
            "of shape (7,) that",
        ),
        (refused(module=torch.nn.Linear(3, 2).requires_grad_(False)), ConfigError, "has no parameters to train"),
        (refused(module=torch.nn.Linear(3, 2, device="meta")), DeviceError, "weight is on meta; TorchModule trains on"),
        (refused(module=torch.nn.LazyLinear(2)), ConfigError, "weight has no shape yet; run a batch through"),
        (lambda: adapted(module=with_buffer(torch.ones(2) * 1j)), ConfigError, "the buffer odd is torch.complex64"),
        (refused(precision="fp8"), ConfigError, "there is no precision 'fp8'; known: float32, bf16, fp16"),
        (lambda: adapted(module=small().double(), precision="bf16"), ConfigError, "0.weight is float64; parameters"),
        (refused(clip_norm=0.0), ConfigError, "clip_norm is 0.0; allowed: None or a finite number > 0"),
        (refused(schedule=0.1), ConfigError, "schedule is 0.1, for groups with the rates 0.1; a function"),
        (
            with_optimizer(unequal, schedule=constant(0.1)),
            ConfigError,
            "for groups with the rates 0.1, 0.5; a function",
        ),
        (plateau, ConfigError, "ReduceLROnPlateau needs a metric"),
        (coupled, ConfigError, "the schedule belongs to another optimizer"),
    ],
)
def test_what_cannot_be_trained(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda module, x: module(x).square().sum(1), "the loss is torch.float32 (8,); it must be a tensor of one"),
        (lambda module, x: 1.5, "the loss is float; it must be a tensor of one number"),
        (lambda module, x: module(x).mean().detach(), "the loss depends on no parameter"),
    ],
)
def test_a_loss_that_is_none(loss: Any, text: str) -> None:
    module = small()
    adapter = TorchModule(module, loss, torch.optim.SGD(module.parameters(), lr=0.1))
    before = bits(adapter)
    with pytest.raises(GradientError, match=re.escape(text)):
        one_step(adapter)
    assert bits(adapter) == before


def test_what_must_not_change_after_the_start() -> None:
    def thaw(module: Any) -> None:
        module[0].weight.requires_grad_(True)

    def freeze(module: Any) -> None:
        module[2].bias.requires_grad_(False)

    def replace(module: Any) -> None:
        module[2].bias = torch.nn.Parameter(torch.zeros(2))

    for change, name in ((thaw, "0.weight"), (freeze, "2.bias"), (replace, "2.bias")):
        module = small()
        module[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD([its for its in module.parameters() if its.requires_grad], lr=0.1)
        adapter = TorchModule(module, squares, optimizer)
        one_step(adapter)
        change(module)
        with pytest.raises(GradientError, match=re.escape(f"{name} was added, replaced, frozen or thawed after")):
            one_step(adapter)


def test_gradients_that_cannot_be_exchanged() -> None:
    module = torch.nn.Embedding(5, 2, sparse=True)
    adapter = TorchModule(module, squares, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(GradientError, match=r"the gradient of weight is torch.sparse_coo .* at TorchModule\(\) it"):
        one_step(adapter, numpy.arange(5))

    def twice(module: Any, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        x = x.clone().requires_grad_()
        return sum(checkpoint(module, x * its, use_reentrant=True).square().mean() for its in (1, 2))

    module = torch.nn.Linear(3, 2)
    adapter = TorchModule(module, twice, torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(GradientError, match=r"came twice in one step\. With torch\.utils.*use_reentrant=False"):
        one_step(adapter, X)


def test_a_backward_pass_of_somebody_else_is_left_alone() -> None:
    module = small()
    adapter = TorchModule(module, squares, torch.optim.SGD(module.parameters(), lr=0.1))
    squares(module, torch.from_numpy(X)).backward()
    assert module[0].weight.grad is not None
    _, found = one_step(adapter)
    _, expected = one_step(adapted(torch.optim.SGD))
    for name in ("0.weight", "2.bias"):
        numpy.testing.assert_array_equal(found[name], expected[name])


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
    adapter = of(lambda parameters: torch.optim.Adam(parameters, amsgrad=True))()
    one_step(adapter)
    return adapter


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: adapted(torch.optim.SGD), "optimizer has an option betas, this SGD has none"),
        (lambda: adapted(module=torch.nn.Linear(3, 2)), "has nothing for weight, the model float32 (2, 3)"),
        (lambda: adapted(module=small().double()), "has float32 (4, 3) for 0.weight, the model float64 (4, 3)"),
        (of(lambda all_: torch.optim.Adam([{"params": [one]} for one in all_])), "has 1 groups of par"),
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
