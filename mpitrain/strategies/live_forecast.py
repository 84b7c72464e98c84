"""Forecasts during training, on rank 0, from its measured steps and the model of `mpitrain plan`.

The links are those of the profile, or else a guess. Either may be wrong at the moment. So before a forecast, their rate
is adjusted until the forecast for the current configuration equals the measured time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mpitrain.compression import coding_rate
from mpitrain.forecast.machines import Machines, equal_machines, machines_of
from mpitrain.forecast.measured_steps import HostTimes, PartTimes
from mpitrain.forecast.planner import Planner
from mpitrain.forecast.ways import ExchangeWay, plain_ways, resized_ways, way_of_settings
from mpitrain.reducer.bucket import Layout
from mpitrain.strategies.chooser import StepMedians
from mpitrain.world.world import World


class LiveForecast:
    """Forecasts of one job. Only rank 0 has one."""

    def __init__(self, world: World, layout: Layout, codecs: Iterable[str], *, cores: float, varies: bool) -> None:
        """
        Args:
            layout: of the gradients.
            codecs: the codecs that may be chosen, including "none".
            cores: of each rank.
            varies: other algorithms and bucket sizes may be chosen too, unless a setting names one.
        """
        self._world, self._cores, self._varies = world, cores, varies
        self._codecs = tuple(codecs)
        self._parameters = tuple((one.name, one.count * one.dtype.itemsize) for one in layout.parameters)
        self._machines: Machines | None = None  # measuring its codecs takes a moment

    def __call__(self, of_ranks: Sequence[StepMedians], present: ExchangeWay) -> dict[ExchangeWay, float]:
        """Return the seconds of a step for each allowed configuration, and for the current one."""
        world = self._world
        if self._machines is None:
            self._machines = _machines_of(world, self._codecs)
        planner = Planner(self._hosts(of_ranks, self._machines), self._machines, is_profiled=world.profile.is_measured)
        planner = planner.as_measured(present, max(one.seconds for one in of_ranks), world.size)
        ways = self._ways()
        seconds = {way: planner.forecast(world.size, way).step_seconds for way in dict.fromkeys([present, *ways])}
        if self._varies and not world.config.bucket_mib:
            fastest = min(ways, key=seconds.__getitem__)
            seconds |= {way: planner.forecast(world.size, way).step_seconds for way in resized_ways(fastest)}
        return seconds

    def _ways(self) -> list[ExchangeWay]:
        config = self._world.config
        ways = [way_of_settings(config.algorithm, config.bucket_mib, codec) for codec in self._codecs]
        if self._varies and config.algorithm == "auto" and "none" in self._codecs:
            others = plain_ways(self._world.size, self._world.local_size)
            ways += [replace(way, bucket_mib=config.bucket_mib or None) for way in others]
        return ways

    def _hosts(self, of_ranks: Sequence[StepMedians], machines: Machines) -> list[HostTimes]:
        """The nodes in the order of the machines. Each is as fast as its slowest rank."""
        world, first = self._world, of_ranks[0]
        nodes = []
        for node in range(world.num_nodes):
            ranks = [rank for rank in range(world.size) if world.node_ranks[rank] == node]
            own = max(of_ranks[rank].own_seconds for rank in ranks)
            ready = tuple(min(own, at / first.own_seconds * own) for at in first.ready)
            part = PartTimes(1, 1.0, own, ready, own, own, 1)  # no time depends on the number of samples
            busy = min(self._cores, of_ranks[ranks[0]].busy_cores)
            nodes.append(HostTimes(world.hosts[ranks[0]], self._parameters, (part,), True, 0, self._cores, busy, {}))
        if machines.pairs:  # from a profile, which has its own order
            nodes.sort(key=lambda host: machines.hosts.index(host.host))
        return nodes


def _machines_of(world: World, codecs: Sequence[str]) -> Machines:
    """The machines of this job: those of the profile if it was measured on these hosts, else equal ones."""
    profile = world.profile
    known = dict(profile.codecs)
    # One rate for all settings of a codec, as in a profile.
    kinds = {name.partition(":")[0]: name for name in codecs if name != "none"}
    rates = tuple((kind, known.get(kind) or coding_rate(name)) for kind, name in kinds.items())
    names = sorted(world.hosts[world.node_ranks.index(node)] for node in range(world.num_nodes))
    if profile.links and sorted(profile.nodes) == names:
        machines = machines_of(profile, world.local_size)
        return replace(machines, costs=replace(machines.costs, codecs=rates))
    return equal_machines(
        world.num_nodes, bytes_per_second=profile.bytes_per_second, latency_seconds=profile.latency_seconds,
        ranks_per_node=world.local_size, costs=replace(profile, codecs=rates),
    )  # fmt: skip
