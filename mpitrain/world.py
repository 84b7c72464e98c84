"""World: which rank this is, who the others are, and the calls that all ranks make together."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

from mpitrain import errors
from mpitrain.arrays import Array
from mpitrain.config import Config
from mpitrain.errors import MpitrainError, everywhere
from mpitrain.job.context import JobContext
from mpitrain.profile import DEFAULT, Profile
from mpitrain.shard import shards
from mpitrain.tree import Tree
from mpitrain.waiting.agreement import Agreement
from mpitrain.waiting.background import Background, Queue
from mpitrain.waiting.control import Control
from mpitrain.waiting.messages import Messages
from mpitrain.waiting.transfer import broadcast_bytes, gather_bytes

if TYPE_CHECKING:
    import numpy
    from mpi4py import MPI


class TreeExchange(Protocol):
    """How arrays move between ranks; exchange/trees.py has it. It stands above World, so World is handed it."""

    def sync(self, tree: Tree, root: int) -> Tree: ...

    def sum(self, tree: Tree) -> Tree: ...

    def mean(self, tree: Tree, weight: float) -> Tree: ...


class Observer(Protocol):
    """Who is told which samples this rank gets, and the mean gradients by parameter; verify/run_record.py has it."""

    def saw(self, batch: Tree) -> None: ...

    def saw_means(self, means: Mapping[str, Array]) -> None: ...


@dataclass(frozen=True, eq=False)
class World:
    """The ranks of one job, or some of them. It never changes: after a lost rank there is one of the next generation.

    All methods but `print`, `send`, `receive` and `shard` are collective: every rank calls them, in the same
    order. Where ranks do not, every rank gets a MismatchError that names the first difference. In a world of one
    every call works and sends nothing.
    """

    comm: MPI.Comm  # a private duplicate, for array data
    queue: Queue  # what has been started on it
    objects: MPI.Comm  # a private duplicate, for agreements and Python objects
    background: Background  # the calls of mpitrain.collectives, on a private duplicate
    hosts: tuple[str, ...]  # host name of every rank
    node_ranks: tuple[int, ...]  # node rank of every rank: equal for those that share a machine's memory
    generation: int
    config: Config
    context: JobContext  # what the launcher told this rank
    control: Control
    make_arrays: Callable[[World], TreeExchange]
    owned: list[Callable[[], None]]  # what gives back to MPI, and to others, what was made for this world
    profile: Profile = DEFAULT
    parent: World | None = None  # that this one's ranks are a part of; None for the first of a job
    observer: Observer | None = None  # with `mpitrain verify`

    @cached_property
    def rank(self) -> int:
        """This process among all, 0 to size - 1."""
        return int(self.comm.rank)

    @cached_property
    def size(self) -> int:
        """The world size: how many ranks there are."""
        return int(self.comm.size)

    @property
    def local_rank(self) -> int:
        """This process among those on this machine."""
        return self.node_ranks[: self.rank].count(self.node_rank)

    @property
    def local_size(self) -> int:
        """How many ranks are on this machine."""
        return self.node_ranks.count(self.node_rank)

    @property
    def node_rank(self) -> int:
        """This machine among all, by its lowest rank."""
        return self.node_ranks[self.rank]

    @property
    def num_nodes(self) -> int:
        """How many machines there are."""
        return len(set(self.node_ranks))

    @property
    def host(self) -> str:
        """This machine's name."""
        return self.hosts[self.rank]

    @property
    def is_root(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @cached_property
    def arrays(self) -> TreeExchange:
        """What `sync`, `sum` and `mean` are made of."""
        return self.make_arrays(self)

    def name(self, rank: int | None = None) -> str:
        """`rank 3 on node7`, for messages. Default: this rank."""
        return self.control.name(self.rank if rank is None else rank)

    def print(self, *values: object, all_ranks: bool = False) -> None:
        """Print on rank 0, or with `all_ranks` on every rank behind its name. Not collective."""
        if all_ranks:
            # One write, so that lines of different ranks do not mix.
            sys.stdout.write(f"[{self.name()}] " + " ".join(str(value) for value in values) + "\n")
            sys.stdout.flush()
        elif self.is_root:
            print(*values, flush=True)

    # -- arrays ---------------------------------------------------------------------------------------------

    def sync(self, tree: Tree, root: int = 0) -> Tree:
        """`root`'s values in a new tree on every rank.

        Args:
            tree: any nesting of dicts, lists, tuples and None around arrays (host or device, any dtype and shape)
                and numbers; not changed. It must have the same form on every rank.
            root: the rank whose values count.

        Raises:
            MismatchError: the trees differ in form, shape or dtype. On every rank, before anything is sent.
            TreeError: a leaf is neither an array nor a number.
        """
        return self.arrays.sync(tree, root)

    def sum(self, tree: Tree) -> Tree:
        """The sum over ranks of every leaf, in a new tree on every rank; the same bits on every rank.

        Leaves may be of any integer or floating dtype (float16 and bfloat16 too) and keep it; integers wrap as
        NumPy's do. Otherwise as `sync`.
        """
        return self.arrays.sum(tree)

    def mean(self, tree: Tree, weight: float = 1.0) -> Tree:
        """The weighted mean over ranks of every leaf, in a new tree on every rank; the same bits on every rank.

        mean = sum over ranks of weight x leaf, divided by the sum of the weights. With the number of samples as
        weight, uneven batches give exactly the mean of the whole batch.

        Args:
            tree: as for `sync`, but with floating leaves only; numbers become float.
            weight: this rank's weight, in samples; 0 makes this rank's values count for nothing, NaN included.

        Raises:
            MismatchError: as for `sync`.
            TreeError: an integer array (its mean would not fit its dtype), or as for `sync`.
            DataError: a weight is negative or not finite, or all weights are 0. On every rank.
        """
        return self.arrays.mean(tree, weight)

    def shard(self, batches: Iterable[Tree], start: int = 0) -> Iterator[Tree]:
        """This rank's part of every batch: the ranks' parts are disjoint and together the whole batch.

        Every rank iterates over the same `batches` and gets a contiguous slice of each one, so the global batch and
        the loss curve are those of a single process at any world size. The parts differ by at most one sample. A
        last batch with fewer samples than ranks leaves some ranks an empty part: pass `weight=len(x)` to `mean`.

        Args:
            batches: global batches: arrays, or trees of arrays, with the samples along the first dimension.
            start: batches to leave out, to resume where an earlier run stopped.

        Raises:
            DataError: there is no batch at all, fewer than `start`, or the first one has fewer samples than there
                are ranks.
            ValueError: `start` is negative.
        """
        return shards(self, batches, start)

    # -- Python objects ---------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.agree("barrier")

    def broadcast(self, value: Any = None, root: int = 0) -> Any:
        """`root`'s object on every rank, by pickle; the others' `value` is not looked at."""
        self.check_rank(root, "root")
        content = bytearray(pickle.dumps(value, protocol=5) if self.rank == root else b"")
        records = self.agree(f"broadcast from rank {root}", detail=len(content))
        if self.size == 1:
            return value
        if self.rank != root:
            content = bytearray(int(records["detail"][root]))
        broadcast_bytes(self.objects, content, root, self.control.wait)
        return value if self.rank == root else pickle.loads(content)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Every rank's object in rank order on `root`, by pickle; None on the others."""
        self.check_rank(root, "root")
        values = self._gather(value, f"gather to rank {root}")
        return values if self.rank == root else None

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's object in rank order, on every rank, by pickle."""
        return self._gather(value, "allgather")

    def _gather(self, value: Any, operation: str) -> list[Any]:
        content = pickle.dumps(value, protocol=5)
        records = self.agree(operation, detail=len(content))
        if self.size == 1:
            return [value]
        sizes = [int(size) for size in records["detail"]]
        contents = gather_bytes(self.objects, content, self.control.wait, sizes)
        return [pickle.loads(content) for content in contents]

    def send(self, value: Any, to: int, tag: int = 0) -> None:
        """Send an object to one rank, by pickle (arrays too). Returns when `value` may be changed again.

        Messages of one sender, receiver and tag arrive in the order in which they were sent.
        """
        self.check_rank(to, "to")
        self._messages.send(value, to, tag)

    def receive(self, source: int, tag: int = 0) -> Any:
        """The next object that `source` sent to this rank with this tag."""
        self.check_rank(source, "source")
        return self._messages.receive(source, tag)

    @cached_property
    def _messages(self) -> Messages:
        return Messages(self.comm, self.control)

    # -- what the rest of the library builds on -----------------------------------------------------------------

    def begin_agreement(self, operation: str, lines: Sequence[str] = (), **record: Any) -> Agreement:
        """Say what this rank is about to do, without waiting; see agreement.py."""
        return Agreement(self.objects, self.control, operation, lines, **record)

    def agree(self, operation: str, lines: Sequence[str] = (), **record: Any) -> numpy.ndarray:
        """All ranks are about to do the same, or all raise MismatchError. Returns their records, one row a rank."""
        return self.begin_agreement(operation, lines, **record).wait()

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """A block whose failure on any rank is a failure on all: each raises the lowest failing rank's error.

        Use it around what may fail on one rank alone, such as reading a file. Nothing in the block may be collective.
        """
        problem: BaseException | None = None
        try:
            with self.control.busy(doing):
                yield
        except Exception as error:
            problem = error
        problems = self.allgather(None if problem is None else (type(problem).__name__, str(problem)))
        failed = [rank for rank, failure in enumerate(problems) if failure is not None]
        if not failed:
            return
        if isinstance(problem, MpitrainError) and self.rank == failed[0]:
            raise everywhere(problem)
        kind, text = problems[failed[0]]
        common = everywhere(_named(kind, f"{self.name(failed[0])}, {doing}", text))
        common.is_repeated = self.rank != failed[0]
        raise common from problem

    def apart(self) -> World:
        """The same ranks on a communicator of their own, whose messages meet no others. Collective, as is its `free`.

        Raises:
            MpitrainError: MPI has no more of them.
        """
        from mpi4py import MPI

        try:
            comm = self.comm.Dup()
        except MPI.Exception as error:
            raise MpitrainError(
                f"{self.name()}: MPI has no further communicator ({error}); each GradientReducer and Trainer keeps one "
                "until its close(): close those that are used no more, or make them once, not in a loop"
            ) from None

        apart = replace(self, comm=comm, queue=Queue(self.control), owned=[comm.Free])
        self.owned.append(apart.free)
        apart.owned.append(partial(_discard, self.owned, apart.free))
        return apart

    def free(self) -> None:
        """Give back what this world owns, the last first. Collective, with nothing in flight; then it is of no use.

        What was made `apart` from it and not freed goes too. In a broken world MPI may still use all of it, and it
        stays.
        """
        if not self.control.is_broken:
            while self.owned:
                self.owned.pop()()

    def check_rank(self, rank: int, argument: str) -> None:
        """Raise ValueError unless `rank`, given as `argument`, is one of this world."""
        if not 0 <= rank < self.size:
            raise ValueError(f"{self.name()}: {argument}={rank}; ranks are 0 to {self.size - 1}")


def _discard(owned: list[Callable[[], None]], closer: Callable[[], None]) -> None:
    with suppress(ValueError):  # this world is being freed, and has taken it out
        owned.remove(closer)


def _named(kind: str, where: str, text: str) -> MpitrainError:
    """An error of our class of that name; a MpitrainError with the name in its text for one that is not ours."""
    error_class = getattr(errors, kind, None)
    if isinstance(error_class, type) and issubclass(error_class, MpitrainError):
        return error_class(f"{where}: {text}")
    return MpitrainError(f"{where}: {kind}: {text}")
