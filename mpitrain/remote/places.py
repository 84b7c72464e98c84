"""The places of a World, by name: "rank 3", "node 1", a host, a GPU. Pure functions of what all ranks know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from mpitrain.watching.ranges import rank_ranges

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
                raise ValueError(f"where={place!r} is no place of this World; there are {self._list()}")
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
