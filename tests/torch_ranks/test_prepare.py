"""prepare(): a loop for one process gives the same on any number of ranks."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mpitrain.torch
from mpitrain import World
from mpitrain.profile import DEFAULT
from tests.ranks.common import skip_alone
from tests.ranks.placements import placed

from .prepared import assert_equal_everywhere, batches, compare, loader, loop, mlp, samples, sgd


def test_the_loop_of_one_process(world: World) -> None:
    """Shuffled, with a last batch that has fewer samples than ranks, and small buckets, of which there are several."""
    model, _ = compare(world, mlp(), lambda: loader(shuffle=True), bucket_bytes=100)
    # The gradients live in the buckets: one piece of memory.
    gradients = [parameter.grad for parameter in model.parameters()]
    ends = [end for gradient in gradients for end in (gradient.data_ptr(), gradient.data_ptr() + gradient.nbytes)]
    assert max(ends) - min(ends) == sum(gradient.nbytes for gradient in gradients)


def test_gradients_that_are_kept_and_clipped(world: World) -> None:
    """Zeros in place of None; what is read between backward() and step() are the means."""

    def run(model: Any, optimizer: Any, data: Any) -> None:
        for x, y in data:
            optimizer.zero_grad(set_to_none=False)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()

    norms: list[float] = []
    compare(world, mlp(), batches, make_optimizer=lambda p: torch.optim.AdamW(p, lr=0.1), run=run)
    assert norms[:5] == pytest.approx(norms[5:], rel=1e-12)
    assert min(norms) > 0.05


@pytest.mark.parametrize("exchanging", ["the last", "every"])
def test_accumulation(world: World, exchanging: str) -> None:
    """Five batches a step, the last of them without a sample on most ranks; or an exchange of each, as without us."""

    def run(model: Any, optimizer: Any, data: Any) -> None:
        for _ in range(2):
            for number, (x, y) in enumerate(data, 1):
                last = number % 5 == 0
                apart = exchanging == "the last" and hasattr(data, "share") and not last
                with mpitrain.torch.accumulate(model) if apart else contextlib.nullcontext():
                    (torch.nn.functional.cross_entropy(model(x), y) / 5).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()

    compare(world, mlp(), lambda: loader(shuffle=True), run=run)


def test_freezing(world: World) -> None:
    """After prepare(), for a while; and in front of the first accumulation."""

    def for_a_while(model: Any, optimizer: Any, data: Any) -> None:
        loop(model, optimizer, data)
        model[0].requires_grad_(False)
        optimizer.zero_grad()
        loop(model, optimizer, data)
        model[0].requires_grad_(True)
        loop(model, optimizer, data)

    def accumulated(model: Any, optimizer: Any, data: Any) -> None:
        model[0].requires_grad_(False)
        for number, (x, y) in enumerate(data):
            apart = number == 0 and hasattr(data, "share")
            with mpitrain.torch.accumulate(model) if apart else contextlib.nullcontext():
                torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for run in (for_a_while, accumulated):
        compare(world, mlp(), loader, run=run)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_the_same_steps_on_all_ranks(world: World, fused: bool) -> None:
    """One rank has infinity in one batch; by itself it alone would leave out that step."""
    model = mlp(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    model, optimizer, data = mpitrain.torch.prepare(model, optimizer, batches(torch.float32)[:4])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    kept = []
    for number, (x, y) in enumerate(data):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * float("inf") if number == 2 and world.rank == world.size - 1 else loss).backward()
        if not fused:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        kept.append(torch.equal(before, model[0].weight))
    assert kept == [False, False, True, False]
    assert scaler.get_scale() == 2.0**9
    assert_equal_everywhere(world, model)


@pytest.mark.parametrize(("codec", "tolerance"), [("none", 1e-5), ("bf16", 2e-3)])
def test_compression_between_nodes(world: World, codec: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between pretended nodes, moved on by a thread."""
    skip_alone(world)
    there = placed(world, "dealt out over 2 nodes")
    monkeypatch.setattr(sys.modules["mpitrain.torch.prepare"], "init", lambda: there)
    data = batches(torch.float32)
    compare(world, mlp(torch.float32), lambda: data, tolerance=tolerance, compression=codec, bucket_bytes=100)


