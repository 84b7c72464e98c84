"""prepare() in rounds: the loop of one process, with outer steps after optimizer.step()."""

from __future__ import annotations

import contextlib
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

import mpitrain.torch
from mpitrain import DiLoCo, LocalSGD, StopAtStep, Sync, Trainer, World
from mpitrain.world.shard import part_of
from tests.ranks.common import assert_same_bits, skip_alone
from tests.ranks.placements import placed

from .loops import Loop, data_of
from .prepared import assert_equal_everywhere
from .test_rounds import STEPS, build, by_hand
from .test_rounds import STRATEGIES as ROUNDS
from .torch_modules import Net, Normed, builder, made, sgd


@pytest.mark.parametrize("strategy", ROUNDS)
@pytest.mark.parametrize("kind", [Net, Normed])
@pytest.mark.filterwarnings("ignore:.*spare")
def test_the_trainer_and_replicas_of_pytorch(world: World, kind: Any, strategy: str) -> None:
    """The parameters have the bits of a TorchModule, whose running means are rounded once more."""
    trainer = Trainer(build(strategy, kind, sgd), [StopAtStep(STEPS)])
    trainer.run()
    loop = Loop(world, ROUNDS[strategy](), kind).prepare()
    loop.run()
    mpitrain.torch.end_round(loop.model)
    named, found = dict(loop.model.named_parameters()), loop.model.state_dict()
    for name, value in trainer.adapter.parameters().items():
        if name in named:
            assert found[name].numpy().tobytes() == value.tobytes(), name
        else:
            numpy.testing.assert_allclose(found[name].numpy(), value, rtol=1e-13, atol=1e-14, err_msg=name)
    assert_equal_everywhere(world, loop.model)
    if strategy != "streaming_diloco":
        for name, value in by_hand(kind, world.size, strategy == "local_sgd").items():
            if name in found:
                numpy.testing.assert_allclose(found[name].numpy(), value, rtol=1e-10, atol=1e-12, err_msg=name)
    trainer.close()


def test_a_codec_in_the_outer_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPITRAIN_COMPRESSION on several nodes: the bits of the Trainer with that codec, and not those without one."""
    skip_alone(world)
    plain = placed(world, "alone on each node")
    coded, found = plain.replaced(config=replace(world.config, compression="bf16")), []
    for there in (coded, plain):
        monkeypatch.setattr(sys.modules["mpitrain.torch.prepare"], "init", lambda there=there: there)
        loop = Loop(world, LocalSGD(3), dtype=torch.float32).prepare()
        loop.run()
        mpitrain.torch.end_round(loop.model)
        found.append(loop.bits())
    make = builder(Net, sgd, dtype=torch.float32)
    trainer = Trainer(lambda world: replace(make(world), strategy=LocalSGD(3)), [StopAtStep(STEPS)], coded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.run()
    names = [name for name, _ in loop.model.named_parameters()]
    assert found[0] == [trainer.adapter.parameters()[name].tobytes() for name in names]
    assert found[0] != found[1]
    trainer.close()


def test_within_a_round_and_at_its_end(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A line about state_dict() comes once, on rank 0. The end of a round that has ended changes nothing."""
    loop = Loop(world, LocalSGD(3)).prepare()
    loop.run(3)
    assert_equal_everywhere(world, loop.model)
    met = loop.bits()
    mpitrain.torch.end_round(loop.model)
    assert loop.bits() == met
    assert "state_dict()" not in capsys.readouterr().out
    loop.run(4)
    assert (len(set(world.allgather(b"".join(loop.bits())))) == 1) is (world.size == 1)
    for _ in range(2):
        loop.model.state_dict()
    out = capsys.readouterr().out
    assert out.count("mpitrain.torch.end_round(model) first") == (world.is_root and world.size > 1)
    mpitrain.torch.end_round(loop.model)
    assert_equal_everywhere(world, loop.model)


def test_that_sync_has_no_rounds(world: World) -> None:
    """Given by name or not, it has the same bits, and `end_round` does nothing."""
    loops = [Loop(world, strategy).prepare() for strategy in (None, Sync())]
    for loop in loops:
        loop.run()
        before = loop.bits()
        mpitrain.torch.end_round(loop.model)
        assert loop.bits() == before
    assert loops[0].bits() == loops[1].bits()


