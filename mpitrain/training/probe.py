"""The probe of virtual ranks: do all ranks compute the same bits of the same samples?

Which kernels have the same bits everywhere is in no table: it depends on the library, its version, the processor, the
number of threads and the shapes. So every rank computes the gradients of one virtual rank, twice, before the first
step, and the ranks compare digests. Where there are several threads, a third pass has one thread, because another run
may have another number of them.

The passes are asked for one by one, because a loop of one's own makes them itself: mpitrain/torch/virtual_gradients.py.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from mpitrain.adapters.adapter import SeededAdapter
from mpitrain.arrays import Array
from mpitrain.errors import GradientError, everywhere
from mpitrain.tree import Tree
from mpitrain.world import World

_CPU = Path("/proc/cpuinfo")
_LOSS = "the loss"


@dataclass(frozen=True)
class ProbeFinding:
    """What one rank has found.

    Attributes:
        digests: by parameter, and of the loss.
        again: the name of the first that differs in a second pass; "": none.
        alone: the same for a pass with one thread.
        threads, kernels, processor: with which it was computed, in words.
    """

    digests: dict[str, str]
    again: str
    alone: str
    threads: str
    kernels: str
    processor: str

    @property
    def place(self) -> str:
        """Where it was computed, in words."""
        return f"{self.processor}, {self.kernels or 'no library of kernels'}, threads: {self.threads or 'not known'}"


def probe(world: World, adapter: SeededAdapter, batch: Tree, key: tuple[int, ...]) -> list[str]:
    """Compare the gradients of one virtual rank over all ranks. Return where they were computed, in words. Collective.

    Changes neither parameters nor buffers. Prints a line with a digest: runs that begin with the same parameters, and
    print the same digest, compute alike.

    Args:
        adapter: with the same parameters on every rank.
        batch: the samples of the virtual rank, the same on every rank.
        key: of its random numbers.

    Raises:
        GradientError: a rank has computed other bits in a second pass, or than rank 0. Raised on every rank.
    """
    with world.together("compute the gradients of a virtual rank twice"):
        passes = probe_passes()
        next(passes)
        try:
            while True:
                passes.send(_digests(adapter, batch, key))
        except StopIteration as end:
            finding = end.value
    return compare(world, finding)


def compare(world: World, finding: ProbeFinding) -> list[str]:
    """Compare what the ranks have found, print the lines of `probe`, and return what it returns. Collective.

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
    """Return what is wrong and what to do; "" for nothing. `findings` and `names` are by rank."""
    for name, one in zip(names, findings, strict=True):
        if one.again:
            return (
                f"{name}: {one.again} has other bits when the same virtual rank is computed again ({one.place}), so a "
                "training would not have the same bits on any ranks. Allowed is a model whose result depends on "
                "parameters, samples and the random numbers of its virtual rank alone. Does it keep a state from batch "
                "to batch, or draw from another generator? For an operation of PyTorch that is not reproducible, see "
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
            "Set OMP_NUM_THREADS to the same number on all hosts, such as by export OMP_NUM_THREADS=1 before the start"
        )
    if (one.kernels, one.processor) != (other.kernels, other.processor):
        return (
            "Their processors or libraries round otherwise. Install the same versions, let all take the kernels that "
            "the oldest processor has (OPENBLAS_CORETYPE=Haswell; for PyTorch also ATEN_CPU_CAPABILITY=avx2 and "
            "MKL_CBWR=AVX2), or start on hosts of one kind"
        )
    return (
        "Processor, threads and kernels are the same: does the model read something that differs by rank, such as a "
        "file, the rank's number or per_rank_batch of mt.Accumulate? Use the same on all ranks"
    )


def probe_passes(other_threads: str = "") -> Generator[None, dict[str, str], ProbeFinding]:
    """Ask for passes of one virtual rank, and return what this rank has found. Send the digests of each pass.

    `other_threads` names threads that threadpoolctl does not know, with their number.
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
    """Return the digest of a gradient, by these words for it. None: the loss does not depend on the parameter."""
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
