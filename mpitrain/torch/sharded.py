"""The data of a prepared loop: it reads the batches of all ranks together, and yields this rank's part of each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakMethod

from torch.utils.data import DataLoader, IterableDataset, default_collate

from mpitrain.adapters.torch_random import generators_of, random_state, set_random_state
from mpitrain.adapters.torch_trained import call_weakly
from mpitrain.collectives.shares import exact_total
from mpitrain.errors import DataError, everywhere
from mpitrain.reducer.checks import EPOCH_FROM_BIT
from mpitrain.strategies.virtual_ranks import ComputedPlaces, VirtualRanks
from mpitrain.torch.batch_form import BatchForm
from mpitrain.torch.batch_weight import BatchWeight, MeanNumber, mean_of_virtual_ranks, number_of, numbers_of
from mpitrain.torch.batches import has_length, lines_of
from mpitrain.torch.delivered import after_used, compared, followed, parts_of_whole_batches
from mpitrain.torch.drawn import Share, check_thread
from mpitrain.torch.norm_layers import SingleSamples, counts_of_others, tell_of_statistics
from mpitrain.torch.observed import samples_come_divided, saw
from mpitrain.torch.part_loader import Delivery, PartLoader, refuse_distributed
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.world.shard import Part, newest_part
from mpitrain.world.world import World


@uncompiled
class ShardedData:
    """This rank's part of every batch. As with `World.shard`, the parts are disjoint and make up the whole batch.

    If a batch has fewer samples than there are ranks, the last ranks get its first sample, which does not count there.
    A loop needs no special case for this.

    ShardedData is not a DataLoader. It has the attributes of a DataLoader that loops use, with the values of the given
    data, or None if that has no such attribute. All other attributes are in `given`.

    Attributes:
        share: this rank's share of the current batch; None before the first batch and after the last.
        turn: the number of batches handed out so far.
        epoch: the number of times that a loop has gone through all batches. Set it to continue from a checkpoint.
        batch: the number of batches of this epoch that were handed out.
        form: which parts of a batch have one entry for each sample, where whole batches are divided.
        weight: that of this rank's part of the newest batch.
        virtual: the virtual ranks into which batches are cut; None: there are none.
        places: the ranks on which the virtual ranks were computed.
        seen: the numbers of samples of all batches handed out so far, of this rank and of all.
        at_end: methods that are called on all ranks when a loop has come to the end of the data, while they exist.
        given: the data that `prepare` was given.
        dataset: the data set, with the samples of all ranks.
        batch_size: the number of samples of all ranks together.
        sampler, batch_sampler: those of all ranks together; rank 0's draw. If one has `set_epoch`, call it on all
            ranks.
        drop_last, num_workers, collate_fn, generator: as in DataLoader.
    """

    def __init__(
        self, world: World, data: Iterable[Any], virtual: VirtualRanks | None = None, form: Any = None
    ) -> None:
        """Collective; see `prepare` for the data and the form.

        Raises:
            ConfigError: the data already divides samples among ranks. Raised on every rank. Or `form` is not a form.
            MismatchError: the ranks' data differ in kind or length, in the samples of a Subset, or in the integers,
                such as labels, of the first and the last sample of a TensorDataset. Other data sets are not compared by
                reading, because a sample may change with each reading.
        """
        self.share: Share | None = None
        self._newest: Share | None = None  # stays after the last batch
        self.turn = self.epoch = self.batch = 0
        self.seen = 0, 0
        self.at_end: list[WeakMethod[Callable[[], None]]] = []
        self._checksum = 0  # of the numbers of the samples of these batches
        # The random numbers with which the order of this epoch was drawn; at batch 0, those at the end of the previous
        # epoch.
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
        self._thread = threading.get_ident()
        self._singles = SingleSamples(world.size)
        self.weight = BatchWeight(world, is_virtual=virtual is not None)
        for declaring in (data, self.dataset):
            form = getattr(declaring, "batch_form", None) if form is None else form
        self.form = BatchForm(form, is_default=form is None and self.collate_fn is default_collate)
        samples_come_divided()
        self._loader: PartLoader | None = None
        kind, lines = type(data).__name__, list[str]()
        if isinstance(data, DataLoader):
            kind += f", batches of {data.batch_size} samples, drawn by {type(data.sampler).__name__}"
            lines = list(lines_of(data.dataset))
            refuse_distributed(data)
            is_stream = isinstance(data.dataset, IterableDataset)
            if data.batch_sampler is not None and not (is_stream and (virtual or world.watch)):
                self._loader = PartLoader(world, data, virtual)
        length = len(data) if has_length(data) else "an unknown number of"  # type: ignore[arg-type]
        world.agree("compare the data", [*lines, f"{kind}, {length} batches"])

    def __len__(self) -> int:
        """The number of batches, the same as for all ranks together."""
        return len(self.given)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's part of each batch. Collective, as is each step: all ranks take the same batches together.

        Raises:
            DataError: the first batch has fewer samples than there are ranks, or a batch cannot be divided. Later: a
                batch is used in a different thread.
            MismatchError: a source that every rank reads itself gives the ranks different batches, or the ranks
                continue from different positions.
            CheckpointError: after `load_state_dict`, the samples of the batches that were used have changed.
        """
        self._world.agree("begin a loop over the prepared data")
        first = self._begin_epoch()
        begin, is_first = self.turn - first, not first
        counts = counts_of_others() if self.at_end else {}
        for batch, delivery, number in self._batches(first):
            self._thread = threading.get_ident()
            if is_first:
                self._check_first(delivery.share.total)
            is_first = False
            self.share = self._newest = delivery.share
            self.turn = begin + number
            self.batch, self._checksum = number, delivery.checked
            self.seen = self.seen[0] + delivery.share.count, self.seen[1] + delivery.share.total
            self.weight.take(batch, delivery.share)
            self._singles.take(number, delivery.share)
            newest_part[:] = [] if self.virtual else [Part(delivery.share.count, delivery.share.total)]
            saw(batch, delivery.share.count)
            try:
                yield batch
            finally:  # also if an error ends the loop
                self._singles.end()
        newest_part.clear()
        for told in list(self.at_end):
            call_weakly(told, "")
        if self.at_end:
            tell_of_statistics(self._world, counts)
        self.share = None
        self.weight.end()
        self.epoch, self.batch, self._checksum = self.epoch + 1, 0, 0
        self._random = self._random_of_order()

    def _batches(self, first: int) -> Iterator[tuple[Any, Delivery, int]]:
        """Yield this rank's part of each batch after the `first` ones, and its number from 1 on."""
        loader, used = self._loader, (first, self._checksum)
        if loader is not None and loader.parts is not None:
            loader.parts.thread = threading.get_ident()
            loader.parts.epoch = self.epoch
            if not loader.has_own_iter:
                loader.parts.used, loader.parts.skipped = used, self._skipped
            loader.parts.before = self._undo_seed if loader.has_seed(self.epoch) else None
        if loader is None:
            parts = parts_of_whole_batches(self._world, self.given, self.form, self.virtual)
        elif not loader.has_own_iter:
            parts = loader.batches()
        elif loader.parts is not None:
            yield from after_used(followed(self._world, loader), used, self._skipped)
            return
        else:
            parts = ((batch, delivery) for batch, delivery, _ in followed(self._world, loader))
        if not self._is_drawn:
            parts = compared(self._world, parts, used, self._skipped)
        for number, (batch, delivery) in enumerate(parts, first + 1):
            yield batch, delivery, number

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
        """The number of the newest batch, counted from the first epoch; used for the random numbers of virtual
        ranks."""
        if has_length(self.given):
            return self.epoch * len(self) + self.batch
        return self.position

    @property
    def position(self) -> int:
        """The epoch, and in the lower bits (EPOCH_FROM_BIT) the number of the newest batch. Equal on all ranks."""
        return self.epoch << EPOCH_FROM_BIT | self.batch

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
        """Continue from a `state_dict`: the next loop begins after the batches that were used, in the same order.

        Every rank calls this, before the loop. The loop draws the numbers of the samples again, without reading the
        samples, and leaves the rank's other random numbers alone. Data other than a DataLoader of numbered samples is
        read up to that point; each rank then has the random numbers that this reading leaves.

        Between two epochs, the order is drawn with rank 0's random numbers at the end of the epoch, which rank 0 gets
        back. It is the order of an uninterrupted run if nothing draws from them between the loops.

        Raises:
            CheckpointError: the state was saved with other virtual ranks. Nothing has changed.
        """
        if self.virtual and "virtual" in state:
            self.virtual.check(state["virtual"])
            self.places.restore(state["places"])
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        self._checksum, self._random = int(state["checksum"]), state["random"]
        self._is_restored = True
        self._random_after, self._goes_on_as_drawn = None, False  # earlier settings were for another position
        if self.batch == 0 and self._random is not None and self._draws:
            set_random_state(self._random, self._generators)

    def set_random_after(self, state: Mapping[str, Any]) -> None:
        """After `load_state_dict`, make the loop use a `random_state` of this rank, once its order is drawn."""
        self._random_after = state

    def go_on_as_drawn(self) -> None:
        """After `load_state_dict`, let rank 0 continue from the random numbers that drawing the order leaves.

        This is for ranks whose own random state is lost. They begin as the script seeds them, and with that state,
        later epochs would repeat the orders of the first epochs.
        """
        self._goes_on_as_drawn = True

    @property
    def _draws(self) -> bool:
        """Whether the order of the samples depends on this rank's random numbers."""
        return not self._is_drawn or self._world.is_root

    @property
    def _is_drawn(self) -> bool:
        """Whether rank 0 draws the numbers of the samples."""
        return self._loader is not None and self._loader.parts is not None

    def _begin_epoch(self) -> int:
        """Return the number of batches to skip, and restore the random numbers of the order."""
        if not self._is_restored:
            if self.batch:  # the previous loop was left in the middle
                self.epoch += 1
            self.batch = self._checksum = 0
        self._is_restored = False
        if not self.batch:
            self._random, self._random_after, self._goes_on_as_drawn = self._random_of_order(), None, False
            return 0
        if self._is_drawn and self._random_after is None and not self._goes_on_as_drawn:
            self._random_after = random_state()
        if self._draws:
            assert self._random is not None
            set_random_state(self._random, self._generators)
        return self.batch

    def _random_of_order(self) -> dict[str, Any]:
        """The random numbers with which the order is drawn. Collective."""
        random = random_state(self._generators)
        return self._world.broadcast_object(random) if self._is_drawn else random

    def _skipped(self) -> None:
        """Called when the order is drawn up to the position where the loop continues."""
        if self._random_after is not None:
            set_random_state(self._random_after)
        self._random_after, self._goes_on_as_drawn = None, False

    def mean(self, value: Any, weight: Any = None) -> MeanNumber:
        """Return the mean over all samples of the newest batch from the ranks' means over their parts, such as a loss.

        Collective: every rank calls this for the same batch, in the loop or after it. The result is a float that also
        has `item()`, as a loss does.

        Args:
            value: this rank's mean: a number, or a tensor of one element. On a rank without samples it does not count.
                With virtual ranks: a list of such means, which ends with those of the virtual batches of the newest
                batch. Their mean is bitwise identical on any number of ranks.
            weight: the quantity that this rank's mean is over, if not samples: a number of tokens, masked positions or
                boxes, or a sum of class weights. Default: the weight of this batch by `weight` of `prepare` or
                `mpitrain.torch.weight`, or else the number of samples. On a rank without samples it is 0.

        Raises:
            DataError: there was no batch yet, or a weight is negative or not finite, or all are 0 (raised on every
                rank); or `value` or `weight` has several elements; or, with virtual ranks, `value` is not a list or is
                too short.
        """
        share = self._share()
        if self.virtual:
            return MeanNumber(mean_of_virtual_ranks(self._world, share, value))
        value = number_of(self._world, value)
        weight = self.weight.now() if weight is None else self.weight.of(weight)
        return MeanNumber(self._world.mean(value, weight=weight))

    def sum(self, values: Any) -> float:
        """Return the sum of one value per sample over the newest batch, such as 1 for a correct prediction.

        Collective, like `mean`. Each sample counts once, even if a rank without samples computes with a sample of
        another rank. The sum is rounded once, so it does not depend on the number of ranks if the values do not.

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

    def check_thread(self) -> None:
        """Raise DataError if the newest batch was read in another thread than this one."""
        check_thread(self._world, self._thread)

    def _share(self) -> Share:
        if self._newest is None:
            raise everywhere(DataError("there was no batch yet: call mean() and sum() in the loop or after it"))
        self.check_thread()
        return self._newest

    def _undo_seed(self) -> None:
        """Draw the order as if no seed for workers had been drawn before: persistent workers get none."""
        assert self._random is not None
        set_random_state(self._random, self._generators)
