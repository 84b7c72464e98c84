"""What prepare() refuses in rounds, and steps that cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import mpitrain.torch
from mpitrain import DiLoCo, LocalSGD, World
from mpitrain.errors import ConfigError, GradientError, MismatchError, NonFiniteError
from mpitrain.strategies import STRATEGIES, make_strategy
from tests.ranks.common import error_on_all, skip_alone
from tests.ranks.test_strategies import CODED

from .loops import Loop, data_of
from .prepared import assert_equal_everywhere
from .test_rounds import STRATEGIES as ROUNDS
from .torch_modules import Net, made


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
        assert "Use mt.Trainer with mt.TorchModule, or name the codec in the argument compression" in text
    else:
        assert f"strategy={type(loop.strategy).__name__}: prepare() takes mt.Sync() and strategies of rounds" in text
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
    with pytest.raises(ConfigError, match="whose copies in memory go on within a round"):
        mpitrain.torch.keep(loop.model, loop.optimizer, loop.data)