def test_a_compression_for_the_rate_of_the_links(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """int8 between pretended nodes, which shows in the parameters, and nothing on one node."""
    data = batches(torch.float32)
    compare(world, mlp(torch.float32), lambda: data, tolerance=1e-5, network="100Mbit/s")
    said = "mpitrain: network=100Mbit/s: no compression, because all ranks are on one node\n"
    assert capsys.readouterr().out == (said if world.is_root else "")
    skip_alone(world)
    fast = replace(DEFAULT, codecs=(("bf16", 1e12), ("int8", 1e12)))
    there = placed(world, "dealt out over 2 nodes").replaced(profile=fast)
    monkeypatch.setattr(sys.modules["mpitrain.torch.prepare"], "init", lambda: there)
    model, alone = compare(world, mlp(torch.float32), lambda: data, tolerance=0.05, network="100Mbit/s")
    gaps = [(mine - other).abs().max() for mine, other in zip(model.parameters(), alone.parameters(), strict=True)]
    assert max(gaps) > 1e-4
    text = capsys.readouterr().out
    assert (
        text.count("mpitrain: network=100Mbit/s: compression int8, because 66 parameters on 2 nodes") == world.is_root
    )


def test_options_and_bfloat16(world: World) -> None:
    for options in ({"algorithm": "recursive_doubling"}, {"algorithm": "ring", "threaded": False}):
        compare(world, mlp(), loader, **options)
    compare(world, mlp(torch.bfloat16), lambda: batches(torch.bfloat16), tolerance=0.1)  # it has 8 bits


def test_two_models_on_the_same_data(world: World) -> None:
    """The second one takes the data that the first one's prepare() returned, and is trained on what the first gives."""
    x, y = samples()

    def run(first: Any, one: Any, data: Any) -> None:
        if hasattr(data, "share"):
            second, two, same = mpitrain.torch.prepare(seconds[0], sgd(seconds[0].parameters()), data)
            assert same is data
        else:
            second, two = seconds[1], sgd(seconds[1].parameters())
        for x, y in data:
            hidden = first(x)
            one.zero_grad()
            two.zero_grad()
            torch.nn.functional.cross_entropy(second(hidden), y).backward()  # gradients of both
            one.step()
            two.step()

    seconds = [torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)]
    for second in seconds:
        torch.nn.init.eye_(second.weight)
        torch.nn.init.zeros_(second.bias)
    compare(world, mlp(), loader, run=run)
    torch.testing.assert_close(seconds[0].weight, seconds[1].weight, rtol=1e-13, atol=1e-13)
    assert len(x) == len(y)


def test_evaluation_between_batches(world: World) -> None:
    """A pass over the data without backward passes, and an exception that all ranks catch, cost nothing."""

    def run(model: Any, optimizer: Any, data: Any) -> None:
        loop(model, optimizer, data)
        with torch.no_grad():
            assert len([model(x) for x, _ in data]) == len(data) == 5
        with contextlib.suppress(ZeroDivisionError):
            for number, (x, _) in enumerate(data):
                model(x).sum() / (1 // (2 - number))
        loop(model, optimizer, data)

    compare(world, mlp(), loader, run=run)


class Checkpointed(torch.nn.Sequential):
    def forward(self, x: Any) -> Any:
        return checkpoint(super().forward, x.clone().requires_grad_(), use_reentrant=True)


def test_gradient_checkpointing_and_a_graph_that_is_kept(world: World) -> None:
    """The older kind of checkpointing has backward passes inside of backward passes."""

    def run(model: Any, optimizer: Any, data: Any) -> None:
        for x, y in data:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(torch.nn.Sequential.forward(model, x), y)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()

    compare(world, Checkpointed(*mlp()), loader, run=run)


def test_nothing_is_kept(world: World) -> None:
    """Neither a graph of an ended backward pass stays in memory, nor a model that is not used any more."""
    model = mlp()
    model.register_buffer("own", torch.zeros(3))
    model, optimizer, data = mpitrain.torch.prepare(model, sgd(model.parameters()), loader())
    x, y = next(iter(data))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of PyTorch, about the cycle that there is not
        loss.backward(create_graph=True)
    assert not any(parameter.grad.requires_grad for parameter in model.parameters())
    kept = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model, optimizer, data, loss
    gc.collect()
    assert not any(each() is not None for each in kept)
