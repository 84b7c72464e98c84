"""The data of a prepared loop: it reads the batches of all ranks together, and yields this rank's part of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from mpitrain.adapters.torch_random import generators_of, random_state, set_random_state
from mpitrain.errors import DataError, everywhere
from mpitrain.exchange.totals import exact_total
from mpitrain.strategies.virtual_ranks import ComputedPlaces, VirtualRanks
from mpitrain.torch.dataset_lines import has_length, lines_of
from mpitrain.torch.drawn import PartSampler, Share
from mpitrain.torch.observed import samples_come_divided, saw
from mpitrain.torch.part_loader import part_loader, refuse_distributed
from mpitrain.torch.sample_values import mean_of_virtual_ranks, number_of, numbers_of
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.torch.whole_batches import parts_of_whole_batches
from mpitrain.world import World


@uncompiled
class ShardedData:
    """This rank's part of every batch. As with `World.shard`, the parts are disjoint, and together the whole batch.

    If a batch has fewer samples than there are ranks, the last ranks get its first sample, which does not count there.
    A loop need not care about this.

    ShardedData is not a DataLoader. It has the attributes of a DataLoader that loops use, with the values of the given
    data, or None if that has no such attribute. All other attributes are in `given`.

    Attributes:
        share: this rank's share of the present batch; None before the first batch and after the last.
        turn: the number of batches handed out so far.
        epoch: the number of times that a loop has gone through all batches. Set it to go on from a checkpoint.
        batch: the number of batches of this epoch that were handed out.
        virtual: the virtual ranks into which batches are cut; None: there are none.
        places: where they were computed.
        given: the data that `prepare` was given.
        dataset: the data set, with the samples of all ranks.
        batch_size: the number of samples of all ranks together.
        sampler, batch_sampler: those of all ranks together; rank 0's draw. If one has `set_epoch`, call it on all
            ranks.
        drop_last, num_workers, collate_fn, generator: as in DataLoader.
    """

    def __init__(self, world: World, data: Iterable[Any], virtual: VirtualRanks | None = None) -> None:
        """Collective; see `prepare` for the data.

        Raises:
            ConfigError: the data already divides samples among ranks. Raised on every rank.
            MismatchError: the ranks' data differ in kind or length, in the samples of a Subset, or in the integers,
                such as labels, of the first and the last sample of a TensorDataset. Other data sets are not compared by
                reading, because a sample may change with each reading.
        """
        self.share: Share | None = None
        self._newest: Share | None = None  # stays after the last batch
        self.turn = self.epoch = self.batch = 0
        self._checksum = 0  # of the numbers of the samples of these batches
        # With which the order of this epoch was drawn; at batch 0, those at the end of the epoch before.
        self._random: dict[str, Any] | None = None
        self._is_restored = False
        self._random_after: Mapping[str, Any] | None = None
        self._goes_on_as_drawn = False
        self._generators = generators_of(data)
        self._world = world
        self.virtual, self.places = virtual, ComputedPlaces()
        self.given = data
        self.dataset: Any = getattr(data, "dataset", None)
        self.batch_size: int | None = getattr(data, "batch_size", None)
        self.sampler: Any = getattr(data, "sampler", None)
        self.batch_sampler: Any = getattr(data, "batch_sampler", None)
        self.drop_last: bool | None = getattr(data, "drop_last", None)
        self.num_workers: int | None = getattr(data, "num_workers", None)
        self.collate_fn: Any = getattr(data, "collate_fn", None)
        self.generator: Any = getattr(data, "generator", None)
        self._source = data
        samples_come_divided()
        self._parts: PartSampler | None = None
        kind, lines = type(data).__name__, list[str]()
        if isinstance(data, DataLoader):
            kind += f", batches of {data.batch_size} samples, drawn by {type(data.sampler).__name__}"
            lines = list(lines_of(data.dataset))
            refuse_distributed(data)
            if not isinstance(data.dataset, IterableDataset) and data.batch_sampler is not None:
                self._source, self._parts = part_loader(world, data, virtual)
        length = len(data) if has_length(data) else "an unknown number of"  # type: ignore[arg-type]
        world.agree("compare the data", [*lines, f"{kind}, {length} batches"])

    def __len__(self) -> int:
        """The number of batches, the same as for all ranks together."""
        return len(self.given)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's part of each batch. Collective, as is each step: all ranks take the same batches together.

        Raises:
            DataError: the first batch has fewer samples than there are ranks, or a batch cannot be divided.
            MismatchError: a source that every rank reads itself gives the ranks different batches, or the ranks go on
                from different positions.
            CheckpointError: after `load_state_dict`, the batches that were used have other samples than then.
        """
        first = self._begin_epoch()
        if self._parts:
            batches = self._drawn(self._parts, first)
        else:
            used = first, self._checksum
            batches = parts_of_whole_batches(self._world, self._source, self.virtual, used, self._skipped)
        for number, (batch, share, checked) in enumerate(batches, first):
            if number == 0:
                self._check_first(share.total)
            self.share = self._newest = share
            self.turn += 1
            self.batch, self._checksum = number + 1, checked
            saw(batch, share.count)
            yield batch
        self.share = None
        self.epoch, self.batch, self._checksum = self.epoch + 1, 0, 0
        self._random = self._random_of_order()

    def _check_first(self, total: int) -> None:
        """Check the first batch, of `total` samples of all ranks together."""
        problem = ""
        if self.virtual and (total == 0 or total % self.virtual.number):
            problem = (
                f"the first batch has {total} samples for virtual_ranks={self.virtual.number}; take batches of a "
                "multiple of the virtual ranks. Later batches may be smaller"
            )
        elif total < self._world.size:
            problem = (
                f"{self._world.name()}: the first batch has {total} samples for {self._world.size} ranks; a batch is "
                "divided among all ranks, so use fewer ranks or larger batches"
            )
        if problem:
            raise everywhere(DataError(problem))

    @property
    def step(self) -> int:
        """The number of the newest batch, counted from the first epoch on: for the random numbers of virtual ranks."""
        if has_length(self.given):
            return self.epoch * len(self) + self.batch
        return self.epoch << 32 | self.batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, for `load_state_dict` after a restart. Not collective.

        It holds tensors, numbers and texts, as `save` needs, and does not depend on the number of ranks.
        """
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "batch": self.batch,
            "checksum": self._checksum,
            "random": self._random,
        }
        if self.virtual:
            state |= {"virtual": self.virtual.state(), "places": self.places.state()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`: the next loop begins after the batches that were used, in the same order.

        Every rank calls this, before the loop. The loop draws the numbers of the samples again, without reading the
        samples, and leaves the rank's other random numbers alone. Data that is no DataLoader of numbered samples is
        read up to there; after that, each rank has the random numbers that this reading has left.

        Between two epochs, the order is drawn with rank 0's random numbers at the end of the epoch, which rank 0 gets
        back. It is the order of an undisturbed run, if nothing draws from them between the loops.

        Raises:
            CheckpointError: the state was saved with other virtual ranks. Nothing has changed.
        """
        if self.virtual and "virtual" in state:
            self.virtual.check(state["virtual"])
            self.places.restore(state["places"])
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        self._checksum, self._random = int(state["checksum"]), state["random"]
        self._is_restored = True
        self._random_after, self._goes_on_as_drawn = None, False  # what was said before was about another position
        if self.batch == 0 and self._random is not None and self._draws:
            set_random_state(self._random, self._generators)

    def set_random_after(self, state: Mapping[str, Any]) -> None:
        """After `load_state_dict`, have the loop use a `random_state` of this rank, once its order is drawn."""
        self._random_after = state

    def go_on_as_drawn(self) -> None:
        """After `load_state_dict`, have rank 0 go on from the random numbers that drawing the order leaves.

        This is for ranks that have lost their own ones. They begin as the script seeds them, and with these, later
        epochs would have the orders of the first ones.
        """
        self._goes_on_as_drawn = True

    @property
    def _draws(self) -> bool:
        """Whether the order of the samples depends on this rank's random numbers."""
        return self._parts is None or self._world.is_root

    def _begin_epoch(self) -> int:
        """Return the number of batches to leave out, and have the random numbers of the order drawn again."""
        if not self._is_restored:
            if self.batch:  # the loop before was left in the middle
                self.epoch += 1
            self.batch = self._checksum = 0
        self._is_restored = False
        if not self.batch:
            self._random, self._random_after, self._goes_on_as_drawn = self._random_of_order(), None, False
            return 0
        if self._parts and self._random_after is None and not self._goes_on_as_drawn:
            self._random_after = random_state()
        if self._draws:
            assert self._random is not None
            set_random_state(self._random, self._generators)
        return self.batch

    def _random_of_order(self) -> dict[str, Any]:
        """The random numbers with which the order is drawn. Collective."""
        random = random_state(self._generators)
        return self._world.broadcast(random) if self._parts else random

    def _skipped(self) -> None:
        """The order is drawn up to where the loop goes on."""
        if self._random_after is not None:
            set_random_state(self._random_after)
        self._random_after, self._goes_on_as_drawn = None, False

    def mean(self, value: Any) -> float:
        """Return the mean over all samples of the newest batch, from each rank's mean over its part, such as a loss.

        Collective: every rank calls this for the same batch, in the loop or after it.

        Args:
            value: this rank's mean: a number, or a tensor of one element. On a rank without samples it does not count.
                With virtual ranks: a list of such means, the newest of which are those of the virtual batches of the
                newest batch. Their mean has the same bits on any number of ranks.

        Raises:
            DataError: there was no batch yet (raised on every rank), or `value` has several elements; or it is no list,
                or a short one, with virtual ranks.
        """
        if self.virtual:
            return mean_of_virtual_ranks(self._world, self._share(), value)
        value = number_of(self._world, value)
        return float(self._world.mean(value, weight=self._share().count))

    def sum(self, values: Any) -> float:
        """Return the sum over all samples of the newest batch of one value per sample, such as 1 for a right guess.

        Collective, like `mean`. Each sample counts once, also if a rank without samples computes with one of another
        rank. The sum is rounded once, so it does not depend on the number of ranks, if the values do not.

        Args:
            values: a tensor or array of shape (n,), where n is the length of this rank's part. They become float64.

        Raises:
            DataError: there was no batch yet (raised on every rank), or `values` has another shape.
        """
        share, numbers = self._share(), numbers_of(values)
        if numbers.shape != (max(share.count, 1),):
            raise DataError(
                f"{self._world.name()}: sum(values) takes one value for each of the {max(share.count, 1)} samples of "
                f"this rank's part; it was given the shape {numbers.shape}"
            )
        return exact_total(self._world, numbers[: share.count].tolist())

    def _share(self) -> Share:
        if self._newest is None:
            raise everywhere(DataError("there was no batch yet: call mean() and sum() in the loop or after it"))
        return self._newest

    def _drawn(self, parts: PartSampler, first: int) -> Iterator[tuple[Any, Share, int]]:
        """Yield batches of a data set with numbered samples, of which this rank reads only its own."""
        parts.used, parts.epoch = (first, self._checksum), self.epoch
        parts.before = self._undo_seed if self._begins_workers_that_stay else None
        batches = iter(self._source)  # draws a seed for workers, before the sampler draws
        drawing = parts.drawing  # of this iteration; another iteration makes its own
        assert drawing is not None
        drawing.leave_out()
        if first:
            self._skipped()
        for batch in batches:
            yield batch, *drawing.shares.popleft()

    @property
    def _begins_workers_that_stay(self) -> bool:
        """True in the first epoch after a restart, if the undisturbed run has had its workers since an earlier one."""
        loader: Any = self._source
        return self.epoch > 0 and bool(loader.persistent_workers) and loader._iterator is None

    def _undo_seed(self) -> None:
        """Draw the order as if no seed for workers had been drawn before: workers that stay get none."""
        assert self._random is not None
        set_random_state(self._random, self._generators)