class Line(torch.nn.Module):
    """The loss mean((w - x)^2) / 2 has the gradient w - mean(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return ((self.w - x) ** 2).sum() / 2 / len(x)


@pytest.mark.parametrize("apart", [False, True], ids=["plain", "accumulate"])
def test_several_backward_passes_in_a_step(world: World, apart: bool) -> None:
    """By hand. The second batch of each step has fewer samples than ranks; all samples count for the outer step."""
    sizes = [world.size + 2, max(1, world.size - 1)] * 6
    given = [torch.from_numpy(numpy.random.default_rng(step).standard_normal((n, 3))) for step, n in enumerate(sizes)]
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, given, strategy=LocalSGD(2))
    own, common, counts = [numpy.zeros(3) for _ in range(world.size)], numpy.zeros(3), [0] * world.size
    for number, x in enumerate(data):
        with mpitrain.torch.accumulate(model) if apart and number % 2 == 0 else contextlib.nullcontext():
            (model(x) / 2).backward()
        if number % 2 == 0:
            continue
        optimizer.step()
        optimizer.zero_grad()
        for rank, w in enumerate(own):
            parts = [one[part_of(len(one), rank, world.size)].numpy() for one in given[number - 1 : number + 1]]
            counts[rank] += sum(len(part) for part in parts)
            own[rank] = w - 0.25 * sum((w - part.mean(axis=0)) / 2 for part in parts if len(part))
        if number % 4 == 3:
            common = sum(w * count for w, count in zip(own, counts, strict=True)) / sum(counts)
            own, counts = [common.copy() for _ in own], [0] * world.size
        numpy.testing.assert_allclose(model.w.detach().numpy(), own[world.rank], rtol=1e-13, atol=1e-15)
    assert_same_bits(world, model.w.detach().numpy())


def test_a_step_that_a_scaler_skips(world: World) -> None:
    """One rank alone has infinity. The result has the bits of a loop without that batch."""
    bits = []
    for odd in (4, -1):
        model = made(Normed, torch.float32, seed=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        given = [(x.float(), y) for x, y in data_of(7)]
        if odd < 0:
            del given[4]
        model, optimizer, data = mpitrain.torch.prepare(model, optimizer, given, strategy=DiLoCo(3))
        model.eval()  # the running means do not change
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            bad = number == odd and world.rank == world.size - 1
            scaler.scale(loss * float("inf") if bad else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == (2.0**9 if odd >= 0 else 2.0**10)
        assert_equal_everywhere(world, model)  # 6 steps were made
        bits.append([one.detach().numpy().tobytes() for one in model.parameters()])
    assert bits[0] == bits[1]


def test_two_steps_of_one_batch(world: World) -> None:
    """Each has the samples of the batch. By hand, with batches of which some ranks get none."""
    given = [torch.arange(3.0 * n, dtype=torch.float64).reshape(n, 3) for n in (world.size + 2, max(1, world.size - 1))]
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, given, strategy=LocalSGD(4))
    own, counts = [numpy.zeros(3) for _ in range(world.size)], [0] * world.size
    for x, whole in zip(data, given, strict=True):
        parts = [whole[part_of(len(whole), rank, world.size)].numpy() for rank in range(world.size)]
        for _ in range(2):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            own = [w - 0.25 * (w - part.mean(axis=0)) if len(part) else w for w, part in zip(own, parts, strict=True)]
            counts = [count + len(part) for count, part in zip(counts, parts, strict=True)]
    common = sum(w * count for w, count in zip(own, counts, strict=True)) / sum(counts)
    numpy.testing.assert_allclose(model.w.detach().numpy(), common, rtol=1e-13)
    assert_same_bits(world, model.w.detach().numpy())


def test_two_losses_of_which_a_scaler_skips_the_first(world: World) -> None:
    """Infinity in the first loss of one rank: the second one has the samples of the same batch."""
    model = made(Net, torch.float32, seed=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = [(x.float(), y) for x, y in data_of(4)]
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, given, strategy=LocalSGD(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        bad = number == 1 and world.rank == world.size - 1
        scaler.scale(cross_entropy(model(x), y) * (float("inf") if bad else 1.0)).backward()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**3
    assert_equal_everywhere(world, model)  # 3 steps were made
