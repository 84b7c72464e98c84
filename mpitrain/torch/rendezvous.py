"""The rendezvous of `init_process_group("mpitrain")`: rank, world size and a store, all from MPI.

`import mpitrain.torch` sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE if they are missing, as torchrun does,
from the launcher's variables. Scripts read them before anything else, and MPI need not have started.
`init_process_group` without an init_method calls the handler of `env://`. In an MPI job, that is this module's handler.
It calls `mpitrain.init()`, and refuses a RANK or WORLD_SIZE, from the environment or as an argument, that is not MPI's.
If no MPI launcher has started the process and torchrun's variables are set, it passes the call on to PyTorch's own
handler.

The store is a TCPStore on rank 0. A rank connects to it at its first use. mpitrain itself never uses it, nor do
`new_group`, DDP, FSDP2, DeviceMesh and torch.distributed.checkpoint with this backend. So no job fails because a
firewall closes a port, or a host name does not resolve. Other backends beside it do use it
(`new_group(backend="gloo")`), and so does TORCH_DIST_INIT_BARRIER=1. The operating system chooses the port, unless
MASTER_PORT is set. Rank 0's addresses come over MPI; a rank leaves out those that its own host has too (127.0.0.1,
docker0). If MASTER_ADDR is set, it is tried first. If not, both variables are set for scripts that read them.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any
from urllib.parse import parse_qsl, urlparse

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import Backend
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers as handlers

from mpitrain.context import ADDED
from mpitrain.early import take_place
from mpitrain.errors import LaunchError, MpitrainError
from mpitrain.job.start import NO_RANK, ONE_START, init
from mpitrain.launch.launched import launched_by
from mpitrain.launch.rank import place_of
from mpitrain.own_addresses import addresses
from mpitrain.reading import shown, whole
from mpitrain.torch.engine import engine_of
from mpitrain.world.world import World

_CONNECT_SECONDS = 5.0
_FOUR = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_env_handler = handlers["env"]
_set_here: dict[str, str] = {}  # the variables that this module has added to the environment
_inherited: dict[str, str] = {}  # those of the four that were already set
_store: LateStore | None = None  # one per process: a second init_process_group finds the same server
_num_groups = 0  # how many groups have received the store


def offer() -> None:
    """Register this module's handler for `env://`, and set the variables that follow from the launcher's. MPI is not
    started."""
    take_place()
    handlers["env"] = _from_mpi
    _inherited.update({name: os.environ[name] for name in _FOUR if name in os.environ})
    launched = launched_by(os.environ)
    if launched is None or launched.rank is None:
        return
    _add("RANK", launched.rank)
    _add("WORLD_SIZE", launched.size)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if (value := place_of(os.environ).get(name)) is not None:
            _add(name, value)


def check_place(world: World, rank: int, size: int, origin: str) -> None:
    """Raise LaunchError unless `rank` and `size`, from `origin`, are MPI's.

    Not collective, but the job ends if a single rank raises; see mpitrain.init.
    """
    if (rank, size) != (world.rank, world.size):
        raise LaunchError(
            f"{world.name()}: {origin} says rank {rank} of {size}, MPI says rank {world.rank} of {world.size}. The "
            "backend mpitrain runs one process for each rank of MPI: start the job with mpiexec or `mpitrain run`, not "
            "with torchrun, and leave out rank= and world_size=, RANK and WORLD_SIZE"
        )


def _from_mpi(url: str, timeout: timedelta = default_pg_timeout, **rest: Any) -> Iterator[Any]:
    """The handler of `env://`: yields store, rank and world size. Collective."""
    global _num_groups  # noqa: PLW0603 - as the store
    named = [os.environ.get(name) not in (None, _set_here.get(name)) for name in _FOUR]
    given = dict(parse_qsl(urlparse(url).query))
    if is_helper := multiprocessing.parent_process() is not None:
        # Such as the process of dcp.async_save, which gets another port. A rank's variables are inherited.
        named = [all(named) and any(os.environ[name] != _inherited.get(name) for name in _FOUR) and not given]
    if all(named) and (is_helper or launched_by(os.environ) is None):
        yield from _env_handler(url, timeout=timeout, **rest)
        return
    if is_helper:
        raise LaunchError(f"on {socket.gethostname()}: init_process_group was called in {NO_RANK}. {ONE_START}")
    world = init()
    _tell_of_gloo(world)
    with world.together("init_process_group"):
        for origin, names in (
            ("the environment", ("RANK", "WORLD_SIZE")),
            ("init_process_group", ("rank", "world_size")),
        ):
            source = os.environ if names[0].isupper() else given
            rank, size = (source.get(name) for name in names)
            check_place(world, _number(rank, world.rank), _number(size, world.size), origin)
    for name, value in {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
    }.items():
        _add(name, value)
    store = _shared_store(world, timeout)
    engine_of(world)  # all ranks call this; the first group of this backend may have only a few of them
    _num_groups += 1
    # torchrun does the same for its attempts. So this group finds no entries of an earlier one.
    yield PrefixStore(f"mpitrain {_num_groups}", store), world.rank, world.size
    raise RuntimeError("a rank of MPI cannot leave its job and join it again")


def _has_gloo(backend: str) -> bool:
    """Whether arrays on the CPU use gloo; `backend` is as in `gloo`, `cpu:gloo,cuda:nccl`, `undefined`, `None`."""
    if backend.lower() in ("undefined", "none"):
        return Backend.default_device_backend_map["cpu"] == "gloo"
    return bool({"gloo", "cpu:gloo"} & set(backend.lower().split(",")))


def _tell_of_gloo(world: World) -> None:
    """Print a line if a library, not the program itself, has chosen gloo for the new group."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    backend = str(frame.f_locals.get("backend")) if frame is not None else ""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    if frame is not None and _has_gloo(backend) and re.search(r"/(site|dist)-packages/", frame.f_code.co_filename):
        library = frame.f_globals.get("__name__", "").partition(".")[0]
        world.print(
            f"mpitrain: {library} begins a process group of gloo, so its exchanges do not go through mpitrain. To "
            'change that, call torch.distributed.init_process_group("mpitrain") before'
        )


