"""World: who the ranks are, what one of them prints, and errors that all of them raise."""

from __future__ import annotations

import dataclasses
import socket

import pytest

import mpitrain
from mpitrain import World
from mpitrain.errors import CheckpointError, ConfigError, DataError, MpitrainError

from .common import error_on_all, skip_alone

# -- identity ---------------------------------------------------------------------------------------------------


def test_ranks_are_those_of_mpi(world: World) -> None:
    from mpi4py import MPI

    assert (world.rank, world.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert world.allgather(world.rank) == list(range(world.size))
    assert world.is_root == (world.rank == 0)
    assert world.generation == 0


def test_all_ranks_are_on_one_node(world: World) -> None:
    assert world.hosts == (socket.gethostname(),) * world.size
    assert world.host == socket.gethostname()
    assert world.num_nodes == 1
    assert world.node_rank == 0
    assert world.node_ranks == (0,) * world.size
    assert (world.local_rank, world.local_size) == (world.rank, world.size)
    assert world.name() == f"rank {world.rank} on {socket.gethostname()}"
    assert world.name(0) == f"rank 0 on {socket.gethostname()}"


def test_communicators_are_private(world: World) -> None:
    from mpi4py import MPI

    assert MPI.Comm.Compare(world.comm, MPI.COMM_WORLD) == MPI.CONGRUENT
    assert MPI.Comm.Compare(world.objects, MPI.COMM_WORLD) == MPI.CONGRUENT
    assert MPI.Comm.Compare(world.comm, world.objects) == MPI.CONGRUENT


def test_the_ranks_of_a_group_have_their_numbers_and_the_group_is_freed(world: World) -> None:
    from mpi4py import MPI

    from mpitrain.job.recovery import numbers_in_job

    everyone = MPI.COMM_WORLD.Get_group()
    odd = everyone.Incl(list(range(world.size - 1, -1, -2)))
    assert numbers_in_job(odd) == list(range(world.size - 1, -1, -2))
    empty = everyone.Excl(list(range(world.size)))
    assert numbers_in_job(empty) == []
    everyone.Free()
    assert odd == empty == MPI.GROUP_NULL


def test_world_is_made_once_and_never_changes(world: World) -> None:
    assert mpitrain.init() is world
    with pytest.raises(ConfigError, match="called before"):
        mpitrain.init(bucket_mib=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.generation = 1  # type: ignore[misc]


def test_print(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.print("step", 3, None)
    assert capsys.readouterr().out == ("step 3 None\n" if world.rank == 0 else "")
    world.print("step", 3, all_ranks=True)
    assert capsys.readouterr().out == f"[rank {world.rank} on {socket.gethostname()}] step 3\n"
    world.print()
    assert capsys.readouterr().out == ("\n" if world.rank == 0 else "")


# -- together ---------------------------------------------------------------------------------------------------


def test_together_without_an_error(world: World) -> None:
    with world.together("do nothing"):
        done = True
    assert done
    assert world.sum(1) == world.size


def failing(world: World, errors: dict[int, Exception]) -> None:
    with world.together("try something"):
        if world.rank in errors:
            raise errors[world.rank]


@pytest.mark.parametrize(
    "kind", [DataError, CheckpointError, ConfigError, MpitrainError], ids=lambda kind: kind.__name__
)
def test_an_error_of_ours_on_one_rank_is_raised_on_all(world: World, kind: type[MpitrainError]) -> None:
    for odd in range(world.size):
        error = kind("the file is missing")
        with pytest.raises(kind) as caught:
            failing(world, {odd: error})
        assert type(caught.value) is kind
        assert caught.value.known_everywhere
        if world.rank == odd:
            assert caught.value is error
        else:
            assert str(caught.value) == f"{world.name(odd)}, try something: the file is missing"
        assert world.sum(1) == world.size


def test_another_error_on_one_rank_is_raised_on_all(world: World) -> None:
    for odd in range(world.size):
        text = error_on_all(world, MpitrainError, lambda odd=odd: failing(world, {odd: KeyError("weights")}))
        assert text == f"{world.name(odd)}, try something: KeyError: 'weights'"


def test_the_error_of_the_lowest_rank_is_raised(world: World) -> None:
    skip_alone(world)
    low, high = world.size - 2, world.size - 1
    with pytest.raises(MpitrainError) as caught:
        failing(world, {low: DataError("first"), high: ConfigError("second")})
    assert type(caught.value) is DataError
    assert str(caught.value).endswith("first")


def test_the_cause_is_kept_on_the_rank_that_failed(world: World) -> None:
    error = OSError("disk full")
    with pytest.raises(MpitrainError) as caught:
        failing(world, {0: error})
    assert caught.value.__cause__ is (error if world.rank == 0 else None)
