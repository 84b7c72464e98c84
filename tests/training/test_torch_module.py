"""TorchModule in one process: what it refuses, what it hands in, what a checkpoint of it holds."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mpitrain import Accumulate, LossScale, TorchModule, constant  # noqa: E402
from mpitrain.adapters.torch_arrays import tensor_of  # noqa: E402
from mpitrain.errors import CheckpointError, ConfigError, DeviceError, GradientError  # noqa: E402
from mpitrain.exchange.bucket import plan_layout  # noqa: E402
from mpitrain.exchange.remarks import Remarks, remarks_of  # noqa: E402
from mpitrain.training.checkpoint.names import join, split  # noqa: E402

X = numpy.random.default_rng(0).standard_normal((8, 3)).astype("float32")


def squares(module: Any, batch: Any) -> Any:
    return module(batch).square().mean()


def small(seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def adapted(optimizer: Callable[..., Any] = torch.optim.Adam, module: Any = None, **options: Any) -> TorchModule:
    module = module or small()
    return TorchModule(module, squares, optimizer(module.parameters(), lr=0.1), **options)


def one_step(adapter: Any, batch: Any = X) -> tuple[float, dict[str, numpy.ndarray]]:
    """A step as the strategy Sync makes it on one rank: the loss and copies of what was handed in, by name."""
    plan = plan_layout(adapter.layout)
    flats = {dtype: numpy.full(count, numpy.nan, dtype) for dtype, count in plan.counts.items()}
    views = plan.named(flats)
    names = list(views)

    unused = []

    def on_gradient(index: int, gradient: numpy.ndarray | None) -> None:
        assert numpy.isnan(views[names[index]].astype("f8")).all(), "twice"
        if gradient is None:
            unused.append(index)
            gradient = numpy.zeros_like(views[names[index]])
        numpy.copyto(views[names[index]], gradient, casting="no")

    loss = adapter.loss_and_gradients(batch, on_gradient)
    remarks = remarks_of([(tuple(unused), adapter.note())])
    if adapter.loss_scale:
        for flat in flats.values():
            flat[:] = flat / adapter.loss_scale.value
    handed_in = {name: view.copy() for name, view in views.items()}
    adapter.apply_gradients(flats, remarks)
    return loss, handed_in


def bits(adapter: TorchModule) -> dict[str, bytes]:
    tensors, values = split(adapter.state())
    return {name: its.tobytes() for name, its in tensors.items()} | {
        name: repr(its).encode() for name, its in values.items()
    }


# -- steps ---------------------------------------------------------------------------------------------------------


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
        # A running mean is what it was, plus the change: one rounding more.
        numpy.testing.assert_allclose(adapter.parameters()[name], value.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
    tensors, values = split(adapter.state())
    state = join({**{name: its.copy() for name, its in tensors.items()}, **values})
    given = {name: its.tobytes() for name, its in tensors.items()}
    resumed = adapted(optimizer, small(1))
    resumed.restore(state)
    assert bits(resumed) == bits(adapter)
    one_step(adapter), one_step(resumed)
    assert bits(resumed) == bits(adapter)
    assert {name: its.tobytes() for name, its in split(state)[0].items()} == given  # it was copied


def test_gradients_come_during_the_backward_pass_last_layer_first() -> None:
    adapter = adapted()
    order = []
    adapter.loss_and_gradients(X, lambda index, _: order.append(adapter.layout[index].name))
    assert order[:2] == ["1.running_mean", "1.running_var"]
    assert sorted(order) == sorted(parameter.name for parameter in adapter.layout)
    assert max(order.index("2.weight"), order.index("2.bias")) < min(order.index("0.weight"), order.index("0.bias"))


def test_a_batch_of_no_samples() -> None:
    adapter = adapted()
    before = bits(adapter)
    handed_in: dict[int, Any] = {}
    assert adapter.loss_and_gradients(X[:0], handed_in.__setitem__) == 0.0
    assert sorted(handed_in) == list(range(len(adapter.layout)))
    for index, parameter in enumerate(adapter.layout):
        if parameter.name.startswith("1.running"):
            numpy.testing.assert_array_equal(handed_in[index], numpy.zeros(parameter.shape, parameter.dtype))
        else:
            assert handed_in[index] is None
    assert adapter.note() is None
    assert bits(adapter) == before


def test_a_batch_is_seen_without_a_copy_where_it_may_be_written() -> None:
    seen = []

    def loss(module: Any, batch: Any) -> Any:
        seen.append(batch)
        return squares(module, batch["x"])

    module = small()
    adapter = TorchModule(module, loss, torch.optim.SGD(module.parameters(), lr=0.1))
    fixed = X.copy()
    fixed.flags.writeable = False
    for x in (X, fixed, X[::-1]):
        one_step(adapter, {"x": x, "more": [numpy.arange(8), 2.5, None]})
        assert numpy.array_equal(seen[-1]["x"].numpy(), x)
        assert numpy.shares_memory(seen[-1]["x"].numpy(), x) == (x is X)
        assert seen[-1]["more"][1:] == [2.5, None]


def test_a_step_leaves_buffers_alone_until_it_is_made() -> None:
    """A step that is skipped, or an error, changes nothing; a pass of the forward function twice counts once."""
    adapter = adapted(precision="fp16", loss_scale=LossScale(2.0**12))
    before = bits(adapter)
    handed_in: dict[int, numpy.ndarray] = {}
    adapter.loss_and_gradients(X, handed_in.__setitem__)
    assert bits(adapter) == before
    names = [parameter.name for parameter in adapter.layout]
    changes = {name: handed_in[names.index(name)] / 2.0**12 for name in names if name.startswith("1.r")}
    one_step(adapter)
    found = adapter.parameters()
    assert found["1.num_batches_tracked"] == 1
    numpy.testing.assert_array_equal(found["1.running_mean"], changes["1.running_mean"])  # it was 0
    numpy.testing.assert_array_equal(found["1.running_var"], 1 + changes["1.running_var"])


def test_an_unused_parameter_is_left_alone_and_named_once() -> None:
    module = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)])
    which = [0]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.1)  # would decay one with zeros
    adapter = TorchModule(module, lambda module, x: module[which[0]](x).square().mean(), optimizer)
    before = [layer.weight.detach().clone() for layer in module]
    with pytest.warns(UserWarning, match=r"no rank's loss depends on .*, so the optim.*: 1\.bias, 1\.weight\."):
        one_step(adapter)
    assert not torch.equal(module[0].weight, before[0])
    assert torch.equal(module[1].weight, before[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(adapter)
    which[0] = 1
    before = [layer.weight.detach().clone() for layer in module]
    with pytest.warns(UserWarning, match=r"no rank's loss depends on .*: 0\.bias, 0\.weight\."):
        one_step(adapter)
    assert torch.equal(module[0].weight, before[0])
    assert not torch.equal(module[1].weight, before[1])


def test_a_parameter_that_some_pieces_use_has_a_gradient() -> None:
    """Of 8 samples in pieces of 3 only the second piece, number 3 to 5, uses the second layer."""
    calls = []

    def loss(module: Any, x: Any) -> Any:
        calls.append(len(x))
        out = module[0](x).square().mean()
        return out + module[1](x).square().mean() if len(calls) == 2 else out

    module = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)])
    alone = copy.deepcopy(module)
    adapter = TorchModule(module, loss, torch.optim.SGD(module.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, handed_in = one_step(Accumulate(adapter, per_rank_batch=3))
    assert calls == [3, 3, 2]
    (alone[1](torch.from_numpy(X[3:6])).square().mean() * (3 / 8)).backward()
    numpy.testing.assert_allclose(handed_in["1.weight"], alone[1].weight.grad, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_and_clipping(dtype: Any) -> None:
    """Over all parameters, but not the changes of buffers; of two dtypes too."""
    module = small()
    module[2].to(dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def loss(module: Any, x: Any) -> Any:
        return module[2](module[1](module[0](x)).to(dtype)).float().square().mean()

    adapter = TorchModule(module, loss, optimizer, clip_norm=0.125)
    before = {name: value.astype("f8") for name, value in adapter.parameters().items()}
    assert adapter.gradient_norm() is None
    _, found = one_step(adapter)
    names = dict(module.named_parameters())
    norm = math.sqrt(sum(float((found[name].astype("f8") ** 2).sum()) for name in names))
    assert norm > 0.2
    assert adapter.gradient_norm() == pytest.approx(norm, rel=1e-6)
    for name in names:
        step = before[name] - adapter.parameters()[name].astype("f8")
        rough = 2.0**-8 if found[name].dtype == "bfloat16" else 2.0**-22
        numpy.testing.assert_allclose(step, found[name].astype("f8") * 0.125 / norm, atol=4 * rough, err_msg=name)
    plain = TorchModule(module, loss, optimizer)
    plain.measure_gradient_norm()
    one_step(plain)
    assert plain.gradient_norm() is not None
    one_step(plain)
    assert plain.gradient_norm() is None
    assert tensor_of(plain.parameters()["2.weight"]).dtype == dtype


def test_accumulate_passes_everything_on() -> None:
    adapter = Accumulate(adapted(precision="bf16", clip_norm=1.0), per_rank_batch=3)
    assert str(adapter.precision) == "bfloat16"
    one_step(adapter)
    assert adapter.gradient_norm() is not None
    assert adapter.parameters()["1.num_batches_tracked"] == 1  # three pieces are one step
    plain = Accumulate(adapted(), per_rank_batch=3)
    plain.measure_gradient_norm()
    one_step(plain)
    assert plain.gradient_norm() is not None


def test_a_schedule_sets_the_rate_of_every_group() -> None:
    module = small()
    groups = [{"params": module[0].parameters()}, {"params": [*module[1].parameters(), *module[2].parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    adapter = TorchModule(module, squares, optimizer, schedule=lambda step: 0.5 ** (step + 1))
    handed_in: dict[int, numpy.ndarray] = {}
    flats = lambda: {its: numpy.zeros(n, its) for its, n in plan_layout(adapter.layout).counts.items()}  # noqa: E731
    adapter.loss_and_gradients(X, handed_in.__setitem__)
    assert [adapter.apply_gradients(flats(), Remarks()) for _ in range(3)] == [0.5, 0.25, 0.125]
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    other = TorchModule(module, squares, optimizer, schedule=lambda step: math.nan)
    with pytest.raises(ConfigError, match="learning_rate at step 0 is nan; allowed: a finite number >= 0"):
        other.apply_gradients(flats(), Remarks())


# -- what is refused -------------------------------------------------------------------------------------------------


def frozen() -> Any:
    return small().requires_grad_(False)


def with_buffer(value: Any) -> Any:
    module = small()
    module.register_buffer("odd", value)
    return module


def refused(**options: Any) -> Callable[[], Any]:
    return lambda: adapted(**options)


def with_optimizer(make: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        module = small()
        return TorchModule(module, squares, make(module), **options)

    return call


def plateau() -> Any:
    module = small()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return TorchModule(module, squares, optimizer, schedule=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def unequal(module: Any) -> Any:
    rest = [*module[1].parameters(), *module[2].parameters()]
    return torch.optim.SGD([{"params": module[0].parameters(), "lr": 0.5}, {"params": rest}], lr=0.1)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            with_optimizer(lambda m: torch.optim.LBFGS(m.parameters())),
            ConfigError,
            "LBFGS computes the loss again with",
        ),
        (with_optimizer(lambda m: torch.optim.SparseAdam(m.parameters())), ConfigError, "SparseAdam needs sparse"),
        (with_optimizer(lambda m: torch.optim.SGD(m[0].parameters())), ConfigError, "1.weight is trained (requires_gr"),
        (
            with_optimizer(lambda m: torch.optim.SGD([*m.parameters(), torch.nn.Parameter(torch.ones(7))])),
            ConfigError,
            "the optimizer has a parameter of shape (7,) that the module does not have",
        ),
        (refused(module=torch.nn.Linear(3, 2).requires_grad_(False)), ConfigError, "has no parameters to train"),
        (refused(module=torch.nn.Linear(3, 2, device="meta")), DeviceError, "weight is on meta; TorchModule trains on"),
        (refused(module=torch.nn.LazyLinear(2)), ConfigError, "weight has no shape yet; run a batch through"),
        (lambda: adapted(module=with_buffer(torch.ones(2) * 1j)), ConfigError, "the buffer odd is torch.complex64"),
        (refused(precision="fp8"), ConfigError, "there is no precision 'fp8'; known: float32, bf16, fp16"),
        (
            lambda: adapted(module=small().double(), precision="bf16"),
            ConfigError,
            "0.weight is torch.float64; parameters",
        ),
        (refused(clip_norm=0.0), ConfigError, "clip_norm is 0.0; allowed: None or a finite number > 0"),
        (refused(schedule=0.1), ConfigError, "schedule is 0.1, for groups with the rates 0.1; a function"),
        (
            with_optimizer(unequal, schedule=constant(0.1)),
            ConfigError,
            "for groups with the rates 0.1, 0.5; a function",
        ),
        (plateau, ConfigError, "ReduceLROnPlateau needs a metric"),
        (
            refused(schedule=torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(2)]), 1)),
            ConfigError,
            "the schedule belongs to another optimizer",
        ),
    ],
)
def test_what_cannot_be_trained(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            lambda module, x: module(x).square().sum(1),
            "the loss is torch.float32 (8,); it must be a tensor of one numb",
        ),
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
    with pytest.raises(GradientError, match="was handed in twice in one backward pass; with torch"):
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


def another_adam() -> TorchModule:
    """An Adam with more state, which has made a step."""
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
