"""The bench on buffers on GPUs, and what is said of the transports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mpitrain import World
from mpitrain.cuda.sequential import DeviceSequential
from mpitrain.cuda.transports import KINDS, LARGE_BYTES, SMALL_BYTES, Choice, choose, make_transport
from mpitrain.forecast.bench import main
from tests.ranks.common import skip_alone

Chosen = tuple[dict[str, DeviceSequential], Choice]


@pytest.fixture(scope="module")
def chosen(world: World) -> Chosen:
    return choose(world, KINDS)


def test_all_transports(
    world: World, chosen: Chosen, shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "bench --device cuda --algorithms all --sizes 4K,256K --rounds 1 --dtypes float32,int8"
    monkeypatch.setattr(sys, "argv", [*words.split(), f"--json={shared / 'r.json'}"])
    assert main() == 0
    world.barrier()
    report = json.loads((shared / "r.json").read_text())
    assert report["device"] == "cuda"
    made, choice = chosen
    names = {"auto", *made}
    for size, dtype in ((2**12, "float32"), (2**18, "int8")):
        rows = [row for row in report["rows"] if (row["size_bytes"], row["dtype"]) == (size, dtype)]
        assert {row["algorithm"] for row in rows} == names
        assert all(row["wrong"] == 0 and row["ratio_to_mpi"] is None for row in rows)
    if world.is_root:
        said = capsys.readouterr().out
        assert f"for {world.size} ranks" in said
        assert all(f"# {name} is left out: the transport {name} is not possible" in said for name in choice.why_not)


def test_the_choice_is_the_same_on_all_ranks(world: World, chosen: Chosen) -> None:
    skip_alone(world)
    made, choice = chosen
    assert set(choice.small) == set(choice.large) == set(made) == set(choice.seconds)
    assert set(made) | set(choice.why_not) == set(KINDS)
    assert len(set(world.allgather(repr(choice)))) == 1
    fastest = min(choice.seconds, key=lambda name: choice.seconds[name][1])
    assert choice.large[0] == fastest
    lines = choice.lines()
    assert f"us for {SMALL_BYTES // 1024} KiB, " in lines[len(choice.why_not)]
    assert f"us for {LARGE_BYTES // 1024} KiB" in lines[len(choice.why_not)]
    assert lines[-1].endswith(f"from there on: {fastest}")
    for name in made:
        assert str(make_transport(world, name).name) == name


def test_not_possible_is_an_exit_code(
    world: World, chosen: Chosen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why_not = chosen[1].why_not
    if not why_not:
        pytest.skip("every transport is possible here")
    name, why = next(iter(why_not.items()))
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cuda", "--algorithms", name])
    assert main() == 2
    said = capsys.readouterr().err
    assert said.count(f"mpitrain bench: the transport {name} is not possible here: {why}") == int(world.is_root)
