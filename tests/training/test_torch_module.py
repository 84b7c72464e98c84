"""The steps of TorchModule in one process: the gradients that it hands in, their norm, clipping and rates."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_modules import X, adapted, bits, one_step, small, squares  # noqa: E402

from mpitrain import Accumulate, TorchModule  # noqa: E402
from mpitrain.adapters.torch_arrays import tensor_of  # noqa: E402
from mpitrain.errors import ConfigError  # noqa: E402
from mpitrain.optim import LossScale  # noqa: E402
from mpitrain.reducer.bucket import plan_layout  # noqa: E402
from mpitrain.reducer.means import Remarks  # noqa: E402


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
    """A skipped step or an error changes nothing. Two passes of the forward function count once."""
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
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=0.1, weight_decay=0.1
    )  # weight decay would change a parameter with a gradient of zeros
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
    """Of 8 samples in pieces of 3, only the second piece, samples 3 to 5, uses the second layer."""
    calls = []

    def loss(module: Any, x: Any) -> Any:
        calls.append(len(x))
        out = module[0](x).square().mean()
        return out + module[1](x).square().mean() if len(calls) == 2 else out

    torch.manual_seed(0)  # some weights have sums that cancel, which float32 rounds more
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
    """The norm is over all parameters, also of two dtypes, but not over the changes of buffers."""
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


@pytest.mark.parametrize("is_scheduler", [False, True])
def test_a_scaled_rate_is_that_of_another_schedule(is_scheduler: bool) -> None:
    """Bit for bit, and a schedule of PyTorch does not see the factor."""

    def trained(factor: float, halves: bool) -> tuple[list[float], dict[str, bytes], list[float]]:
        module = small()
        optimizer = torch.optim.SGD([{"params": [p], "lr": 0.5} for p in module.parameters()], momentum=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        of_step = lambda step: 0.5 ** (step + 1) * (0.5 if halves and step >= 1 else 1.0)  # noqa: E731
        if is_scheduler and halves:  # rates 0.5, 0.125, 0.0625
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step * (0.5 if step else 1.0))
        adapter = TorchModule(module, squares, optimizer, schedule=scheduler if is_scheduler else of_step)
        rates = []
        for step in range(3):
            if step >= 1 and factor != 1.0:
                adapter.scale_next_rate(factor)
            gradients: dict[int, numpy.ndarray] = {}
            adapter.loss_and_gradients(X, lambda index, gradient: gradients.update({index: gradient.copy()}))  # noqa: B023
            plan = plan_layout(adapter.layout)
            flats = {dtype: numpy.zeros(count, dtype) for dtype, count in plan.counts.items()}
            for view, gradient in zip(plan.views(flats), gradients.values(), strict=False):
                view[...] = numpy.resize(gradient, view.shape)
            rates.append(adapter.apply_gradients(flats, Remarks()))
        values = {name: value.tobytes() for name, value in adapter.parameters().items()}
        return rates, values, [group["lr"] for group in optimizer.param_groups]

    scaled, expected = trained(0.5, False), trained(1.0, True)
    assert scaled[0] == expected[0] == [0.5, 0.125, 0.0625]
    assert scaled[1] == expected[1]
    assert set(scaled[2]) == {0.0625 if is_scheduler else 0.125}  # of the next step, or of the last one; not scaled
    with pytest.raises(ConfigError, match="factor of the learning rate is -1"):
        adapted().scale_next_rate(-1)