class LateStore(Store):
    """A store on rank 0. A rank connects at its first use.

    The names of the methods are those by which PyTorch's own stores call a store that is written in Python.
    """

    def __init__(
        self, world: World, server: Store | None, port: int, addresses: Sequence[str], timeout: timedelta
    ) -> None:
        """`server` is None except on rank 0. `addresses` are tried in this order."""
        super().__init__()
        self._timeout = timeout
        self._world = world
        self._store = server
        self._port = port
        self._addresses = addresses

    def set(self, key: str, value: Any) -> None:
        self._server.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._server.get(key))

    def add(self, key: str, value: int) -> int:
        return int(self._server.add(key, value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._server.compare_set(key, expected, desired))

    def check(self, keys: list[str]) -> bool:
        return bool(self._server.check(keys))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._server.wait(keys, *timeout)

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return bool(self._server.delete_key(key))

    def getNumKeys(self) -> int:  # noqa: N802
        return int(self._server.num_keys())

    def clone(self) -> LateStore:
        return self

    @property
    def _server(self) -> Store:
        if self._store is None:
            self._store = self._connect()
        return self._store

    def _connect(self) -> Store:
        tried = []
        for address in self._addresses:
            try:
                # Try the connection first, because a TCPStore retries for long and writes warnings.
                socket.create_connection((address, self._port), _CONNECT_SECONDS).close()
                return TCPStore(address, self._port, timeout=self._timeout, wait_for_workers=False)
            except (OSError, RuntimeError) as error:
                tried.append(f"{address}: {error}")
        raise MpitrainError(
            f"{self._world.name()}: cannot reach the store on {self._world.name(0)}, port {self._port}, which "
            f"something beside the backend mpitrain uses ({'; '.join(tried)}). Open a port between the hosts and "
            "set MASTER_PORT to it, and MASTER_ADDR to an address of that host; or use only the backend mpitrain"
        )


def _shared_store(world: World, timeout: timedelta) -> Store:
    """Return the store of this job. Collective."""
    global _store  # noqa: PLW0603 - one server a process
    if _store is not None:
        return _store
    server: TCPStore | None = None
    with world.together("start a store"):
        if world.is_root:
            port = _number(os.environ.get("MASTER_PORT"), 0)
            server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    by_rank = world.allgather((server.port if server else 0, addresses()))
    port, of_root = by_rank[0]
    elsewhere = {
        address
        for rank, (_, host_addresses) in enumerate(by_rank)
        if world.node_ranks[rank] != world.node_ranks[0]
        for address in host_addresses
    }
    reached = [address for address in of_root if address not in elsewhere] + [world.hosts[0]]
    named = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    is_near = world.node_rank == world.node_ranks[0]
    _add("MASTER_ADDR", "127.0.0.1" if world.num_nodes == 1 else reached[0])
    _add("MASTER_PORT", port)
    _store = LateStore(world, server, port, ["127.0.0.1"] if is_near else named + reached, timeout)
    return _store


def _add(name: str, value: object) -> None:
    """Set an environment variable if it is missing."""
    if name not in os.environ:
        os.environ[name] = _set_here[name] = str(value)
        os.environ[ADDED] = ",".join([*os.environ.get(ADDED, "").split(","), name])


def _number(text: str | None, default: int) -> int:
    if text is None:
        return default
    number = whole(text, 0, 2**31 - 1)
    if number is None:
        raise LaunchError(f"on {socket.gethostname()}: RANK, WORLD_SIZE and MASTER_PORT are numbers, not {shown(text)}")
    return number
