"""AutoSync, and compression=auto, on ranks that are each a node of its own; they are told how long steps took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest

from mpitrain import ArrayFunction, AutoSync, Hook, Parts, StopAtStep, Sync, Trainer, World
from mpitrain.allreduce.select import choices
from mpitrain.data import ArrayData
from mpitrain.errors import ConfigError, LostRankError, MismatchError
from mpitrain.forecast.ways import ExchangeWay
from mpitrain.optim import SGD
from mpitrain.profile import Profile
from mpitrain.reducer.exchange import make_exchange
from mpitrain.state.names import host_copy
from mpitrain.strategies.chooser import StepMedians
from mpitrain.strategies.choosing_reducer import ChoosingReducer
from mpitrain.training.run_event import RunEvent

from .common import added_up, assert_equal, assert_same_bits, error_on_all, first_ranks, skip_alone
from .placements import placed
from .trainings import ran

COUNT = 2**16 + 3  # 256 KiB, and no multiple of the ranks
# bf16 makes 1 of it. What is left out must come into a later mean.
GRADIENT = 1 + 2.0**-9
BASE = ExchangeWay("auto")
BF16 = ExchangeWay("auto", "bf16")


def of_nodes(world: World, **settings: Any) -> World:
    return placed(world, "alone on each node").replaced(config=replace(world.config, **settings))


def told(monkeypatch: pytest.MonkeyPatch, plain: float, coded: float) -> None:
    """Let the ranks decide by these seconds of a step, whatever the steps took. The last rank is the slowest one."""
    look = ChoosingReducer._look

    def with_times(reducer: ChoosingReducer) -> None:
        seconds = plain if reducer._present.codec == "none" else coded
        share = 1.0 if reducer._world.rank == reducer._world.size - 1 else 0.75

        def medians(*, with_ready: bool) -> StepMedians:
            return StepMedians(seconds * share, 0.0, 0.001, (0.001,) if with_ready else (), 0.01)

        monkeypatch.setattr(reducer._parts, "medians", medians)
        look(reducer)

    monkeypatch.setattr(ChoosingReducer, "_look", with_times)


def constant(world: World) -> ArrayFunction:
    """The mean over ranks of the gradients is GRADIENT, those of the ranks are not."""

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        own = GRADIENT * 2 * (world.rank + 1) / (world.size + 1)
        on_gradient("w", numpy.full_like(parameters["w"], own))
        return float(world.rank)

    return ArrayFunction(function, {"w": numpy.zeros(COUNT, numpy.float32)}, SGD(1.0))


def make_steps(strategy: Sync, model: ArrayFunction, number: int) -> None:
    for _ in range(number):
        strategy.begin_step(1)
        strategy.finish_step(model, model.loss_and_gradients(numpy.zeros(1), strategy.on_gradient))


def way_of(strategy: Sync) -> ExchangeWay:
    reducer = strategy._reducer
    assert isinstance(reducer, ChoosingReducer)
    return reducer._present


def assert_all_went(world: World, model: ArrayFunction, steps: int, *, bound: float) -> None:
    """Every mean of every step was applied, as far as nothing is left out."""
    (w,) = model.parameters().values()
    assert_same_bits(world, w)
    numpy.testing.assert_allclose(w, -steps * GRADIENT, rtol=bound)


@pytest.mark.parametrize("make", [lambda: AutoSync(codecs=["bf16"]), Sync], ids=["strategy", "compression"])
def test_a_faster_codec_is_taken_and_said(
    world: World, make: Callable[[], Sync], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To hooks, too. What it has left out is sent where a later run has no codec."""
    skip_alone(world)
    told(monkeypatch, 0.15, 0.05)
    events: list[RunEvent] = []

    class Heard(Hook):
        def went_on(self, trainer: Trainer, event: RunEvent) -> None:
            events.append(event)

    def build(own: World) -> Parts:
        return Parts(constant(own), make(), ArrayData(own, numpy.zeros((own.size, 1)), global_batch=own.size))

    compression = "auto" if make is Sync else "none"
    capsys.readouterr()
    trainer = ran(build, [StopAtStep(27), Heard()], of_nodes(world, compression=compression))
    assert way_of(trainer.strategy) == BF16
    (event,) = events
    assert (event.after_step, event.source, event.num_ranks, event.seconds) == (25, "auto", world.size, 0.0)
    assert event.text.startswith("bf16 instead of none: 50 ms instead of 150 ms a step (predicted ")
    assert trainer.strategy.changes() == []
    assert set(world.allgather(event.text)) == {event.text}
    said = f"mpitrain: step 25: {event.text}\n"
    assert capsys.readouterr().out.count(said) == world.is_root
    assert_all_went(world, trainer.adapter, 27, bound=2.0**-8 / 27)

    own, saved = trainer.strategy.own_state(), host_copy(trainer.adapter.state())
    assert own["residual"]["w"].any()
    again, other = AutoSync(), constant(world)
    again.begin(of_nodes(world), other)
    again.restore({})
    other.restore(saved)
    again.restore_own(own)
    make_steps(again, other, 1)
    assert_all_went(world, other, 28, bound=2e-6)
    for strategy in (again, trainer):
        strategy.close()


