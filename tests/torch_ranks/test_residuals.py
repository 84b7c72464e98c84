"""What a codec has left out, saved and restored: a run that resumes has the bits of one without interruption."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpitrain.torch
from mpitrain import World
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.state.memory_slot import MemorySlot, read_copy
from mpitrain.state.names import split
from mpitrain.torch.keep import TorchRankState
from tests.ranks.placements import placed

pytestmark = pytest.mark.usefixtures("group", "several")
STEPS = 6


class Run:
    """A model, its optimizer, and steps of all ranks, each as if on a node of its own."""

    def __init__(self, world: World, kind: str, codec: str = "bf16") -> None:
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.world, self.kind, self.codec = world, kind, codec
        made = torch.Generator().manual_seed(3)
        self.x, self.y = (torch.randn(STEPS, 2 * world.size, count, generator=made) for count in (6, 1))
        self.model: Any = self.net

    def begin(self) -> None:
        """Make the model ready, with parameters as they are now."""
        if self.kind == "prepare":
            batches = [(x, y) for x, y in zip(self.x, self.y, strict=True)]
            self.model, _, self.data = mpitrain.torch.prepare(
                self.net, self.optimizer, batches, compression=self.codec, bucket_bytes=4000
            )
        else:
            # Several buckets from the second step on.
            self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.002)
            self.model.register_comm_hook(None, mpitrain.torch.compress(self.codec))

    def steps(self, first: int, end: int) -> None:
        mine = slice(2 * self.world.rank, 2 * self.world.rank + 2)
        batches = (
            enumerate(self.data)
            if self.kind == "prepare"
            else ((n, (self.x[n, mine], self.y[n, mine])) for n in range(STEPS))
        )
        for number, (x, y) in batches:
            if first <= number < end:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    def bits(self) -> list[bytes]:
        return [parameter.detach().numpy().tobytes() for parameter in self.net.parameters()]


@pytest.fixture(params=["ddp", "prepare"])
def kind(world: World, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    channel = dist.group.WORLD._channel
    monkeypatch.setattr(channel, "world", placed(channel.world, "alone on each node"))
    apart = placed(world, "alone on each node")
    monkeypatch.setattr(sys.modules["mpitrain.torch.prepare"], "init", lambda: apart)  # the function has its name, too
    return str(request.param)


CASES = [(1, "bf16"), (3, "top_k:0.1"), (3, "power_sgd:2")]
NIGHTLY = [(3, "bf16"), (1, "power_sgd:2")]


@pytest.mark.parametrize(
    ("stop", "codec"), [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)]
)
def test_a_resumed_run_has_the_same_bits(world: World, kind: str, shared: Path, stop: int, codec: str) -> None:
    """Also after the first step, behind which DDP makes other buckets. Without the residuals it has others."""
    whole = Run(world, kind, codec)
    whole.begin()
    whole.steps(0, STEPS)
    first = Run(world, kind, codec)
    first.begin()
    first.steps(0, stop)
    state = {**first.state(), "residuals": mpitrain.torch.residuals(first.model)}
    mpitrain.torch.save(state, shared / "state.pt")
    memory = MemorySlot()
    memory.write(stop, 0, world.size, *split(TorchRankState([first.model]).state()))
    if stop > 1:
        first.steps(stop, STEPS)  # undisturbed by the look at them
        assert first.bits() == whole.bits()
    for source in ("file", "memory", ""):
        resumed, state = Run(world, kind, codec), mpitrain.torch.load(shared / "state.pt")
        resumed.restore(state)
        resumed.begin()
        if source == "file":
            mpitrain.torch.restore_residuals(resumed.model, state["residuals"])
        elif source == "memory":
            kept, own = read_copy(memory.content()).state, TorchRankState([resumed.model])
            assert kept["place"] == own.state()["place"]
            own.restore(kept)
        resumed.steps(stop, STEPS)
        assert (resumed.bits() == whole.bits()) == bool(source)
    memory.close()


def test_other_ranks_or_nodes(world: World, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Dropped, and said once; the run continues. Those of another model are refused."""
    run = Run(world, kind)
    run.begin()
    run.steps(0, 2)
    of_ranks = world.broadcast_object(mpitrain.torch.residuals(run.model))["of_ranks"]
    assert len(of_ranks) == world.size
    resumed = Run(world, kind)
    resumed.begin()
    moved = [{**one, "place": "elsewhere"} for one in of_ranks]
    for other, words in (([*of_ranks, of_ranks[0]], f"by {world.size + 1} ranks, and"), (moved, "on other nodes")):
        mpitrain.torch.restore_residuals(resumed.model, {"of_ranks": other})
        out = capsys.readouterr().out
        assert out.count("is not restored") == world.is_root
        assert (words in out) == world.is_root
    kept = world.broadcast_object(mpitrain.torch.residuals(resumed.model))["of_ranks"][world.rank]["residual"]
    assert not any(part.any() for part in kept.values())
    resumed.steps(0, 1)
    for one in of_ranks:
        one["residual"]["other"] = one["residual"].pop("0.weight")
    with pytest.raises(CheckpointError):
        mpitrain.torch.restore_residuals(run.model, {"of_ranks": of_ranks})
    run.steps(2, 3)


def test_what_has_no_residuals(world: World, kind: str) -> None:
    plain = nn.Linear(2, 1)
    model, words = (plain, "residuals(model): this model was not given to prepare()")
    if kind == "ddp":
        model, words = DistributedDataParallel(plain), "this model has no hook of mpitrain.torch.compress"
    for call in (mpitrain.torch.residuals, lambda one: mpitrain.torch.restore_residuals(one, {"of_ranks": []})):
        with pytest.raises(ConfigError) as found:
            call(model)
        assert words in str(found.value)
    assert world.sum(1) == world.size
