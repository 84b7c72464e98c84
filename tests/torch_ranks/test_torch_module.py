"""A PyTorch module under the Trainer: on any number of ranks it is trained as by PyTorch alone in one process."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

from mpitrain import CompareReplicas, Hook, Step, StopAtStep, TorchModule, Trainer, World
from mpitrain.data.order import permuted
from mpitrain.optim import LossScale
from mpitrain.reducer.bucket import plan_layout
from mpitrain.reducer.means import remarks_of
from mpitrain.state.names import split
from mpitrain.world.shard import part_of
from tests.ranks.common import assert_same_bits

from .torch_modules import COUNT, GLOBAL_BATCH, SEED, STEPS, Net, Normed, adam, builder, made, mean_loss, samples, sgd


class Record(Hook):
    """A hook that keeps every step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.steps.append(step)


def batches() -> Iterator[numpy.ndarray]:
    """The numbers of the samples of every step."""
    epoch = 0
    while True:
        order = permuted(numpy.arange(COUNT), COUNT, (SEED, epoch))
        yield from (order[begin : begin + GLOBAL_BATCH] for begin in range(0, COUNT, GLOBAL_BATCH))
        epoch += 1


def bare_torch(kind: Any, optimizer: Any, parts: int) -> tuple[dict[str, numpy.ndarray], list[float], list[float]]:
    """The same training by PyTorch alone: state_dict, losses, rates.

    The batch is in so many parts, because batch norm looks at a part alone. Each part goes through a copy of the
    module, and the mean of the gradients is weighted by samples.
    """
    module = made(kind)
    its_optimizer, options = optimizer(module)
    schedule, clip_norm = options["schedule"], options.get("clip_norm")
    x, y = (torch.from_numpy(its) for its in samples())
    trained = {name: its for name, its in module.named_parameters() if its.requires_grad}
    losses, rates = [], []
    for step, chosen in zip(range(STEPS), batches(), strict=False):
        gradients: dict[str, Any] = {}
        buffers = {name: torch.zeros_like(its, dtype=torch.float64) for name, its in module.named_buffers()}
        loss = 0.0
        for part in (part_of(len(chosen), number, parts) for number in range(parts)):
            share = (part.stop - part.start) / len(chosen)
            if not share:
                continue
            replica = copy.deepcopy(module)
            its_loss = cross_entropy(replica(x[chosen[part]]), y[chosen[part]])
            its_loss.backward()
            loss += share * its_loss.item()
            for name, its in replica.named_parameters():
                if its.grad is not None:
                    gradients[name] = gradients.get(name, 0) + share * its.grad
            for name, its in replica.named_buffers():
                buffers[name] += share * its
        for name, its in trained.items():
            its.grad = gradients.get(name)
        if clip_norm:
            norm = math.sqrt(sum(float((its**2).sum()) for its in gradients.values()))
            torch._foreach_mul_(list(gradients.values()), min(1.0, clip_norm / norm))
        if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
            rates.append(its_optimizer.param_groups[0]["lr"])
            its_optimizer.step()
            schedule.step()
        else:
            rates.append(schedule(step))
            for group in its_optimizer.param_groups:
                group["lr"] = rates[-1]
            its_optimizer.step()
        losses.append(loss)
        for name, its in module.named_buffers():
            its.copy_(buffers[name] if its.is_floating_point() else buffers[name].round())
    return {name: its.detach().numpy() for name, its in module.state_dict().items()}, losses, rates


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize(("kind", "optimizer"), [(Net, sgd), (Net, adam), (Normed, adam)])
def test_training_equals_pytorch_alone(world: World, kind: Any, optimizer: Any, most: int | None) -> None:
    if kind is Normed and most:
        pytest.skip("in pieces the batch norm is another one")
    record = Record()
    trainer = Trainer(builder(kind, optimizer, most=most), [StopAtStep(STEPS), record, CompareReplicas(1)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    texts = [str(warning.message).partition(".")[0] for warning in caught]
    unused = "no rank's loss depends on these parameters, so the optimizer leaves them alone: spare"
    assert texts == ([unused] if kind is Net else [])
    expected, losses, rates = bare_torch(kind, optimizer, world.size if kind is Normed else 1)
    numpy.testing.assert_allclose([step.loss for step in record.steps], losses, rtol=1e-11)
    numpy.testing.assert_allclose([step.learning_rate for step in record.steps], rates, rtol=1e-15)
    found = trainer.adapter.parameters()
    assert {*expected} == {*found} | ({"two.weight"} if kind is Net else set())
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        # Adam divides by a root of squares, so the rounding of a tiny gradient counts.
        numpy.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-11, err_msg=name)
    assert_same_bits(world, *found.values())
    assert min(losses) < losses[0]
    if kind is Normed:
        assert found["norm.num_batches_tracked"] == STEPS
        assert found["called"]
    else:
        assert found["deviation"].tobytes() == numpy.float64(torch.tensor(1 / 3).double()).tobytes()


def test_a_state_of_one_process_goes_on_on_any_number_of_ranks(world: World) -> None:
    """Every rank makes 4 steps alone, with the whole batch. All ranks then make the rest together."""
    module = made(Net)
    optimizer, options = adam(module)
    alone = TorchModule(module, mean_loss, optimizer, **options)
    plan = plan_layout(alone.layout)
    flats = {dtype: numpy.full(count, math.nan, dtype) for dtype, count in plan.counts.items()}
    views = plan.views(flats)
    x, y = samples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, chosen in zip(range(4), batches(), strict=False):
            unused: list[int] = []

            def take(index: int, gradient: Any, unused: list[int] = unused) -> None:
                views[index][...] = 0 if gradient is None else gradient  # the clipping's norm is over all of them
                if gradient is None:
                    unused.append(index)

            alone.loss_and_gradients((x[chosen], y[chosen]), take)
            alone.apply_gradients(flats, remarks_of([(tuple(unused), alone.note())]))
        trainer = Trainer(builder(Net, adam), [StopAtStep(STEPS)])
        for _ in range(4):
            next(trainer.data)
        trainer.restore({**trainer.state(), "step": 4, "adapter": alone.state()})
        trainer.run()
    expected, _, _ = bare_torch(Net, adam, 1)
    for name, value in trainer.adapter.parameters().items():
        numpy.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-11, err_msg=name)
    assert {*split(trainer.state())[0]} == {f"adapter/{name}" for name in split(alone.state())[0]}


@pytest.mark.filterwarnings("ignore:no rank's loss depends on these parameters.*spare")
def test_16_bits_learn_as_float32_does(world: World) -> None:
    """One rounding to bf16 is 2^-9 of a value, and to fp16 2^-12. A loss of order 1 may be off by some of these.

    The model has no kinks: a ReLU that flips would part two runs by more.
    """
    losses = {}
    for precision in ("float32", "bf16", "fp16"):
        record = Record()
        scale = LossScale(2.0**10) if precision == "fp16" else None
        build = builder(Net, sgd, dtype=torch.float32, precision=precision, loss_scale=scale)
        trainer = Trainer(build, [StopAtStep(STEPS), record])
        trainer.run()
        losses[precision] = numpy.array([step.loss for step in record.steps])
        assert str(trainer.adapter.precision) == {"bf16": "bfloat16", "fp16": "float16"}.get(precision, precision)
        assert all(
            value.dtype == "float32" for value in trainer.adapter.parameters().values() if value.dtype.kind == "f"
        )
    for precision, unit in (("bf16", 2.0**-9), ("fp16", 2.0**-12)):
        distance = abs(losses[precision] - losses["float32"]).max()
        assert unit / 16 < distance < 20 * unit, (precision, distance / unit)