@pytest.mark.parametrize("codec", ["bf16", "top_k:0.1"])
def test_a_profile_that_lies(world: World, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """By it a codec costs nothing, and it is the slower way. Nothing is lost on the way there and back."""
    skip_alone(world)
    told(monkeypatch, 0.03, 0.15)
    names = tuple(f"n{rank}" for rank in range(world.size))
    rates = tuple(tuple(0.0 if i == j else 2e6 for j in range(world.size)) for i in range(world.size))
    lie = Profile("a lie", 1e-6, 2e6, rates, names, (("bf16", 1e12), ("top_k", 1e12)))
    there = of_nodes(world).replaced(profile=lie, hosts=names)
    strategy, model = AutoSync(codecs=[codec]), constant(world)
    strategy.begin(there, model)
    for _ in range(2):
        make_steps(strategy, model, 7)
        assert len(set(world.allgather(way_of(strategy)))) == 1
    assert way_of(strategy) == ExchangeWay("auto", codec)
    make_steps(strategy, model, 6)
    assert way_of(strategy) == BASE
    ((step, text),) = strategy.changes()
    assert step == 18
    assert text.startswith(f"none again: {codec} was tried since step 13, 150 ms instead of 30 ms a step")
    assert_all_went(world, model, 20, bound=2e-6)
    strategy.close()


def test_a_resume(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same nodes the way continues, with what it has left out. Fewer ranks begin to choose anew."""
    skip_alone(world)
    told(monkeypatch, 0.15, 0.05)
    strategy, model = AutoSync(codecs=["bf16"]), constant(world)
    there = of_nodes(world)
    strategy.begin(there, model)
    make_steps(strategy, model, 26)
    own, state, saved = strategy.own_state(), strategy.state(), host_copy(model.state())
    assert own["residual"]["w"].any()
    assert set(map(repr, world.allgather(state))) == {repr(state)}
    make_steps(strategy, model, 2)
    expected = model.parameters()["w"].copy()
    strategy.close()

    again, other = AutoSync(codecs=["bf16"]), constant(world)
    again.begin(there, other)
    again.restore(state)
    other.restore(saved)
    again.restore_own(own)
    make_steps(again, other, 2)
    assert way_of(again) == BF16
    assert_equal(other.parameters()["w"], expected)
    assert again.state()["choice"]["steps"] == 28
    again.close()

    total = added_up(world.allgather(own))
    fewer = first_ranks(world, world.size - 1)
    if fewer is not None:
        alone = fewer.size == 1
        last, model = AutoSync(codecs=["bf16"]), constant(fewer)
        last.begin(of_nodes(fewer), model)
        last.restore(state)
        model.restore(saved)
        last.restore_own(total if fewer.is_root else {"carried": {}})
        make_steps(last, model, 2)
        assert alone or way_of(last) == BASE
        assert alone or last.state()["choice"]["steps"] == 28
        assert_all_went(fewer, model, 28, bound=2e-6)
        last.close()
        fewer.free()
    world.barrier()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, ExchangeWay("ring", bucket_mib=1)),
        ({"algorithm": "direct"}, ExchangeWay("direct")),
        ({"bucket_mib": 2.0}, ExchangeWay("auto", bucket_mib=2)),
        ({"compression": "bf16"}, BF16),
    ],
)
def test_a_resume_with_other_settings(world: World, setting: dict[str, Any], expected: ExchangeWay) -> None:
    """What is set now counts, and not what was chosen without it."""
    skip_alone(world)
    strategy, model = AutoSync(), constant(world)
    there = of_nodes(world, **setting)
    strategy.begin(there, model)
    kept = {"algorithm": "ring", "codec": "none", "bucket_mib": 1.0, "nodes": list(there.node_ranks), "steps": 20}
    strategy.restore({"choice": kept})
    make_steps(strategy, model, 1)
    assert way_of(strategy) == expected
    strategy.close()


def test_a_change_that_ends_in_the_middle(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a lost rank. The old way is left, the new one is not made: a recovery finds what is left to send."""
    skip_alone(world)
    strategy, model = AutoSync(codecs=["bf16"]), constant(world)
    strategy.begin(of_nodes(world), model)
    reducer = strategy._reducer
    assert isinstance(reducer, ChoosingReducer)
    reducer._change(BF16)
    make_steps(strategy, model, 3)
    left = strategy.own_state()["residual"]["w"]
    assert left.any()

    def lost(_: ChoosingReducer, way: ExchangeWay) -> Any:
        raise LostRankError(f"a rank was lost before {way}")

    with monkeypatch.context() as patch:
        patch.setattr(ChoosingReducer, "_made", lost)
        with pytest.raises(LostRankError):
            reducer._change(BASE)
    assert_equal(strategy.own_state()["carried"]["w"], left)
    strategy.close()


def test_where_nothing_can_be_chosen(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A line says why, and the training is that of Sync."""
    cases = [(world, "all ranks are on one node")]
    if world.size > 1:
        cases.append((of_nodes(world, reduction="exact"), "exact sums cannot be forecast"))
        cases.append((of_nodes(world, algorithm="native"), "MPI's own sums (MPITRAIN_ALGORITHM=native) cannot be"))
        cases.append((of_nodes(world, compression="power_sgd"), "power_sgd cannot be forecast"))
    if world.size in (3, 5):
        cases.append((placed(world, "dealt out over 2 nodes"), "the nodes have different numbers of ranks"))
    for there, reason in cases:
        capsys.readouterr()
        strategy, model = AutoSync(), constant(world)
        strategy.begin(there, model)
        if world.is_root:
            assert f"mpitrain: strategy auto trains as sync: {reason}" in capsys.readouterr().out
        make_steps(strategy, model, 1)
        assert strategy.changes() == []
        assert "choice" not in strategy.state()
        strategy.close()


def test_a_setting_and_an_argument(world: World) -> None:
    text = error_on_all(
        world,
        ConfigError,
        lambda: AutoSync(codecs=["int8"]).begin(of_nodes(world, compression="bf16"), constant(world)),
    )
    assert "compression=bf16 together with AutoSync(codecs=int8)" in text
    if world.size > 1:
        odd = world.rank == world.size - 1
        strategy = AutoSync(codecs=["int8"] if odd else ["bf16"])
        text = error_on_all(world, MismatchError, lambda: strategy.begin(of_nodes(world), constant(world)))
        assert "codecs none, int8" in text
        assert "codecs none, bf16" in text
    with pytest.raises(ConfigError, match="there is no codec 'int3'"):
        AutoSync(codecs=["int3"])


SLOW_WIRE = Profile("test", 50e-6, 100e6, (), ("a", "b"), (("bf16", 1e9),))
FAST_WIRE = replace(SLOW_WIRE, bytes_per_second=10e9)


def test_what_is_set(world: World) -> None:
    lines = choices(world.replaced(config=replace(world.config, algorithm="recursive_doubling")))
    assert lines[1] == "all sizes: recursive_doubling, set by MPITRAIN_ALGORITHM"
    assert not any(word in line for line in lines for word in ("native", "shared_memory", "predicted"))
    alone = world.replaced(config=replace(world.config, compression="int8"))
    assert "compression int8: none, as all ranks are on one node" in choices(alone)
    if world.size > 1:
        lines = choices(of_nodes(world, compression="int8"))
        assert "compression int8; gradients of all sizes use direct between nodes" in lines
        assert not any("compression" in line for line in choices(of_nodes(world)))


@pytest.mark.parametrize("profile", [SLOW_WIRE, FAST_WIRE, replace(SLOW_WIRE, nodes=())], ids=["slow", "fast", "none"])
def test_compression_auto_is_what_an_exchange_takes(
    world: World, profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_alone(world)
    there = of_nodes(world, compression="auto").replaced(profile=profile)
    (line,) = (line for line in choices(there) if line.startswith("compression"))
    chosen = line.removeprefix("compression auto: ").split(",")[0].split(";")[0]
    assert chosen == ("bf16" if profile == SLOW_WIRE else "none")
    assert line.endswith("; mt.Sync and mt.AutoSync choose while they train")
    capsys.readouterr()
    make_exchange(there)
    if world.is_root:
        assert f"compression auto: {chosen};" in capsys.readouterr().out
