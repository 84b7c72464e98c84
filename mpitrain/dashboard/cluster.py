"""The hosts of this user: those of the inventory, those that were checked, and those of jobs, with their load.

Nothing here logs in anywhere. A load is reported by the agents of a job, so it is known only where a job runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.dashboard.catalogue import Catalogue
from mpitrain.dashboard.cluster_reports import last_check, measured_ways
from mpitrain.errors import ConfigError, DataError
from mpitrain.launch.hostfile import find_inventory, read_inventory

_MOST_BYTES = 1 << 20  # of an inventory


class ClusterView:
    """What the page of the cluster shows."""

    def __init__(self, catalogue: Catalogue, inventory: Path | None) -> None:
        """`inventory` is the file that the user has named; None: that of this folder or machine, if there is one."""
        self._catalogue = catalogue
        self._inventory = inventory
        self._nodes: dict[str, dict[str, Any]] = {}  # by name: what is known without a job

    def known(self) -> dict[str, Any]:
        """Return what is known without a job, read anew: the last check, measured ways, and what cannot be read."""
        problems: list[str] = []
        nodes: dict[str, dict[str, Any]] = {}
        inventory = ""
        try:
            path = self._inventory or find_inventory()
            if path is not None:
                inventory = str(path)
                nodes = {host.name: {"address": host.address} for host in _hosts(path)}
        except ConfigError as error:
            problems.append(str(error))
        check = None
        try:
            check = last_check()
        except DataError as error:
            problems.append(str(error))
        for name, facts in (check["nodes"] if check else {}).items():
            nodes[name] = {**facts, **nodes.get(name, {})}
        ways = []
        for origin, read in measured_ways():
            try:
                if (measured := read()) is not None:
                    ways.append({"origin": origin, **measured})
            except DataError as error:
                problems.append(str(error))
        self._nodes = nodes
        return {"inventory": inventory, "check": check, "ways": ways, "problems": problems}

    def hosts(self) -> list[dict[str, Any]]:
        """Return all hosts as they are now, with the jobs that have ranks there. Any thread may call."""
        runs = {run["job"]: run for run in self._catalogue.summaries() if run["is_live"]}
        hosts = {name: _host(name, facts) for name, facts in self._nodes.items()}
        for job in list(self._catalogue.live.jobs.values()):
            run = runs.get(job.ids[-1] if job.ids else "")
            for name, entry in job.look["hosts"].items():
                host = hosts.setdefault(name, _host(name, {}))
                host["ranks"] += len(entry["ranks"])
                host["silence"] = max(host["silence"], entry["silence"])
                host["load"] = host["load"] or _load(entry.get("load"))
                if run is not None:
                    host["jobs"].append({"id": run["id"], "name": run["name"], "state": run["state"]})
        for host in hosts.values():
            for name in ("cores", "memory_bytes"):
                host[name] = host[name] if host["load"] is None else host["load"].get(name, host[name])
        return list(hosts.values())


def _hosts(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():  # such as a pipe, which would hold up the reader
            raise ConfigError(f"{path} is not a file")
        size = path.stat().st_size if path.exists() else 0
    except OSError as error:
        raise ConfigError(f"{path} cannot be looked at: {error.strerror}") from None
    if size > _MOST_BYTES:
        raise ConfigError(f"{path} has {size >> 20} MiB; an inventory has at most {_MOST_BYTES >> 20}")
    return read_inventory(path).hosts


def _host(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    known = {field: facts.get(field) for field in ("address", "cores", "memory_bytes")}
    return {"name": name, **known, "jobs": [], "ranks": 0, "silence": 0.0, "load": None}


def _load(load: object) -> dict[str, Any] | None:
    """Return the numbers of a load, and those of its GPUs; a launcher of a later version may say more."""
    if not isinstance(load, Mapping):
        return None
    gpus = load.get("gpus")
    return {**_numbers(load), "gpus": [_numbers(gpu) for gpu in gpus] if isinstance(gpus, list) else []}


def _numbers(fields: Any) -> dict[str, float]:
    items = fields.items() if isinstance(fields, Mapping) else ()
    return {name: value for name, value in items if isinstance(value, int | float) and not isinstance(value, bool)}
