"""Virtual ranks: the parts of a fixed size into which a global batch is cut, whatever the number of ranks.

    global batch of 12, 4 virtual ranks      0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
    on 2 ranks                               rank 0: 0, then 1     rank 1: 2, then 3
    on 3 ranks                               rank 0: 0, then 1     rank 1: 2     rank 2: 3

Each rank computes its virtual ranks one after the other. A pass does not depend on the number of ranks: its samples,
random numbers, weight and model are the same wherever it is computed. So are its gradients, provided that the same
kernels compute them; a probe checks this before the first step. The strategy adds up the gradients of all passes
exactly (mpitrain/reducer/summands.py).

Source: EasyScale, Li et al., EasyScale: Elastic Training with Consistent Accuracy and Improved Utilization on GPUs,
SC 2023.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from mpitrain.adapters.adapter import Adapter, SeededAdapter, seeded_of
from mpitrain.arrays import Array
from mpitrain.collectives.trees import aligned_copy
from mpitrain.data.prefetch import cut_into
from mpitrain.errors import CheckpointError, ConfigError, GradientError, everywhere
from mpitrain.reducer.exchange import OTHERS
from mpitrain.tree import Tree, num_samples, plain_leaves, rebuild
from mpitrain.world.shard import part_of
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpitrain.strategies.sync import Sync

# The random numbers of `augment` are drawn from three numbers: see data/samples.py.
_NOT_A_SAMPLE = 1
_NOT_A_VIRTUAL_RANK = 2


@dataclass(frozen=True)
class VirtualRanks:
    """How many virtual ranks there are, and the seed of their random numbers."""

    number: int
    seed: int

    def __str__(self) -> str:
        return f"virtual_ranks={self.number} and seed={self.seed}"

    def key(self, step: int, virtual_rank: int) -> tuple[int, int, int, int]:
        """Return the only values on which the random numbers of a virtual rank in a step depend."""
        return self.seed, step, virtual_rank, _NOT_A_SAMPLE

    def sample_key(self, epoch: int, batch: int, place: int) -> tuple[int, ...]:
        """The same for reading the sample at this place of a batch, in a loop of the user's own."""
        return self.seed, epoch, batch, place, _NOT_A_VIRTUAL_RANK

    def of_rank(self, world: World) -> range:
        """Return the numbers of this rank's virtual ranks."""
        own = part_of(self.number, world.rank, world.size)
        return range(own.start, own.stop)

    def part(self, length: int, of_first: int, virtual_rank: int) -> slice:
        """Return the part of a batch of `length` samples that belongs to a virtual rank.

        `of_first` is the length of the first batch of the epoch. In a smaller batch, the last virtual ranks have fewer
        samples, or none.
        """
        each = -(-max(length, of_first) // self.number)
        return slice(min(virtual_rank * each, length), min((virtual_rank + 1) * each, length))

    def state(self) -> dict[str, int]:
        """Return what a checkpoint must hold to continue with the same bits."""
        return asdict(self)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a checkpoint was written with other virtual ranks."""
        for name, own in self.state().items():
            if int(state[name]) != own:
                given = {"number": "virtual_ranks", "seed": "seed"}[name]
                raise CheckpointError(
                    f"the checkpoint was written with {given}={int(state[name])} of mt.Sync, this run has "
                    f"{given}={own}, so it would not have the same bits; use {given}={int(state[name])}, or continue "
                    "without virtual_ranks"
                )


class ComputedPlaces:
    """Where the virtual ranks of a training were computed: texts with processors, libraries and threads."""

    def __init__(self) -> None:
        self._known: list[str] = []

    def state(self) -> list[str]:
        """Return the places so far, for a checkpoint."""
        return list(self._known)

    def restore(self, state: Sequence[str]) -> None:
        """Continue from `state`."""
        self._known = list(state)

    def add(self, world: World, places: Sequence[str]) -> None:
        """Add the places of all ranks of this run. Warn of those that are new."""
        others = [place for place in places if place not in self._known]
        if self._known and others:
            world.print(
                "mpitrain: virtual ranks: this training continues where kernels may round differently, so it "
                f"may end with other bits than without the interruption. It was computed on: {'; '.join(self._known)}. "
                "Now it "
                f"is computed on: {'; '.join(others)}. Set OMP_NUM_THREADS as before, and start on equal hosts"
            )
        self._known = sorted({*self._known, *places})


def check_virtual_ranks(
    world: World, virtual: VirtualRanks, *, has_own_exchange: bool = False, call: str = "mt.Sync"
) -> None:
    """Check that these virtual ranks can be computed by the ranks of a World. Collective. `call` is named in errors.

    Raises:
        ConfigError: there are too few of them, or gradients cannot be added up exactly. Raised on every rank.
        MismatchError: the ranks have different ones. Raised on every rank.
    """
    world.agree("make virtual ranks", [f"virtual_ranks={virtual.number!r} seed={virtual.seed!r}"])
    problem = ""
    for name, value, least in (("virtual_ranks", virtual.number, 1), ("seed", virtual.seed, 0)):
        if not isinstance(value, int | numpy.integer) or isinstance(value, bool) or value < least:
            problem = problem or f"{name}={value!r}; it must be an int of at least {least}"
    if not problem and virtual.number < world.size:
        problem = (
            f"virtual_ranks={virtual.number} for {world.size} ranks; each rank computes at least one of them. Start at "
            f"most {virtual.number} ranks, or take more virtual ranks from the beginning of the training"
        )
    elif not problem and world.config.compression not in OTHERS:
        problem = (
            f"virtual_ranks={virtual.number} and compression={world.config.compression}: a codec rounds what each rank "
            "sends, so the sum would depend on the ranks. Leave out one of the two"
        )
    elif not problem and has_own_exchange:
        problem = (
            f"virtual_ranks={virtual.number} and an exchange= of its own; gradients of virtual ranks are added up "
            "exactly. Leave out one of the two"
        )
    if problem:
        raise everywhere(ConfigError(f"{call}: {problem}"))


_CPU = Path("/proc/cpuinfo")
_LOSS = "the loss"


@dataclass(frozen=True)
class ProbeFinding:
    """The result of the probe on one rank.

    Attributes:
        digests: by parameter, and of the loss.
        again: the name of the first result that differs in a second pass; "": none.
        alone: the same for a pass with one thread.
        threads, kernels, processor: texts about where it was computed.
    """

    digests: dict[str, str]
    again: str
    alone: str
    threads: str
    kernels: str
    processor: str

    @property
    def place(self) -> str:
        """A text about where it was computed."""
        return f"{self.processor}, {self.kernels or 'no library of kernels'}, threads: {self.threads or 'not known'}"


def probe(world: World, computed: Callable[[], dict[str, str]], other_threads: str = "") -> list[str]:
    """Compare over all ranks what one virtual rank computes. Return texts about where it was computed. Collective.

    There is no list of kernels that are bitwise reproducible everywhere: it depends on the library, its version, the
    processor, the number of threads and the shapes. So every rank computes one virtual rank twice, and the ranks
    compare digests. If there are several threads, a third pass uses one thread, because another run may have a
    different number.

    Prints a line with a digest: runs that begin with the same parameters and print the same digest compute the same
    bits.

    Args:
        computed: computes the same virtual rank, of the same parameters and samples on every rank, and returns the
            digests of the results (`digest_of`). It changes neither parameters nor buffers.
        other_threads: see `probe_passes`.

    Raises:
        GradientError: a rank has computed different bits in a second pass, or different bits from rank 0. Raised on
            every rank.
    """
    with world.together("compute a virtual rank twice"):
        passes = probe_passes(other_threads)
        next(passes)
        try:
            while True:
                passes.send(computed())
        except StopIteration as end:
            finding = end.value
    return compare(world, finding)


def compare(world: World, finding: ProbeFinding) -> list[str]:
    """Compare the ranks' results, print the lines of `probe`, and return its result. Collective.

    Raises:
        GradientError: see `probe`.
    """
    findings: list[ProbeFinding] = world.allgather(finding)
    if problem := judge(findings, [world.name(rank) for rank in range(world.size)]):
        raise everywhere(GradientError(problem))
    digest = hashlib.sha256(repr(sorted(finding.digests.items())).encode()).hexdigest()[:16]
    world.print(f"mpitrain: virtual ranks: all ranks compute the same bits of the same samples; digest {digest}")
    if on_threads := next((one for one in findings if one.alone), None):
        world.print(
            f"mpitrain: virtual ranks: {on_threads.alone} has other bits with one thread; this run has threads: "
            f"{on_threads.threads}. Set OMP_NUM_THREADS to one value in every run of this training"
        )
    return sorted({one.place for one in findings})


def judge(findings: Sequence[ProbeFinding], names: Sequence[str]) -> str:
    """Return the problem and what to do about it; "": there is none. `findings` and `names` are by rank."""
    for name, one in zip(names, findings, strict=True):
        if one.again:
            return (
                f"{name}: {one.again} has other bits when the same virtual rank is computed again ({one.place}), so a "
                "training would not have the same bits on any ranks. Allowed is a model whose result depends on "
                "parameters, samples and the random numbers of its virtual rank alone. Does it keep state "
                "from batch to batch, or draw from another generator? For an operation of PyTorch that is not "
                "reproducible, see "
                "torch.use_deterministic_algorithms(True). Change the model, or leave virtual_ranks out"
            )
    for name, one in zip(names[1:], findings[1:], strict=True):
        if different := _first_difference(one.digests, findings[0].digests):
            return (
                f"{name}: {different} has other bits than on {names[0]}, of the same samples; {name}: {one.place}; "
                f"{names[0]}: {findings[0].place}. {_remedy(one, findings[0])}"
            )
    return ""


def _remedy(one: ProbeFinding, other: ProbeFinding) -> str:
    if one.threads != other.threads:
        return (
            "Set OMP_NUM_THREADS to the same number on all hosts, for example with export OMP_NUM_THREADS=1 "
            "before the start"
        )
    if (one.kernels, one.processor) != (other.kernels, other.processor):
        return (
            "Their processors or libraries round differently. Install the same versions, make all use the "
            "kernels of the oldest processor (OPENBLAS_CORETYPE=Haswell; for PyTorch also "
            "ATEN_CPU_CAPABILITY=avx2 and "
            "MKL_CBWR=AVX2), or start on hosts of one kind"
        )
    return (
        "Processor, threads and kernels are the same: does the model read something that differs by rank, such as a "
        "file, the rank's number or per_rank_batch of mt.Accumulate? Use the same on all ranks"
    )


def probe_passes(other_threads: str = "") -> Generator[None, dict[str, str], ProbeFinding]:
    """A generator that asks for passes of one virtual rank, takes the digests of each, and returns this rank's result.

    It asks for one pass at a time, because a loop of the user's own runs them itself:
    mpitrain/torch/virtual_gradients.py. `other_threads` has the names and numbers of threads that threadpoolctl does
    not know.
    """
    from threadpoolctl import threadpool_info, threadpool_limits

    digests = yield
    again = _first_difference((yield), digests)
    pools = threadpool_info()
    alone = ""
    if any(pool["num_threads"] > 1 for pool in pools):
        with threadpool_limits(1):
            alone = _first_difference((yield), digests)
    threads = sorted({f"{pool['internal_api']} {pool['num_threads']}" for pool in pools} | {other_threads} - {""})
    kernels = sorted(
        {f"{pool['internal_api']} {pool['version'] or ''} {pool.get('architecture', '')}".strip() for pool in pools}
    )
    return ProbeFinding(digests, again, alone, ", ".join(threads), ", ".join(kernels), _processor())


def _digests(adapter: SeededAdapter, batch: Tree, key: tuple[int, ...]) -> dict[str, str]:
    digests: dict[str, str] = {}

    def on_gradient(index: int, gradient: Array | None) -> None:
        digests.update(digest_of(f"the gradient of {adapter.layout[index].name}", gradient))

    with adapter.seeded(key):
        loss = adapter.loss_and_gradients(batch, on_gradient)
    content = repr((loss, adapter.note())).encode()
    return {**digests, _LOSS: hashlib.sha256(content).hexdigest()}


def digest_of(words: str, gradient: Array | None) -> dict[str, str]:
    """Return the digest of a gradient, keyed by its description. None: the loss does not depend on the parameter."""
    content = b"" if gradient is None else numpy.ascontiguousarray(gradient).tobytes()
    return {words: hashlib.sha256(content).hexdigest()}


def _first_difference(digests: dict[str, str], expected: dict[str, str]) -> str:
    return next((name for name, digest in expected.items() if digests.get(name) != digest), "")


def _processor() -> str:
    if _CPU.exists():
        for line in _CPU.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


class VirtualPasses:
    """The passes of this rank's virtual ranks in each step of a Trainer, in one World.

    Attributes:
        non_finite_loss: the first loss of this step that is NaN or infinity, of a virtual rank with samples; 0: none.
    """

    def __init__(self, world: World, adapter: Adapter, data: Any, strategy: Sync, virtual: VirtualRanks) -> None:
        """Collective: the data is cut into virtual ranks from now on.

        Raises:
            ConfigError: the data, or the adapter, cannot be used with these virtual ranks. Raised on every rank.
        """
        self._world = world
        self._strategy, self._virtual = strategy, virtual
        with world.together("prepare virtual ranks"):
            self._adapter = seeded_of(adapter)
            self._adapter.seeded(virtual.key(0, 0))  # a wrapping adapter asks the inner one
        self._samples = cut_into(data, virtual.number)
        self._own = virtual.of_rank(world)
        self._is_probed = False

    def compute(self, batch: Tree, step: int) -> float:
        """Begin the step with this number, and pass on the gradients of all passes. Return the loss of the last one.

        Collective. `batch` has the samples of this rank. Before the first step in this World, it runs the probe.

        Raises:
            GradientError: ranks do not compute the same bits of the same samples. Raised on every rank.
        """
        places = (slice(place * self._samples, (place + 1) * self._samples) for place in range(len(self._own)))
        parts = [_copied(batch, place) for place in places]
        if not self._is_probed:
            key = self._virtual.key(step, 0)
            first = _copied(self._world.broadcast_object(parts[0]), slice(None))
            self._strategy.places.add(self._world, probe(self._world, partial(_digests, self._adapter, first, key)))
            self._is_probed = True
        self._strategy.begin_step([num_samples(part) for part in parts])
        loss = self.non_finite_loss = 0.0
        for number, part in zip(self._own, parts, strict=True):
            with self._adapter.seeded(self._virtual.key(step, number)):
                loss = self._adapter.loss_and_gradients(part, self._strategy.on_gradient)
            if not self.non_finite_loss and num_samples(part) and not math.isfinite(loss):
                self.non_finite_loss = loss
            if number != self._own[-1]:
                self._strategy.next_pass(self._adapter, loss)
        return loss


def _copied(batch: Tree, part: slice) -> Tree:
    """Return these samples of a batch in new memory.

    A kernel may round differently if an array begins at another place of a cache line, and the place of a virtual rank
    in the batch of its rank depends on the number of ranks.
    """
    values = (leaf[part] for _, leaf in plain_leaves(batch))
    return rebuild(batch, lambda: aligned_copy(next(values)))
