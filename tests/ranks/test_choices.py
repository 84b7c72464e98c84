"""The choices that `mpitrain bench --show` prints are those that are used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpitrain import World
from mpitrain.allreduce.select import choices
from mpitrain.profile import Profile
from mpitrain.reducer.exchange import make_exchange
from tests.ranks.common import skip_alone

from .placements import placed

SLOW_WIRE = Profile("test", 50e-6, 100e6, (), ("a", "b"), (("bf16", 1e9),))
FAST_WIRE = replace(SLOW_WIRE, bytes_per_second=10e9)


def with_settings(world: World, **settings: str) -> World:
    """Each rank a node of its own, on a slow wire."""
    config = replace(world.config, **settings)
    return placed(world, "alone on each node").replaced(profile=SLOW_WIRE, config=config)


def test_a_forced_algorithm(world: World) -> None:
    lines = choices(world.replaced(config=replace(world.config, algorithm="recursive_doubling")))
    assert lines[1] == "all sizes: recursive_doubling, set by MPITRAIN_ALGORITHM"
    assert not any(word in line for line in lines for word in ("native", "shared_memory", "predicted"))


@pytest.mark.parametrize("profile", [SLOW_WIRE, FAST_WIRE, replace(SLOW_WIRE, nodes=())], ids=["slow", "fast", "none"])
def test_compression_auto_is_what_an_exchange_takes(
    world: World, profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_alone(world)
    there = with_settings(world, compression="auto").replaced(profile=profile)
    (line,) = (line for line in choices(there) if line.startswith("compression"))
    chosen = line.removeprefix("compression auto: ").split(",")[0].split(";")[0]
    assert chosen == ("bf16" if profile == SLOW_WIRE else "none")
    assert line.endswith("; mt.Sync and mt.AutoSync choose while they train, see docs/how-to/low-communication.md")
    capsys.readouterr()
    make_exchange(there)
    if world.is_root:
        assert f"compression auto: {chosen};" in capsys.readouterr().out


def test_compression_by_name(world: World) -> None:
    skip_alone(world)
    lines = choices(with_settings(world, compression="int8"))
    assert "compression int8; gradients of all sizes go by direct between nodes" in lines
    assert not any("compression" in line for line in choices(with_settings(world)))
    alone = world.replaced(config=replace(world.config, compression="int8"))
    assert "compression int8: none, as all ranks are on one node" in choices(alone)
