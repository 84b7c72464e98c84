"""prepare() in rounds: the loop of one process, with outer steps after optimizer.step(); and what is refused."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

import mpitrain.torch
from mpitrain import DiLoCo, LocalSGD, StopAtStep, Trainer, World
from mpitrain.errors import ConfigError, GradientError, MismatchError, NonFiniteError
from mpitrain.strategies import STRATEGIES, make_strategy
from mpitrain.world.shard import part_of
from tests.ranks.common import assert_same_bits, error_on_all, skip_alone
from tests.ranks.placements import placed
from tests.ranks.test_strategies import CODED

from .loops import STEPS, Loop, build, by_hand, data_of
from .loops import STRATEGIES as ROUNDS
from .prepared import assert_equal_everywhere
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


def scaled(world: World, kind: Any, strategy: Any, given: Any, odd: int, losses: Callable[..., list[Any]]) -> Any:
    """A loop with a scaler, in which the last rank's first loss of the batch `odd` is infinite."""
    model = made(kind, torch.float32, seed=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, given, strategy=strategy)
    model.eval()  # the running means do not change
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        bad = number == odd and world.rank == world.size - 1
        for loss in losses(model, x, y):
            scaler.scale(loss * float("inf") if bad else loss).backward()
            bad = False
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (2.0**3 if odd >= 0 else 2.0**4)
    assert_equal_everywhere(world, model)  # the round has ended: a step less than batches was made, if one is bad
    return model


def test_a_step_that_a_scaler_skips(world: World) -> None:
    """The result has the bits of a loop without that batch. Of two losses, the second one has the batch's samples."""
    bits = []
    for odd in (4, -1):
        given = [(x.float(), y) for x, y in data_of(7)]
        if odd < 0:
            del given[4]
        model = scaled(world, Normed, DiLoCo(3), given, odd, lambda model, x, y: [cross_entropy(model(x), y)])
        bits.append([one.detach().numpy().tobytes() for one in model.parameters()])
    assert bits[0] == bits[1]
    given = [(x.float(), y) for x, y in data_of(4)]
    two = lambda model, x, y: [cross_entropy(model(x), y), model(x).square().mean()]  # noqa: E731
    scaled(world, Net, LocalSGD(3), given, 1, two)


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


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_rank_that_skips_a_step_is_named(world: World) -> None:
    """Or, where an outer step follows it, the outer step."""
    skip_alone(world)
    loop = Loop(world, LocalSGD(4)).prepare()
    loop.run(1)
    batches = iter(loop.data)

    def backward() -> None:
        x, y = next(batches)
        cross_entropy(loop.model(x), y).backward()

    backward()
    if world.rank != 1:
        loop.step()
    text = error_on_all(world, MismatchError, backward)
    assert f"{world.name(1)} has made 1 steps of the optimizer, {world.name(0)} 2; did a rank skip a step" in text
    loop = Loop(world, LocalSGD(1)).prepare()
    batches = iter(loop.data)
    backward()
    text = error_on_all(world, MismatchError, loop.step if world.rank != 1 else backward)
    said = f"{world.name(1)}: take the next batch; {world.name(0)}: outer step after a step of the optimizer; do all"
    assert said in text


def test_nan_is_named_and_not_spread(world: World) -> None:
    odd = world.size - 1
    loop = Loop(world, DiLoCo(2)).prepare()
    loop.run(1)

    def gradient(bad: bool) -> None:
        for x, y in loop.data:
            loop.optimizer.zero_grad()
            loss = cross_entropy(loop.model(x), y)
            (loss * float("nan") if bad else loss).backward()
            return

    gradient(world.rank == odd)
    before = loop.bits()
    text = error_on_all(world, NonFiniteError, loop.step)
    assert f"{world.name(odd)}: the gradient of " in text
    assert loop.bits() == before
    # A parameter of one rank becomes NaN in the last step of the round: its gradient was finite.
    gradient(False)
    kept = loop.model.last.bias.detach().clone()
    momentum = {one: kept["momentum_buffer"].clone() for one, kept in loop.optimizer.state.items()}
    if world.rank == odd:
        loop.model.last.bias.data[1] = float("nan")
    before = loop.bits()
    text = error_on_all(world, NonFiniteError, loop.step)
    assert f"{world.name(odd)}: last.bias has become NaN or infinity in the steps of this round" in text
    assert loop.bits() == before
    assert momentum.keys() == loop.optimizer.state.keys()
    for one, its in momentum.items():
        assert torch.equal(loop.optimizer.state[one]["momentum_buffer"], its)
    loop.model.last.bias.data.copy_(kept)
    gradient(False)
    loop.step()
    assert_equal_everywhere(world, loop.model)


