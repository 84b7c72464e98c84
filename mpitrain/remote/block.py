"""mt.workers, mt.run_on and mt.map_on: the block, the places that it knows by name, and the work of a worker in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from mpitrain.errors import MpitrainError
from mpitrain.remote.execute import execute, own_device
from mpitrain.remote.frames import CALL, END, RankLink, driven, name_of, pack, why_not
from mpitrain.remote.leader import Leader, RemoteFuture
from mpitrain.watching.ranges import rank_ranges
from mpitrain.world.world import World

# A rank's number, a name, or several of these.
Where: TypeAlias = "int | str | Iterable[int | str]"


class WorldPlaces:
    """The places of a World, each with its ranks."""

    def __init__(self, hosts: Sequence[str], node_ranks: Sequence[int], devices: Sequence[str]) -> None:
        """All by rank: the host, the number of the node, and the device such as "cuda:0"; "" without one."""
        self._size = len(hosts)
        self._ranks: dict[str, list[int]] = {f"rank {rank}": [rank] for rank in range(self._size)}
        self._nodes = [f"node {number}" for number in dict.fromkeys(node_ranks)]
        self._hosts = list(dict.fromkeys(hosts))
        pairs = dict.fromkeys(zip(hosts, devices, strict=True))
        self._devices = [f"{host}/{device}" for host, device in pairs if device]
        for rank, (host, number, device) in enumerate(zip(hosts, node_ranks, devices, strict=True)):
            names = [f"node {number}", host]
            if device:
                # Without its host, a device is a place only if one host alone has such a device.
                is_one = sum(other == device for _, other in pairs) == 1
                names += [f"{host}/{device}", *([device] if is_one else [])]
            for name in names:
                self._ranks.setdefault(name, []).append(rank)

    def ranks(self, where: Where) -> tuple[int, ...]:
        """Return the ranks of a place, or of several, in ascending order.

        Raises:
            ValueError: there is no such place. The text lists those that there are.
        """
        wanted = [where] if isinstance(where, int | str) else list(where)
        ranks: set[int] = set()
        for place in wanted:
            named = self._ranks.get(f"rank {place}" if isinstance(place, int) else place)
            if named is None:
                raise ValueError(f"where={place!r} is not a place of this World; there are {self._list()}")
            ranks.update(named)
        if not ranks:
            raise ValueError(f"where={where!r} names no place; there are {self._list()}")
        return tuple(sorted(ranks))

    def _list(self) -> str:
        texts = [f"ranks 0 to {self._size - 1}" if self._size > 1 else "rank 0"]
        for name in [*self._nodes, *self._hosts, *self._devices]:
            ranks = self._ranks[name]
            texts.append(f"{name!r} ({'rank' if len(ranks) == 1 else 'ranks'} {rank_ranges(ranks)})")
        return ", ".join(texts)


def serve(world: World, leader: int, device: str) -> bool:
    """Run the leader's functions on this rank. Return whether the communicator of `world` is to be freed."""
    link = RankLink(world.comm, leader)
    name = world.name(leader)
    while True:
        kind, frames = driven(world.control, link.receive(), f"mt.workers, for a function from {name}", (leader,))
        if kind != CALL:
            return kind == END
        answer = execute(world, frames, device)
        del frames  # the arguments; the answer may be as large
        world.control.wait(link.send(*answer), f"send the result of a function to {name}", (leader,))


_LEADER = 0


@dataclass(frozen=True)
class _OpenBlock:
    """The block that this process is in."""

    world: World
    places: WorldPlaces
    leader: Leader | None  # None on a worker


_block: _OpenBlock | None = None


@contextmanager
def workers(world: World) -> Iterator[bool]:
    """Enter a block in which rank 0 sends functions to named ranks. Collective.

        with mt.workers(world) as leads:
            if leads:  # rank 0 alone
                future = mt.run_on("node 1", power, matrix, 10)
                print(future.result())

    The value of `leads` is True on rank 0, the leader, which runs the body. On every other rank, a worker, entering the
    block runs the functions that the leader sends, one at a time in the main thread. It returns False when the leader
    leaves the block. So put the whole body under `if leads:`, as with MPICommExecutor of mpi4py.

    The leader waits at the end of the block until all functions have ended. If the body raises an error, the leader
    does not wait. Functions that have not begun are dropped, and the workers leave the block after their present one.

    Inside the block each rank works independently. A collective call, such as `world.mean` or `world.barrier`, is an
    error in the body and in the functions. `world.send` and `world.recv` may be used.

    Raises:
        MpitrainError: this process is in such a block already.
        RemoteError: at the end of the block, on the leader: a function has raised an error, and the program has not
            asked for its result.
        MismatchError: not all ranks make this call. Raised on every rank.
    """
    global _block  # noqa: PLW0603 - a process runs one function at a time
    if _block is not None:
        raise MpitrainError(f"{world.name()}: mt.workers inside mt.workers; leave the first block before")
    device = own_device(world)
    places = WorldPlaces(world.hosts, world.node_ranks, world._gather(device, "mt.workers"))
    apart = world.apart()
    leader = Leader(apart, device) if world.rank == _LEADER else None
    is_to_free = True

    def refuse() -> NoReturn:
        raise MpitrainError(
            f"{world.name()}: a collective call inside mt.workers, where the other ranks do not make it; make the "
            "call before or after the block"
        )

    _block = _OpenBlock(world, places, leader)
    world.control.elsewhere.append(refuse)
    try:
        if leader is None:
            is_to_free = serve(apart, _LEADER, device)
            yield False
        else:
            yield True
            leader.finish()
    except BaseException:
        if leader is not None:
            leader.abandon()
        raise
    finally:
        world.control.elsewhere.remove(refuse)
        _block = None
    if is_to_free:
        apart.free()
    if leader is not None:
        leader.raise_untold()


