"""hvd.elastic's states and sampler: what they save, take over from rank 0, and refuse."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest
import torch

from mpitrain import World
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.horovod import elastic
from mpitrain.horovod.elastic import torch_state as module
from tests.ranks.common import skip_alone


def made(rank: int, *, steps: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with buffers that differs from rank to rank, and an optimizer with a momentum after some steps."""
    generator = torch.Generator().manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank), momentum=0.9)
    for _ in range(1 + steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).pow(3).sum().backward()
        optimizer.step()
    return model, optimizer


def values(state: elastic.TorchState) -> str:
    """All that is in a state, with all bits."""
    torch.set_printoptions(threshold=10**6, precision=17)
    return repr(state.state_dict())


def test_rank_0s_state_is_taken_over_and_restored(world: World) -> None:
    model, optimizer = made(world.rank, steps=1)
    state = elastic.TorchState(model, optimizer, epoch=world.rank, rows=[numpy.arange(3) + world.rank])
    was = values(state)
    of_root = world.broadcast_object(was)
    state.sync()
    assert values(state) == of_root
    assert was == of_root or world.rank
    assert state.model is model
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    state.epoch, state.rows[0][1] = 9, -1
    assert values(state) != of_root
    state.restore()
    assert values(state) == of_root
    state.epoch = 9
    state.restore()  # a second loss, before a commit
    state.epoch += 1
    state.commit()
    state.epoch = 0
    state.restore()
    assert state.epoch == 1
    bare = elastic.TorchState(batch=world.rank)
    bare.sync()
    assert (bare.model, bare.optimizer, bare.state_dict()) == (None, None, {"batch": 0})


def test_run_calls_once_more_where_the_script_asks_for_it(world: World) -> None:
    """Without a restore, as in Horovod; the callbacks come first."""
    state, calls = elastic.ObjectState(n=world.rank), []
    state.register_reset_callbacks([lambda: calls.append("reset")])

    @elastic.run
    def train(state: elastic.ObjectState, add: int, *, to: int) -> int:
        calls.append(state.n)
        state.n += add
        if state.n < to:
            raise elastic.HostsUpdatedInterrupt(skip_sync=state.n == 2)
        return state.n

    assert train(state, 1, to=3) == 3
    assert calls == [0, "reset", 1, "reset", 2]


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("not this one")

    def __deepcopy__(self, memo: object) -> Unpicklable:
        return self


def test_what_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="was given a int as its first argument; give it a state"):
        elastic.run(lambda state: None)(3)
    with pytest.raises(AttributeError, match=r"elastic has no TensorFlowState; the nearest .* is \w*State"):
        elastic.TensorFlowState  # noqa: B018 - it is the access that is refused
    with pytest.raises(NotImplementedError, match=r"State needs a method save\(\)"):
        elastic.State().commit()
    with pytest.raises(CheckpointError, match="the state cannot be kept: not this one"):
        elastic.ObjectState(lock=Unpicklable()).sync()
    skip_alone(world)
    names = {"a": 1, "b": 2} if world.rank else {"b": 2, "a": 1}
    with pytest.raises(Exception, match="a state of b, a; this one has a, b"):
        elastic.ObjectState(**names).sync()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("length", [0, 1, 5, 23])
def test_a_sampler_goes_on_with_what_is_left(world: World, length: int, shuffle: bool) -> None:
    """First on this rank alone; then the ranks divide what it has not processed, and the next epoch has all samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "init", lambda: SimpleNamespace(rank=0, size=1))
        sampler = elastic.ElasticSampler(range(length), shuffle=shuffle, seed=3)
        used = list(sampler)[:2]
        assert sorted(sampler) == list(range(length))
        sampler.record_batch(0, len(used))
    state = elastic.TorchState(sampler=sampler, batch=1)
    state.sync()
    own = list(sampler)
    assert len(own) == len(sampler) == -(-(length - len(used)) // world.size)
    of_ranks = world.allgather(own)
    rest = [one for row in zip(*of_ranks, strict=True) for one in row][: length - len(used)]
    assert sorted(used + rest) == list(range(length))
    assert used + rest == list(range(length)) or shuffle
    sampler.set_epoch(1)
    everyone = {one for of_rank in world.allgather(list(sampler)) for one in of_rank}
    assert everyone == set(range(length))