def test_steps_that_cannot_count(world: World) -> None:
    loop = Loop(world, LocalSGD(3)).prepare()
    loop.run(1)
    with pytest.raises(GradientError, match=r"optimizer.step\(\) came without a backward\(\) since the last step"):
        loop.optimizer.step()
    for x, y in loop.data:
        cross_entropy(loop.model(x), y).backward()
        with pytest.raises(GradientError, match=r"Or backward\(\) came inside optimizer.step\(closure\)"):
            loop.optimizer.step(lambda x=x, y=y: cross_entropy(loop.model(x), y).backward())
        break


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_or_says_what_does(world: World, name: str) -> None:
    """Nothing has changed where it is refused: the same loop trains with another strategy afterwards."""
    loop = Loop(world, make_strategy(name))
    if name in ("sync", *ROUNDS) or (name in CODED and world.size == 1):
        loop.prepare().run(2)
        mpitrain.torch.end_round(loop.model)
        assert_equal_everywhere(world, loop.model)
        return
    text = error_on_all(world, ConfigError, loop.prepare)
    if name in CODED:
        assert "the model has 2 buffers whose mean all ranks need" in text
    elif name == "auto":
        assert "mt.AutoSync(): prepare() makes one exchange, and cannot change it while the loop trains" in text
        assert "Use mt.Trainer with mt.TorchModule, or name the codec in the argument compression, or the rate" in text
    else:
        assert f"strategy={type(loop.strategy).__name__}: prepare() takes mt.Sync() and local updates" in text
        assert "use them with mt.Trainer and mt.TorchModule" in text
    loop.strategy = LocalSGD(2)
    loop.prepare().run(2)


def refused(strategy: Any, change: Callable[[Any], Any] | None = None, **options: Any) -> str:
    model = made(Net)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    if change:
        change(optimizer)
    with pytest.raises(ConfigError) as found:
        mpitrain.torch.prepare(model, optimizer, data_of(1), strategy=strategy, **options)
    return str(found.value)


def test_what_is_refused(world: World) -> None:
    assert "warm_up=3" in (text := refused(DiLoCo(5, warm_up=3)))
    assert "Leave warm_up out, or train with mt.Trainer" in text
    assert "compression, threaded together with LocalSGD(sync_every=2, " in refused(
        LocalSGD(2), compression="bf16", threaded=False
    )
    assert "strategy='diloco': prepare() takes mt.Sync()" in refused("diloco")
    assert "DiLoCo'>: prepare() takes mt.Sync()" in refused(DiLoCo)
    text = refused(LocalSGD(2), lambda optimizer: optimizer.param_groups[0]["params"].pop(0))
    assert "spare is trained (requires_grad) but not in the optimizer" in text
    if world.size > 1:
        loop = Loop(world, LocalSGD(2 + (world.rank == 1)))
        text = error_on_all(world, MismatchError, loop.prepare)
        assert f"{world.name(1)}: strategy=LocalSGD(sync_every=3, " in text
    loop = Loop(world, LocalSGD(2)).prepare()
    with pytest.raises(ConfigError, match="whose in-memory checkpoints continue within a round"):
        mpitrain.torch.keep(loop.model, loop.optimizer, loop.data)
