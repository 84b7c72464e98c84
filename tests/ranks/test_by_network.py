"""network=: the compression for the rate of a link, on ranks that are each a node of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest

from mpitrain import ArrayFunction, AutoSync, World
from mpitrain.errors import ConfigError, MismatchError
from mpitrain.forecast.ways import ExchangeWay
from mpitrain.optim import SGD
from mpitrain.profile import DEFAULT
from mpitrain.reducer.bucket import Parameter
from mpitrain.reducer.by_network import compression_by_network
from mpitrain.strategies import make_strategy
from mpitrain.strategies.choosing_reducer import ChoosingReducer

from .common import assert_same_bits, error_on_all, skip_alone
from .placements import placed

F4, F8 = numpy.dtype(numpy.float32), numpy.dtype(numpy.float64)
MODEL = [Parameter("w", (1000, 2000), F4), Parameter("b", (2000,), F4)]
RAMP = numpy.linspace(0.5, 1, 70_001, dtype=numpy.float32)  # int8 does not have all of its values
# On 2 nodes, a rank that codes 2 GB/s saves twice its time on links of up to 0.5 GB/s (bf16), 0.75 GB/s (int8).
CODES_2_GB = replace(DEFAULT, codecs=(("bf16", 2e9), ("int8", 2e9)))


def nodes(world: World, **settings: Any) -> World:
    there = placed(world, "alone on each node")
    return there.replaced(profile=CODES_2_GB, config=replace(world.config, **settings))


@pytest.mark.parametrize(
    ("network", "expected"), [("100Mbit/s", "int8"), ("1 Gbit/s", "int8"), ("5Gbit/s", "int8"), ("1Tbit/s", "none")]
)
def test_the_choice_and_its_line(world: World, network: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    skip_alone(world)
    capsys.readouterr()
    chosen = compression_by_network(nodes(world), network, MODEL)
    assert set(world.allgather(chosen)) == {expected}
    out = capsys.readouterr().out
    if not world.is_root:
        assert out == ""
        return
    (line,) = out.splitlines()
    assert line.startswith(f"mpitrain: network={network}: ")
    assert f" because 2 M parameters on {world.size} nodes take " in line
    if expected == "none":
        assert line.endswith("and none of bf16, int8 saves twice the time that it takes on a core")
    else:
        assert " compression int8, because" in line
        assert "; held-out loss -0.000 ± 0.005 nats (4 workers, 0.11 M parameters, 3000 steps, 3 seeds)" in line
        assert line.endswith(". With fewer steps, compare the loss")


def test_a_codec_without_a_rate_is_measured(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile has none unless it was measured. The slowest link makes any codec worth its time."""
    skip_alone(world)
    there = nodes(world).replaced(profile=DEFAULT)
    assert compression_by_network(there, "100kbit/s", MODEL) == "int8"
    assert capsys.readouterr().out.count("compression int8, because") == world.is_root


def test_nothing_and_why(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [(world, MODEL, "all ranks are on one node")]
    if world.size > 1:
        cases.append((nodes(world, reduction="exact"), MODEL, "reduction=exact sends gradients as they are"))
        double = [*MODEL, Parameter("d", (3,), F8)]
        cases.append((nodes(world), double, "codecs take float32, and there is d float64 (3,)"))
    for there, parameters, reason in cases:
        capsys.readouterr()
        assert compression_by_network(there, "1Gbit/s", parameters) == "none"
        line = f"mpitrain: network=1Gbit/s: no compression, because {reason}\n"
        assert capsys.readouterr().out == (line if world.is_root else "")


def test_what_is_refused(world: World) -> None:
    for network, text in (
        ("1Gbit", "network: '1Gbit' is not a number with a unit, as in 1Gbit/s or 100Mbit/s; units: kbit/s, Mbit/s"),
        ("fast", "network: 'fast' is not a number with a unit"),
        ("nanGbit/s", "is not a number with a unit"),
        (10, "network: 10 is not a text, as in '1Gbit/s'"),
    ):
        found = error_on_all(world, ConfigError, lambda its=network: compression_by_network(world, its, MODEL))
        assert text in found
    there = nodes(world, compression="int8")
    found = error_on_all(world, ConfigError, lambda: compression_by_network(there, "1Gbit/s", MODEL))
    assert "network=1Gbit/s together with the setting compression=int8" in found
    with pytest.raises(ConfigError, match="network=1Gbit/s together with codecs=int8"):
        AutoSync(["int8"], network="1Gbit/s")
    if world.size > 1:
        mine = "1Gbit/s" if world.rank else "2Gbit/s"
        found = error_on_all(world, MismatchError, lambda: compression_by_network(world, mine, MODEL))
        assert "network='1Gbit/s'" in found and "network='2Gbit/s'" in found
        some = AutoSync(network="1Gbit/s") if world.rank == world.size - 1 else AutoSync()
        error_on_all(world, MismatchError, lambda: some.begin(nodes(world), model(world)))


def model(world: World) -> ArrayFunction:
    """Its gradient is the same on all ranks together, not on each."""

    def function(parameters: Any, batch: Any, on_gradient: Any) -> float:
        on_gradient("w", (RAMP * numpy.float32(2 * (world.rank + 1) / (world.size + 1))))
        return 0.0

    return ArrayFunction(function, {"w": numpy.zeros(RAMP.size, numpy.float32)}, SGD(1.0))


def test_auto_sync_begins_with_the_choice(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """On several nodes. On one, it trains as Sync does, and says so."""
    there = nodes(world) if world.size > 1 else world
    strategy, adapter = make_strategy("auto", network="100Mbit/s"), model(world)
    strategy.begin(there, adapter)
    for _ in range(3):
        strategy.begin_step(1)
        strategy.finish_step(adapter, adapter.loss_and_gradients(numpy.zeros(1), strategy.on_gradient))
    (w,) = adapter.parameters().values()
    assert_same_bits(world, w)
    numpy.testing.assert_allclose(w, -3 * RAMP, rtol=0.02)
    out = capsys.readouterr().out
    if world.size == 1:
        assert "network=100Mbit/s: no compression, because all ranks are on one node" in out
        assert "strategy auto trains as sync: all ranks are on one node" in out
    else:
        reducer = strategy._reducer  # type: ignore[attr-defined]
        assert isinstance(reducer, ChoosingReducer)
        assert reducer._present == ExchangeWay("auto", "int8")
        assert reducer._codecs == ["int8", "none", "bf16"]
        assert strategy.own_state()["residual"]["w"].any()  # what int8 has not sent
        assert out.count("network=100Mbit/s: compression int8, because") == world.is_root
    strategy.close()


def test_auto_sync_where_nothing_can_be_forecast(world: World) -> None:
    """The choice stays."""
    if world.size not in (3, 5):
        pytest.skip("needs nodes of different size")
    there = placed(world, "dealt out over 2 nodes").replaced(profile=CODES_2_GB)
    strategy, adapter = AutoSync(network="100Mbit/s"), model(world)
    strategy.begin(there, adapter)
    assert not isinstance(strategy._reducer, ChoosingReducer)
    strategy.begin_step(1)
    strategy.finish_step(adapter, adapter.loss_and_gradients(numpy.zeros(1), strategy.on_gradient))
    assert any(part["residual"]["w"].any() for part in world.allgather(strategy.own_state()) if "residual" in part)
    strategy.close()
