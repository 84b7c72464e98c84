"""What a job with exact sums takes, refuses and says; and a training whose bits depend on nothing else."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest

import mpitrain as mt
from mpitrain import LocalSGD, Sync, Trainer, World
from mpitrain.allreduce import make_algorithm
from mpitrain.allreduce.exact import exact_sum
from mpitrain.allreduce.select import choices
from mpitrain.config import read_config
from mpitrain.errors import ConfigError, MismatchError
from mpitrain.forecast.operations import OPERATIONS
from mpitrain.job.start import _common_config
from mpitrain.reducer.exchange import CompressedExchange, PlainExchange, make_exchange
from mpitrain.reducer.low_rank import LowRankExchange
from mpitrain.strategies import Strategy

from .common import assert_equal, error_on_all, expected_sum, named_ranks, pattern, skip_alone
from .placements import placed
from .test_bench import options_of
from .trainings import builder

FLOAT32 = numpy.dtype(numpy.float32)
LENGTH = 200_003  # several pieces


def exact(world: World, **settings: str) -> World:
    return world.replaced(config=replace(world.config, reduction="exact", **settings))


# -- sums in flight --------------------------------------------------------------------------------------------------


def test_made_while_another_sum_is_under_way(world: World) -> None:
    """Its memory is made after that sum: on the same communicator, their messages would mix."""
    plain = make_algorithm(world, "shared_memory")
    flat = pattern(LENGTH, world.rank).astype(FLOAT32)
    if world.rank == world.size - 1:
        time.sleep(0.3)  # the others have begun
    handle = plain.start(flat)
    handle.test()
    made = exact_sum(world, "shared_memory")
    handle.wait()
    assert_equal(flat, expected_sum(LENGTH, world.size))
    flat = pattern(LENGTH, world.rank).astype(FLOAT32)
    made.start(flat).wait()
    assert_equal(flat, expected_sum(LENGTH, world.size))


def test_the_first_sum_while_another_one_is_under_way(world: World) -> None:
    there = exact(world)
    flat = pattern(LENGTH, world.rank).astype(FLOAT32)
    if world.rank == world.size - 1:
        time.sleep(0.3)
    handle = make_algorithm(there, "shared_memory").start(flat)
    handle.test()
    assert there.sum(1.5) == 1.5 * world.size
    handle.wait()
    assert_equal(flat, expected_sum(LENGTH, world.size))


# -- a training ------------------------------------------------------------------------------------------------------


def trained(world: World, strategy: Callable[[], Strategy]) -> str:
    """The hash of the parameters after six steps, whose gradients have all bits in use."""
    trainer = Trainer(builder(60, 4 * world.size, strategy=strategy), [mt.StopAtStep(6)], world=world)
    trainer.run()
    values = trainer.adapter.parameters()
    return hashlib.sha256(b"".join(values[name].tobytes() for name in sorted(values))).hexdigest()


@pytest.mark.parametrize("strategy", [Sync, lambda: LocalSGD(2)], ids=["sync", "rounds"])
def test_a_training_has_the_same_bits_by_every_way(world: World, strategy: Callable[[], Strategy]) -> None:
    found = {
        trained(exact(placed(world, placement), algorithm=name), strategy)
        for name in ("auto", "ring")
        for placement in ("dealt out over 2 nodes", "alone on each node")
    }
    assert len(found) == 1, found
    assert len(set(world.allgather(found.pop()))) == 1


# -- settings --------------------------------------------------------------------------------------------------------


def test_the_setting_of_the_environment() -> None:
    assert read_config({"MPITRAIN_REDUCTION": "exact"}, {}).reduction == "exact"


def test_ranks_whose_settings_differ(world: World) -> None:
    skip_alone(world)
    odd, even = named_ranks(world, 1)
    settings = {"reduction": "exact" if world.rank == 1 else "plain"}
    text = error_on_all(world, MismatchError, lambda: _common_config(world, settings))
    assert f"{odd}: reduction='exact'; {even}: reduction='plain'" in text
    text = error_on_all(world, ConfigError, lambda: _common_config(world, {"reduction": f"exakt{world.rank}"}))
    assert "there is no reduction 'exakt0'; known: plain, exact" in text


def test_an_exchange_takes_the_setting(world: World) -> None:
    there = exact(world)
    exchange = PlainExchange(there, "ring")
    slot = exchange.allocate(3, FLOAT32)
    slot.flat[:] = (2.0**30, 1.0, -(2.0**30)) if world.rank == 0 else 0
    handle = exchange.mean(slot, slice(0, 3), 1.0)
    assert str(handle) == "allreduce exact ring of 3 float32"
    handle.wait()
    assert slot.flat.tolist() == [2.0**30, 1.0, -(2.0**30)]
    plain = PlainExchange(there, "ring", reduction="plain")
    handle = plain.mean(plain.allocate(3, FLOAT32), slice(0, 3), 0.0)
    assert str(handle) == "allreduce ring of 3 float32"
    handle.wait()


def test_an_exchange_that_rounds_refuses(world: World) -> None:
    there = exact(world)
    for make in (lambda: CompressedExchange(there, "int8"), lambda: LowRankExchange(there, "power_sgd")):
        assert error_on_all(world, ConfigError, make).startswith("reduction=exact and compression=")


def test_servers_refuse(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    role = SimpleNamespace(kind="worker", num_servers=1, division="")
    job = SimpleNamespace(role=role)
    monkeypatch.setattr("mpitrain.strategies.parameter_server.the_job", lambda: job)
    there = exact(world)
    adapter = builder(60, 4 * world.size)(there).adapter
    text = error_on_all(world, ConfigError, lambda: mt.ParameterServer().begin(there, adapter))
    assert text.startswith("reduction=exact: a server adds up gradients in the order")


def test_compression_auto_is_none(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    there = exact(placed(world, "alone on each node"), compression="auto")
    capsys.readouterr()
    assert isinstance(make_exchange(there), PlainExchange)
    said = "compression auto: none; reduction=exact sends gradients as they are"
    if world.is_root:
        assert said in capsys.readouterr().out
    assert said in choices(there)


def test_a_wrong_name_on_one_rank(world: World) -> None:
    skip_alone(world)
    error_on_all(world, MismatchError, lambda: exact_sum(world, "rong" if world.rank == 1 else "ring"))
    with pytest.raises(ConfigError, match="no allreduce algorithm 'rong'"):
        exact_sum(world, "rong")


# -- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "algorithm", "way", "ran"),
    [
        ("", "auto", "shared_memory", "shared_memory"),
        ("alone on each node", "auto", "direct", "direct"),
        ("dealt out over 2 nodes", "auto", "hierarchical, in words of 64 bits", "hierarchical"),
        ("", "ring", "ring, in words of 64 bits", "ring"),
    ],
)
def test_what_is_said_is_what_runs(world: World, placement: str, algorithm: str, way: str, ran: str) -> None:
    if world.size < 3:
        pytest.skip("needs three ranks, so that all placements differ")
    there = exact(placed(world, placement) if placement else world, algorithm=algorithm)
    assert f"floats of all sizes, as reduction is exact: {way}; integers:" in choices(there)
    handle = exact_sum(there).start(numpy.ones(3, FLOAT32))
    handle.wait()
    assert str(handle) == f"allreduce exact {ran} of 3 float32"


def test_the_bench_says_that_its_sums_are_plain(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for there in (world, exact(world)):
        OPERATIONS["allreduce"].set_up(there, options_of("--algorithms", "native"))
        said = "# plain sums" in capsys.readouterr().out
        assert said == (world.is_root and there is not world)
