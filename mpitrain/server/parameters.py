"""The parameters of a server, with versions of their blocks and their gradients; those of a worker; and their
messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy

from mpitrain.adapters.adapter import Adapter, divided_of, scaled_of
from mpitrain.arrays import Array, is_array
from mpitrain.compression.codec import Codec
from mpitrain.errors import ConfigError, MismatchError
from mpitrain.reducer.bucket import Layout, Parameter, plan_layout
from mpitrain.reducer.division import Division, counts_of, divide, members
from mpitrain.reducer.means import Remarks, Told, remarks_of
from mpitrain.server.gradients import first_not_finite, mean_of, on_host, read_gradients

# The unit of comparison and transfer. A block of float32 is 64 KiB, so a comparison stays in the cache.
_BLOCK_COUNT = 2**14


class ParameterShard:
    """A server's part of the parameters, and the gradients received for it. Every server has one.

    A worker pulls the changes since its version. All servers make the same updates in the same order, each to its part.

    Attributes:
        version: rises with each update, and if something else has changed parameters that a worker has.
        layout: of the gradients.
        part: of the gradients.
        pushes: by ticket of the worker and number of the unit: the gradients, and the first parameter that is not
            finite. Gradients of units that are no longer needed are removed.
    """

    def __init__(self, adapter: Adapter, number: int = 0, num_servers: int = 1, codec: Codec | None = None) -> None:
        """The server's own replica is in `adapter`; `number` is the server's; `codec` is for gradients."""
        self.version = 0
        self.pushes: dict[tuple[str, int], tuple[Mapping[numpy.dtype, numpy.ndarray], str]] = {}
        self._codec = codec
        self._newest, self._live = 0, list[range]()  # of the units
        gradients, parameters = divisions_of(adapter, num_servers)
        self.layout, self.part = gradients.layout, gradients.parts[number]
        self._adapter = adapter
        self._is_divided = num_servers > 1
        self._num_buffers = getattr(adapter, "num_buffers", 0)
        self._noted = 0  # the version with which the last note was made
        self._carried: dict[numpy.dtype, numpy.ndarray] = {}
        self._pulled = -1  # the newest version that a worker has
        self._plan, self._pulled_part = parameters.layout, parameters.parts[number]
        counts = counts_of(self._pulled_part).items()
        self._values = {dtype: numpy.empty(count, dtype) for dtype, count in counts}
        self._newer = {dtype: numpy.empty(count, dtype) for dtype, count in counts}
        # The version in which each block last changed.
        self._changed = {dtype: numpy.zeros(-(-count // _BLOCK_COUNT), numpy.int64) for dtype, count in counts}
        self._fetch(self._values)

    def carry(self, flats: Mapping[numpy.dtype, numpy.ndarray]) -> None:
        """Add these values, of flat buffers, to the gradients of the next update; see GradientReducer.restore."""
        self._carried.update(flats)

    def plan(self, rate_factor: float) -> dict[str, Any]:
        """Return what all servers must know about the next update; {} if there is one server.

        Args:
            rate_factor: the learning rate is multiplied by this number. If it is not 1, the adapter has passed
                `check_rate_factor`.
        """
        adapter: Any = self._adapter
        if rate_factor != 1.0:
            adapter.scale_next_rate(rate_factor)
        plan: dict[str, Any] = adapter.plan_update() if self._is_divided else {}
        return plan

    def apply(
        self,
        gradients: dict[numpy.dtype, numpy.ndarray],
        remarks: Remarks,
        plan: Mapping[str, Any],
        staleness: int,
    ) -> float:
        """Make an update with mean gradients. Return the learning rate that was used. `note_changes` must follow.

        Args:
            gradients: the part of the flat buffers by dtype, in the order of `layout`. They may be overwritten.
            remarks: as for Adapter.apply_gradients.
            plan: of this update.
            staleness: the largest staleness of these gradients. The changes of buffers, such as running means, are
                divided by 1 + staleness: each of n workers answers with a change from the same old mean towards its own
                batch, and their sum would be n times too large. An older note does not replace a newer one.
        """
        first_buffer = len(self.layout.parameters) - self._num_buffers
        for index, _, place in members(self.layout, self.part):
            if index >= first_buffer:
                change = gradients[self.layout.parameters[index].dtype][place]
                numpy.divide(change, 1 + staleness, out=change)
        if self.version - staleness < self._noted:
            remarks = replace(remarks, notes=(None,))
        else:
            self._noted = self.version - staleness
        if plan:
            divided: Any = self._adapter
            divided.follow_plan(plan)
        for dtype, carried in self._carried.items():
            gradients[dtype][...] += carried
        self._carried = {}
        rate = self._adapter.apply_gradients(gradients, remarks)
        self.version += 1
        return rate

    def check_note(self, note: Any) -> None:
        """Raise GradientError for a note that the adapter rejects; see Adapter.note."""
        checked: Any = self._adapter
        if hasattr(checked, "check_note"):
            checked.check_note(note)

    def note_changes(self, *, elsewhere: bool = False) -> None:
        """Find the blocks that have changed since the last call, by an update or by other code.

        If a worker has the current version, and something other than an update has changed a block, a new version
        begins. The same applies if parameters have changed `elsewhere`, on another server, which a worker may already
        have asked.
        """
        changes = self._find_changes()
        if elsewhere or (self._pulled == self.version and any(blocks.any() for _, blocks in changes)):
            self.version += 1
        self._stamp(changes)

    def follow(self, version: int) -> None:
        """Assign this version to the changes since the last call: the first server counts versions."""
        self.version = version
        self._stamp(self._find_changes())

    def _find_changes(self) -> list[tuple[numpy.ndarray, numpy.ndarray]]:
        """Return, for each dtype, the versions of the blocks, and which of the blocks have changed."""
        changes: list[tuple[numpy.ndarray, numpy.ndarray]] = []
        self._fetch(self._newer)
        for dtype, newer in self._newer.items():
            if not newer.size:
                continue
            bits = numpy.dtype(f"u{dtype.itemsize}")
            differs = newer.view(bits) != self._values[dtype].view(bits)
            blocks = numpy.logical_or.reduceat(differs, range(0, newer.size, _BLOCK_COUNT))
            changes.append((self._changed[dtype], blocks))
        return changes

    def _stamp(self, changes: list[tuple[numpy.ndarray, numpy.ndarray]]) -> None:
        for changed, blocks in changes:
            changed[blocks] = self.version
        self._values, self._newer = self._newer, self._values

    def since(self, version: int) -> tuple[dict[str, Any], list[numpy.ndarray]]:
        """Return what a worker with the parameters of `version` is missing; -1: it has none.

        Returns:
            The fields for `Replica.take`, and for each dtype one array, which stays valid until the next update.
        """
        self._pulled = self.version
        runs: dict[str, list[list[int]]] = {}
        arrays: list[numpy.ndarray] = []
        for dtype, values in self._values.items():
            if version < 0:
                of_dtype = [[0, values.size]] if values.size else []
            else:
                of_dtype = _runs(self._changed[dtype] > version, values.size)
            if of_dtype:
                runs[str(dtype)] = of_dtype
                parts = [values[begin:end] for begin, end in of_dtype]
                arrays.append(parts[0] if len(parts) == 1 else numpy.concatenate(parts))
        return {"version": self.version, "runs": runs}, arrays

    def push(self, ticket: str, number: int, arrays: Sequence[numpy.ndarray]) -> str:
        """Store the gradients of a unit, unless they are not needed. Gradients that were sent twice count once.

        Returns:
            The first parameter whose gradient holds NaN or infinity in this part; "": none.

        Raises:
            GradientError: they do not belong to this model; the text gives the difference.
        """
        key, not_finite = (ticket, number), ""
        if key in self.pushes:
            return self.pushes[key][1]
        if self._is_needed(number):
            flats = read_gradients(arrays, self.part, self._codec)
            not_finite = first_not_finite(flats, self.layout, self.part)
            self.pushes[key] = flats, not_finite
        return not_finite

    def update(self, used: Sequence[Any], told: Sequence[Told], plan: Mapping[str, Any], staleness: int) -> float:
        """Make an update. Return the learning rate.

        Args:
            used: of each gradient, in the order in which they are added up: ticket, number of the unit, place in
                `told`, and share.
            told: what workers have told besides.
            plan, staleness: see `apply`.
        """
        gradients = [self.pushes.pop((ticket, number))[0] for ticket, number, _, _ in used]
        remarks = remarks_of([told[place] for _, _, place, _ in used])
        return self.apply(mean_of(gradients, [share for *_, share in used]), remarks, plan, staleness)

    def forget(self, newest: int, live: Sequence[Sequence[int]]) -> None:
        """Drop the gradients of units with a number up to `newest`, except those in the ranges of `live`."""
        self._newest, self._live = newest, [range(first, last + 1) for first, last in live]
        self.pushes = {key: push for key, push in self.pushes.items() if self._is_needed(key[1])}

    def _is_needed(self, number: int) -> bool:
        """Whether a unit may still be in an update."""
        return number > self._newest or any(number in live for live in self._live)

    def _fetch(self, flats: dict[numpy.dtype, numpy.ndarray]) -> None:
        values = list(self._adapter.parameters().values())
        for index, own, place in members(self._plan, self._pulled_part):
            flats[self._plan.parameters[index].dtype][place] = on_host(values[index]).reshape(-1)[own]


def check_rate_factor(adapter: Adapter) -> None:
    """Raise ConfigError unless the learning rate of one step can be scaled exactly."""
    try:
        scaled_of(adapter).scale_next_rate(1.0)
    except ConfigError as error:
        raise ConfigError(f"{error}. Leave staleness_correction=True out, or lower the staleness") from None


def divisions_of(adapter: Adapter, num_servers: int) -> tuple[Division, Division]:
    """Return how gradients and parameters are divided between this many servers.

    Raises:
        ConfigError: there are several, and the adapter cannot be divided.
    """
    if num_servers > 1:
        return divided_of(adapter).divisions(num_servers)
    return divide(plan_layout(adapter.layout), 1), divide(layout_of(adapter.parameters()), 1)


def layout_of(values: Mapping[str, Array]) -> Layout:
    """Return the layout of named arrays."""
    return plan_layout([Parameter(name, value.shape, numpy.dtype(value.dtype)) for name, value in values.items()])


def _runs(blocks: numpy.ndarray, size: int) -> list[list[int]]:
    """Return begin and end, in elements, of each row of blocks that are True."""
    edges = numpy.flatnonzero(numpy.diff(blocks, prepend=False, append=False))
    bounds = numpy.minimum(edges * _BLOCK_COUNT, size).tolist()
    return [[begin, end] for begin, end in zip(bounds[::2], bounds[1::2], strict=True)]


class Replica:
    """A copy of the parameters. Each part of it comes from one server.

    Attributes:
        versions: of the parts, by server; -1: none has come.
    """

    def __init__(self, adapter: Adapter, num_servers: int = 1) -> None:
        self._adapter = adapter
        _, division = divisions_of(adapter, num_servers)
        self._plan, self._parts = division.layout, division.parts
        self._flats = {dtype: numpy.empty(count, dtype) for dtype, count in self._plan.counts.items()}
        self._has_changed = False
        self.versions = [-1] * num_servers

    def forget(self) -> None:
        """Note that the servers have changed."""
        self.versions = [-1] * len(self.versions)

    def take(self, fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray], server: int = 0) -> None:
        """Apply a result of a server's `ParameterShard.since`. `load` must follow.

        Raises:
            MismatchError: it belongs to other parameters. The parameters have not changed.
        """
        runs, part = fields["runs"], self._parts[server]
        flats = {str(dtype): self._flats[dtype][own] for dtype, own in part.items()}
        if len(runs) != len(arrays):
            raise MismatchError(f"the server has sent {len(arrays)} arrays of parameters for {len(runs)} dtypes")
        for (name, of_dtype), array in zip(runs.items(), arrays, strict=True):
            flat, count = flats.get(name), sum(end - begin for begin, end in of_dtype)
            if flat is None or array.dtype != flat.dtype or array.shape != (count,):
                raise MismatchError(
                    f"the server has sent parameters {array.dtype}{array.shape}; allowed are {name}({count},) of "
                    f"{', '.join(f'{one}({size},)' for one, size in counts_of(part).items())}"
                )
            if not all(0 <= begin <= end <= flat.size for begin, end in of_dtype):
                raise MismatchError(f"the server has sent parameters beyond {name}({flat.size},): {of_dtype}")
        for (name, of_dtype), array in zip(runs.items(), arrays, strict=True):
            done = 0
            for begin, end in of_dtype:
                flats[name][begin:end] = array[done : done + end - begin]
                done += end - begin
        self._has_changed |= bool(runs)
        self.versions[server] = fields["version"]

    def load(self) -> None:
        """Copy the parameters into the model, if some have arrived."""
        if self._has_changed:
            self._adapter.load_parameters(self._plan.named(self._flats))
        self._has_changed = False


def pieces_of(state: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[numpy.ndarray]]]:
    """Yield fields and arrays of the messages for a result of DividedAdapter.part_state."""
    for name, value in state.items():
        if is_array(value):
            yield {"name": name}, [on_host(value)]
        else:
            yield {"name": name, "value": value}, []


def add_piece(state: dict[str, Any], fields: Mapping[str, Any], arrays: Sequence[numpy.ndarray]) -> None:
    """The reverse of `pieces_of`."""
    state[fields["name"]] = arrays[0] if arrays else fields["value"]


def difference_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that are new or differ in bits, and the names that are gone."""
    changed = {name: value for name, value in now.items() if name not in before or not _is_same(before[name], value)}
    return changed, [name for name in before if name not in now]


def _is_same(one: Any, other: Any) -> bool:
    if is_array(one) and is_array(other):
        one, other = on_host(one), on_host(other)
        return (one.dtype, one.shape) == (other.dtype, other.shape) and numpy.array_equal(_bits(one), _bits(other))
    return not is_array(one) and not is_array(other) and repr(one) == repr(other)


def _bits(array: numpy.ndarray) -> numpy.ndarray:
    """The bytes of an array, in its own memory if that is contiguous."""
    return numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