def run_on(where: Where, function: Callable[..., Any], *arguments: Any) -> RemoteFuture:
    """Run `function(*arguments)` on a rank of a place. Called by the leader alone, in a block of `mt.workers`.

    If a rank of the place is free, `run_on` returns when the arguments have left. Otherwise the function waits, and
    leaves when a rank of the place is free and the leader waits for anything. Until then, do not change the arguments.

    Args:
        where: a rank's number; "rank 3"; "node 1", by the numbers of `world.node_rank`; a host name; a GPU, such as
            "lab1/cuda:0", or "cuda:0" if one host alone has it; or a list of these. A GPU is known if `--hosts` gave it
            to a rank, or if the rank has asked for it, as by `array_module`. It is current while the function runs. If
            the place has several ranks, a free one runs the function. The leader gets it only if no other rank is free.
            A function on the leader runs in its main thread, the next time that it waits for a future.
        function: is sent by its name. It must be at the top level of a module, or of the script above the block. A
            lambda and a function inside a function are refused.
        arguments: anything that can be pickled. NumPy arrays of any shape, dtype and order are sent from where they
            are, without a pickle; one that is read-only or not contiguous is copied first. The function gets copies
            that it may change, also on the leader.

    Returns:
        A RemoteFuture: `result(timeout_seconds=None)` returns what the function returned, sent in the same way, or
        raises a RemoteError with the rank, its host and the traceback there. `done()` tells whether it has ended.

    Raises:
        ValueError: there is no place `where`. The text lists the places.
        TypeError: the function or an argument cannot be pickled. The text names it, and nothing is sent.
        MpitrainError: the call is not in a block, or not on the leader, or in another thread.
    """
    block, leader = _leading("run_on")
    try:
        ranks = block.places.ranks(where)
    except ValueError as error:
        raise ValueError(f"{leader.name()}: run_on: {error}") from None
    try:
        frames = pack((function, arguments))
    except Exception as error:
        reason = why_not(function, arguments) or f"the arguments cannot be sent: {type(error).__name__}: {error}"
        raise TypeError(f"{leader.name()}: run_on: {reason}") from error
    return leader.add(name_of(function), ranks, frames)


def map_on(where: Where, function: Callable[..., Any], *iterables: Iterable[Any]) -> list[Any]:
    """Return [function(*arguments) for arguments in zip(*iterables)], computed on the ranks of a place, in order.

    Each call goes to the next rank of `where` that is free. The leader computes too, if `where` has it, and sends new
    work only between two calls of its own. Where calls take long, leave the leader out.

    The arguments and errors are those of `run_on`. The RemoteError of the first call that
    fails is raised when the calls before it have ended. Calls that have not begun by then are dropped.

    Raises:
        ValueError: the iterables differ in length; or as in `run_on`.
    """
    _, leader = _leading("map_on")
    futures: list[RemoteFuture] = []
    try:
        futures += (run_on(where, function, *arguments) for arguments in zip(*iterables, strict=True))
        return [future.result() for future in futures]
    except BaseException:
        leader.drop(futures, "another call of the same map_on has failed")
        raise


def _leading(call: str) -> tuple[_OpenBlock, Leader]:
    if _block is None:
        raise MpitrainError(f"mt.{call} outside of a block: put it under `with mt.workers(world) as leads: if leads:`")
    if _block.leader is None:
        raise MpitrainError(
            f"{_block.world.name()}: mt.{call} on a worker; only {_block.world.name(_LEADER)} leads. In the body of "
            "the block put it under `if leads:`. A function that runs on a worker cannot use it"
        )
    _block.leader.check_thread()
    return _block, _block.leader
