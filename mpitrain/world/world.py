"""World: this rank, the other ranks, and the calls that all ranks make together."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from mpitrain.arguments import pickled, shortened, whole_number
from mpitrain.arrays import Array
from mpitrain.config import Config
from mpitrain.context import JobContext
from mpitrain.errors import ConfigError, MpitrainError, error_of_kind, everywhere, text_of
from mpitrain.profile import DEFAULT, Profile
from mpitrain.tree import Tree
from mpitrain.waiting.agreement import Agreement, number_of
from mpitrain.waiting.background import Background, Queue
from mpitrain.waiting.control import Control
from mpitrain.waiting.transfer import Messages, broadcast_bytes, gather_bytes
from mpitrain.watching.activity import waiting
from mpitrain.world.layout import Expected, RankLayout, find_layout
from mpitrain.world.shard import shards

if TYPE_CHECKING:
    import numpy
    from mpi4py import MPI


class TreeExchange(Protocol):
    """How arrays move between ranks. collectives/trees.py, above World, implements it."""

    def broadcast(self, tree: Tree, root: int) -> Tree: ...

    def sum(self, tree: Tree) -> Tree: ...

    def mean(self, tree: Tree, weight: float) -> Tree: ...

    def weighted_sum(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree: ...


class Observer(Protocol):
    """Receives the samples and broadcast arrays of this rank, and the mean gradients. verify/run_record.py is one."""

    def saw(self, batch: Tree) -> None: ...

    def gave(self, tree: Tree) -> None: ...

    def saw_means(self, means: Mapping[str, Array], weight: float) -> None: ...

    def saw_parameters(self, parameters: Mapping[str, Array]) -> None: ...


class StepWatch(Protocol):
    """Measures the steps of a rank that trains alone. job/step_times.py is one.

    Attributes:
        divisor: this rank takes the part of each batch that it would take among this many times the ranks of its World.
    """

    divisor: int

    def begin(self, layout: Sequence[tuple[str, int]], weight: float) -> None: ...

    def ready(self, index: int) -> None: ...

    def end(self) -> None: ...

    def called(self, operation: str, tree: Tree) -> None: ...

    def trains(self, front: str, steps: int | None) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class World:
    """The ranks of one job, or some of them. A World never changes: after a rank is lost, the job gets a new World.

    The properties, `name`, `print`, `send`, `recv`, `shard` and `check_rank` belong to one rank. All other methods
    are collective: every rank must call them, in the same order and at the same line of the program (see `same_call`).
    If the ranks make different calls, every rank gets a MismatchError that names the first difference. If a rank
    cannot make its call, because of an argument or an object that cannot be pickled, every rank gets the error, and the
    ranks can continue. A `root`, `to` or `source` that is not a rank raises ConfigError, a ValueError. In a World
    of one rank every call works and sends nothing.

    Attributes:
        hosts: the host name of every rank.
        node_ranks: the node rank of every rank.
        generation: the number of Worlds that the job had before, because ranks were lost or have joined.
        config: the settings of the job, equal on all ranks.
    """

    # Programs do not make Worlds: job/worlds.py makes the World of a job.
    comm: MPI.Comm  # a private duplicate, for array data
    queue: Queue  # the work that has been started on it
    objects: MPI.Comm  # a private duplicate, for agreements and Python objects
    background: Background  # the calls of mpitrain.collectives, on a private duplicate
    hosts: tuple[str, ...]  # host name of every rank
    node_ranks: tuple[int, ...]  # node rank of every rank: equal for those that share a machine's memory
    generation: int
    config: Config
    context: JobContext  # what the launcher told this rank
    control: Control
    make_arrays: Callable[[World], TreeExchange]
    owned: list[Callable[[], None]]  # functions that free what was made for this World
    profile: Profile = DEFAULT
    parent: World | None = None  # that this one's ranks are a part of; None for the first of a job
    observer: Observer | None = None  # with `mpitrain verify`
    watch: StepWatch | None = None  # with `mpitrain plan`
    committer: Callable[[], None] | None = None  # with `mpitrain run --recover`
    # The same; ends this process if an error means that the others must continue without it.
    leaver: Callable[[BaseException], None] | None = None

    @cached_property
    def rank(self) -> int:
        """The number of this process in the World, 0 to size - 1."""
        return int(self.comm.rank)

    @cached_property
    def size(self) -> int:
        """The world size: the number of ranks."""
        return int(self.comm.size)

    @property
    def local_rank(self) -> int:
        """The number of this process among those on this machine, from 0."""
        return self.node_ranks[: self.rank].count(self.node_rank)

    @property
    def local_size(self) -> int:
        """The number of ranks on this machine."""
        return self.node_ranks.count(self.node_rank)

    @property
    def node_rank(self) -> int:
        """The number of this machine, from 0; machines are in the order of their lowest ranks."""
        return self.node_ranks[self.rank]

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return len(set(self.node_ranks))

    @property
    def host(self) -> str:
        """The name of this machine."""
        return self.hosts[self.rank]

    @property
    def rehearsal(self) -> str:
        """The command that only rehearses the script, so that nothing must be written; "" in a real run."""
        return "mpitrain verify" if self.observer else "mpitrain plan" if self.watch else ""

    @property
    def is_root(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @cached_property
    def arrays(self) -> TreeExchange:
        """The object that moves the arrays of `broadcast`, `sum` and `mean`."""
        return self.make_arrays(self)

    def name(self, rank: int | None = None) -> str:
        """The name of a rank in messages, such as `rank 3 on node7`. Default: this rank."""
        return self.control.name(self.rank if rank is None else rank)

    def print(self, *values: object, all_ranks: bool = False) -> None:
        """Print on rank 0. With `all_ranks`, print on every rank, after the rank's name. Not collective."""
        if all_ranks:
            # Use one write, so that lines of different ranks do not mix.
            sys.stdout.write(f"[{self.name()}] " + " ".join(str(value) for value in values) + "\n")
            sys.stdout.flush()
        elif self.is_root:
            print(*values, flush=True)

    # -- arrays ---------------------------------------------------------------------------------------------

    def broadcast(self, tree: Tree, root: int = 0) -> Tree:
        """Return `root`'s values in a new tree on every rank.

        Args:
            tree: any nesting of dicts, lists, tuples and None around arrays (CPU or GPU, any dtype and shape) and
                numbers. The tree must have the same form on every rank. It is not changed. The numpy.ndarray subclasses
                matrix and recarray are kept; a memmap becomes a plain array.
            root: the rank whose values are sent.

        Returns:
            A tree of the same form. Each array is new, and on the same device as this rank's array.

        Raises:
            MismatchError: the trees differ in form, shape or dtype. Raised on every rank, before anything is sent.
            TreeError: a leaf is neither an array nor a number, or an array with more than values, such as a masked
                array. Raised on every rank.
        """
        result = self.arrays.broadcast(tree, root)
        if self.observer:
            self.observer.gave(result)
        return result

    def sum(self, tree: Tree) -> Tree:
        """Return the sum over ranks of every leaf, in a new tree that is bitwise identical on every rank.

        Leaves may have any integer or floating dtype, also float16 and bfloat16. The result has the same dtypes, and
        its arrays are on the devices of those of `tree`. Integers in arrays wrap as in NumPy. `tree` and errors are
        those of `broadcast`.

        Raises:
            TreeError: also if the sum of a number, Python's or NumPy's, does not fit: into 64 bits, or its own dtype.
        """
        if self.watch:
            self.watch.called("sum", tree)
        return self.arrays.sum(tree)

    def mean(self, tree: Tree, weight: float = 1.0) -> Tree:
        """Return the weighted mean over ranks of every leaf, in a new tree that is bitwise identical on every rank.

        mean = sum over ranks of weight x leaf, divided by the sum of the weights. If the weight is the number of
        samples, uneven batches give exactly the mean of the whole batch.

        Args:
            tree: as for `broadcast`, but with floating leaves only. Numbers become float.
            weight: this rank's weight, in samples: one real number of Python or NumPy, or an array or tensor with one
                element. With weight 0 this rank's values are ignored, even NaN.

        Raises:
            MismatchError: as for `broadcast`.
            ConfigError: a weight is not a real number. Raised on every rank.
            TreeError: a leaf is an integer array, whose mean would not fit its dtype; or as for `broadcast`.
            DataError: a weight is negative or not finite, or all weights are 0. Raised on every rank.
        """
        if self.watch:
            self.watch.called("mean", tree)
        return self.arrays.mean(tree, weight)

    def shard(self, batches: Iterable[Tree], start: int = 0) -> Iterator[Tree]:
        """Iterate over this rank's parts of the batches. The parts of all ranks are disjoint and make up the batch.

        Every rank iterates over the same `batches` and gets a contiguous slice of each one. The global batch and the
        loss curve are therefore those of a single process, at any world size. The parts differ by at most one sample.
        If the last batch has fewer samples than there are ranks, some ranks get an empty part: pass `weight=len(x)` to
        `mean`.

        Args:
            batches: global batches: arrays, or trees of arrays, with the samples along the first dimension.
            start: the number of batches to skip, to resume where an earlier run stopped.

        Raises:
            DataError: there is no batch, there are fewer batches than `start`, or the first batch has fewer samples
                than there are ranks.
            ValueError: `start` is negative.
        """
        return shards(self, batches, start)

    def where(self, array: Array, expected: Expected | None = None) -> RankLayout:
        """Describe and check how the ranks' arrays differ. Collective. Not for every step: it reads the whole array.

        Args:
            array: a NumPy or CuPy array of any dtype and shape, or a number. Each rank gives its own.
            expected: "equal": shape, dtype and bits are the same on all ranks, as of parameters. "parts": parts of a
                batch, which differ in the first dimension only, if at all. "sum": summands of a sum, of one shape.
                Default: nothing is checked.

        Returns:
            The RankLayout, the same on every rank. Ranks compare dtypes, shapes and digests of 128 bits. So NaN is
            equal to the same NaN, and 0.0 is not equal to -0.0. Whether different values are parts or summands cannot
            be seen.

        Raises:
            MismatchError: the arrays are not as `expected`; the text names the first rank that differs from rank 0. Or
                the ranks expect different layouts. Raised on every rank.
            TreeError: `array` is not an array or a number, or has Python objects.
            ValueError: `expected` has another value.
        """
        return find_layout(self, array, expected)

    # -- Python objects ---------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank has made this call. Collective."""
        self.agree("barrier")

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """Return `root`'s object on every rank, by pickle. The `value` of the other ranks is ignored. Collective.

        `root` gets `value` itself, every other rank a copy. Use `broadcast` for arrays: it compares their shapes.
        """
        try:
            root = self.check_rank(root, "root")
            content = bytearray(pickled(value) if self.rank == root else b"")
        except MpitrainError as error:
            self.refuse("broadcast_object", error)
        records = self.agree(f"broadcast_object from rank {root}", detail=len(content), anywhere=self.rank == root)
        if self.size == 1:
            return value
        if self.rank != root:
            content = bytearray(int(records["detail"][root]))
        broadcast_bytes(self.objects, content, root, self.control.wait)
        return value if self.rank == root else pickle.loads(content)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks, in rank order and by pickle, on `root`. Return None on the others.

        Collective. Internally, every rank receives all objects, as in `allgather`.

        Raises:
            TreeError: a rank's object cannot be pickled. Raised on every rank, as in `broadcast_object` and
                `allgather`.
        """
        try:
            root = self.check_rank(root, "root")
        except MpitrainError as error:
            self.refuse("gather", error)
        values = self._gather(value, f"gather to rank {root}", anywhere=self.rank == root)
        return values if self.rank == root else None

    def allgather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order and by pickle, on every rank. Collective."""
        return self._gather(value, "allgather")

    def _gather(self, value: Any, operation: str, *, anywhere: bool = False) -> list[Any]:
        try:
            content = pickled(value)
        except MpitrainError as error:
            self.refuse(operation, error)
        records = self.agree(operation, detail=len(content), anywhere=anywhere)
        if self.size == 1:
            return [value]
        sizes = [int(size) for size in records["detail"]]
        contents = gather_bytes(self.objects, content, self.control.wait, sizes)
        return [pickle.loads(content) for content in contents]

    def send(self, value: Any, to: int, tag: int = 0) -> None:
        """Send an object to one rank, by pickle (also an array). Return when the caller may change `value` again.

        Messages of one sender, receiver and tag arrive in the order in which they were sent. A large message waits
        until the other rank receives it.

        Args:
            value: any object that can be pickled.
            to: the rank that receives it; this rank itself is allowed.
            tag: 0 to 31767, the same as in `recv`.

        Raises:
            ConfigError: there is no rank `to`, or no such tag.
        """
        self._messages.send(value, self.check_rank(to, "to"), whole_number(tag, f"{self.name()}: tag"))

    def recv(self, source: int, tag: int = 0) -> Any:
        """Return the next object that `source` has sent to this rank with this tag. Wait for it if necessary.

        Raises:
            ConfigError: there is no rank `source`, or no such tag.
            MismatchError: `source` is this rank, which has sent itself nothing with this tag.
        """
        return self._messages.recv(self.check_rank(source, "source"), whole_number(tag, f"{self.name()}: tag"))

    @cached_property
    def _messages(self) -> Messages:
        return Messages(self.comm, self.control)

    def commit(self) -> None:
        """Make sure that every rank has the results of this step's exchanges. Call it before the step changes anything.

        Without `mpitrain run --recover` it does nothing. With it, a rank may be lost at any moment. Either `commit`
        returns on all other ranks, and the step counts, or it raises on all of them, and the step must be repeated in a
        new World. So the ranks never differ by a step.

        Raises:
            LostRankError: a rank has been lost before it called `commit`. Raised on every remaining rank.
        """
        if self.committer is not None:
            self.committer()

    # -- what the rest of the library builds on -----------------------------------------------------------------

    def replaced(self, **changes: Any) -> World:
        """Return a World with other values of these fields. It shares all else, including what it owns."""
        return replace(self, **changes)

    def begin_agreement(self, operation: str, lines: Sequence[str] = (), **record: Any) -> Agreement:
        """Tell the other ranks what this rank is about to do, without waiting. See agreement.py."""
        return Agreement(self.objects, self.control, operation, lines, **record)

    def agree(self, operation: str, lines: Sequence[str] = (), **record: Any) -> numpy.ndarray:
        """Make sure that all ranks are about to do the same; else all raise MismatchError. Return one record per
        rank."""
        return self.begin_agreement(operation, lines, **record).wait()

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        """Raise `error`, which keeps this rank from making a call, on all ranks: those that make the call learn of it.

        Collective, in place of the call. Everything that can fail on one rank alone belongs before the agreement of a
        call, and its errors are raised here. So a rank that catches the error continues at the same place as the
        others.
        """
        if isinstance(error, MpitrainError):
            everywhere(error)
        try:
            self.agree(operation, refusal=error)
        except MpitrainError as heard:
            if not heard.known_everywhere:
                raise
        raise error

    @contextmanager
    def same_call(self, name: str) -> Iterator[None]:
        """Match calls at different lines of the program: in the block, calls are compared by `name`, not by line.

        Every rank enters a block of this name. Otherwise, calls at different lines are a MismatchError: a call in `if
        world.rank == 0:` would be matched with another call of the other ranks, and give a wrong result. Calls with a
        root do not need this for the root itself.

            if world.is_root:
                with world.same_call("the data are there"):
                    download()
                    world.barrier()
            else:
                with world.same_call("the data are there"):
                    world.barrier()
        """
        before, self.control.same_call = (
            self.control.same_call,
            (number_of(f"same call {name}"), f"same_call({shortened(name)})"),
        )
        try:
            yield
        finally:
            self.control.same_call = before

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block that fails on all ranks if it fails on any. Each raises the error of the lowest rank that failed.

        Use this around code that may fail on one rank alone, such as reading a file. Make no collective call in the
        block.
        """
        problem: BaseException | None = None
        try:
            with self.control.busy(doing):
                yield
        except Exception as error:
            if self.leaver is not None:
                self.leaver(error)
            problem = error
        failure = None if problem is None else (type(problem).__name__, text_of(problem))
        problems = self._gather(failure, "together")
        failed = [rank for rank, failure in enumerate(problems) if failure is not None]
        if not failed:
            return
        if isinstance(problem, MpitrainError) and self.rank == failed[0]:
            raise everywhere(problem)
        kind, text = problems[failed[0]]
        common = everywhere(error_of_kind(kind, f"{self.name(failed[0])}, {doing}", text))
        common.is_repeated = self.rank != failed[0]
        raise common from problem

    def apart(self) -> World:
        """Return a World of the same ranks with its own communicator, so that messages do not mix.

        Collective, as is the new World's `free`.

        Raises:
            MpitrainError: MPI has no more communicators; or this World is broken, or in a block of `mt.workers`.
        """
        from mpi4py import MPI

        self.control.check()
        self.control.settle()
        try:
            with waiting("apart"):
                comm = self.comm.Dup()
        except MPI.Exception as error:
            raise MpitrainError(
                f"{self.name()}: MPI has no further communicator ({error}); each GradientReducer and Trainer keeps one "
                "until its close(): close those that are no longer used, or make them once, not in a loop"
            ) from None

        self.control.comms.append(comm)
        apart = self.replaced(comm=comm, queue=Queue(self.control), owned=[partial(self.control.give_back, comm)])
        self.owned.append(apart.free)
        apart.owned.append(partial(_discard, self.owned, apart.free))
        return apart

    def free(self) -> None:
        """Free what this World owns, in reverse order. Afterwards the World cannot be used.

        Collective, with nothing in flight. Worlds that were made by `apart` and not freed are freed too. In a broken
        World nothing is freed, because MPI may still use the memory.
        """
        if not self.control.is_broken:
            while self.owned:
                self.owned.pop()()

    def check_rank(self, rank: int, argument: str) -> int:
        """Return `rank` as an int. Raise ConfigError unless it, given as `argument`, is a rank of this World."""
        number = whole_number(rank, f"{self.name()}: {argument}")
        if not 0 <= number < self.size:
            raise ConfigError(f"{self.name()}: {argument}={rank}; ranks are 0 to {self.size - 1}")
        return number


def _not_for_programs(constructor: Any) -> None:
    """Make help() show that programs do not call the constructor, in place of its 19 arguments."""
    constructor.__doc__ = "Programs do not call this: `mpitrain.init` makes the World of a job."
    constructor.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)])


_not_for_programs(World.__init__)


def _discard(owned: list[Callable[[], None]], closer: Callable[[], None]) -> None:
    with suppress(ValueError):  # this World is being freed, and has removed it
        owned.remove(closer)
