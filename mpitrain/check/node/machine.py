"""Facts about a machine: its names and addresses, clock, memory, disks and processors; its system and its speed."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain import facts
from mpitrain.check.node import children, network

_RESOLVE_SECONDS = 4.0
_SAMPLE_SECONDS = 0.5
# A process counts as computing if it has computed for longer than any check, for a good part of its life, and still
# does.
_BUSY_CPU_SECONDS = 5.0
_BUSY_SHARE = 0.2


def names(wish: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of this machine, and the addresses to which it resolves the other nodes' names. wish:
    names."""
    return {
        "hostname": socket.gethostname(),
        "resolved": resolve([*wish["names"], socket.gethostname()]),
        "hosts": facts.text("/etc/hosts").splitlines(),
        "set_up": Path("/etc/mpitrain/hosts").is_file(),
        "cloud_init": _cloud_init(),
        "links": [
            {
                "name": link["ifname"],
                "is_up": "UP" in link["flags"],
                "mac": link.get("address", ""),
                "addresses": facts.local_addresses([link]),
            }
            for link in network.addresses()
        ],
        "machine_id": facts.text("/etc/machine-id").strip(),
        "host_keys": facts.host_keys(),
    }


def resolve(wanted: list[str]) -> dict[str, list[str] | None]:
    """Return the addresses of each name, in order; empty if it has none, None if no answer came in time."""
    addresses: dict[str, list[str] | None] = dict.fromkeys(wanted)

    def ask(name: str) -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses[name] = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                addresses[name] = []
        except UnicodeError:
            addresses[name] = []

    # A dead DNS server delays every name. Threads that still wait end with this process.
    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in addresses]
    end = time.monotonic() + _RESOLVE_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(addresses)


def _cloud_init() -> str | None:
    """Return cloud-init's setting for /etc/hosts, "" for none; None without cloud-init. The last file wins."""
    if not Path("/etc/cloud").is_dir():
        return None
    value = ""
    for path in ["/etc/cloud/cloud.cfg", *map(str, sorted(Path("/etc/cloud/cloud.cfg.d").glob("*.cfg")))]:
        for match in re.finditer(r"^manage_etc_hosts:\s*(\S+)", facts.text(path), re.M):
            value = match.group(1).strip("\"'")
    return value


def clock(_wish: dict[str, Any]) -> float:
    """Return the time of day, in seconds since 1970."""
    return time.time()


def time_service(_wish: dict[str, Any]) -> dict[str, Any]:
    """Return the service that sets the clock. `synchronized` is None if it is unknown."""
    shown = children.output("timedatectl", "show", "--property=NTPSynchronized", "--value").strip()
    if shown not in ("yes", "no"):
        leap = re.search(r"^Leap status\s*:\s*(.+)$", children.output("chronyc", "-n", "tracking"), re.M)
        shown = "" if leap is None else "no" if leap.group(1) == "Not synchronised" else "yes"
    daemons = facts.time_daemons(children.run)
    return {"synchronized": {"yes": True, "no": False}.get(shown), "daemons": daemons, "container": _container()}


def _container() -> str:
    """Return the kind of container, such as docker; empty on a machine, also on one within Windows."""
    kind = facts.container(children.run)
    return "" if kind == "wsl" else kind


def resources(_wish: dict[str, Any]) -> dict[str, Any]:
    """Return memory, disks, and settings that apply to all processes."""
    memory = {
        match.group(1): int(match.group(2)) * 1024
        for match in re.finditer(r"^(\w+):\s+(\d+) kB", facts.text("/proc/meminfo"), re.M)
    }
    governors = {facts.text(str(path)).strip() for path in _cpufreq("scaling_governor")}
    drivers = {facts.text(str(path)).strip() for path in _cpufreq("scaling_driver")}
    return {
        "container": _container(),
        "memory_bytes": memory.get("MemTotal"),
        "available_bytes": memory.get("MemAvailable"),
        "places": {path: _room(path) for path in ("/", "/tmp", "/dev/shm")},
        "removes_ipc": facts.removes_ipc(children.run),
        "governors": sorted(governors),
        "governor_drivers": sorted(drivers),
    }


def _cpufreq(name: str) -> list[Path]:
    return sorted(Path("/sys/devices/system/cpu").glob(f"cpu[0-9]*/cpufreq/{name}"))


def _room(path: str) -> dict[str, Any] | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return {
        "size_bytes": status.f_blocks * status.f_frsize,
        "free_bytes": status.f_bavail * status.f_frsize,
        "files": status.f_files,
        "free_files": status.f_favail,
        "is_read_only": bool(status.f_flag & os.ST_RDONLY),
        "is_writable": os.access(path, os.W_OK),
        "mode": stat.S_IMODE(Path(path).stat().st_mode),
    }


def processors(_wish: dict[str, Any]) -> dict[str, Any]:
    """Return the processors that a job may use, and the other processes that compute."""
    before = _cpu_seconds()
    started = time.monotonic()
    time.sleep(_SAMPLE_SECONDS)
    after = _cpu_seconds()
    ancestors = _ancestors()
    seconds = time.monotonic() - started
    busy = []
    for process, (used, life) in after.items():
        now = (used - before.get(process, (used, life))[0]) / seconds
        if process not in ancestors and used >= _BUSY_CPU_SECONDS and used >= _BUSY_SHARE * life and now > 0.0:
            # While all nodes are examined at once, the process gets less time than before.
            busy.append({"pid": process, "cores": max(now, used / life), **_owner_and_program(process)})
    return {
        "machine": len(os.sched_getaffinity(1)),  # those of a container, in a container
        "usable": len(os.sched_getaffinity(0)),
        "quota": _quota(),
        "busy": sorted(busy, key=lambda one: -float(one["cores"])),
    }


def _cpu_seconds() -> dict[int, tuple[float, float]]:
    """Return by process the processor time that it has used, and its age, in seconds."""
    tick = os.sysconf("SC_CLK_TCK")
    up = float(facts.text("/proc/uptime").split()[0])
    seconds = {}
    for path in Path("/proc").glob("[0-9]*"):
        fields = facts.text(f"{path}/stat").rpartition(")")[2].split()
        if len(fields) > 19:
            used = (int(fields[11]) + int(fields[12])) / tick
            seconds[int(path.name)] = (used, max(0.1, up - int(fields[19]) / tick))
    return seconds


def _ancestors() -> set[int]:
    """Return this process and its ancestors, which compute for longer than a check should take on a slow machine."""
    ancestors: set[int] = set()
    process = os.getpid()
    while process > 1:
        ancestors.add(process)
        fields = facts.text(f"/proc/{process}/stat").rpartition(")")[2].split()
        process = int(fields[1]) if fields else 0
    return ancestors


def _owner_and_program(process: int) -> dict[str, Any]:
    """Return owner and program, without arguments, which may be private and must not be in a report."""
    user = "?"
    with suppress(OSError):
        uid = Path(f"/proc/{process}").stat().st_uid
        user = facts.user_name(uid) or str(uid)
    return {"user": user, "program": facts.text(f"/proc/{process}/comm").strip()}


def _quota() -> float | None:
    """Return the cgroup's limit of processor time (version 2, or else 1), in processors; None without a limit."""
    least = None
    for line in facts.text("/proc/self/cgroup").splitlines():
        number, controllers, place = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") if number == "0" else Path("/sys/fs/cgroup/cpu")
        folder = root / place.lstrip("/")
        for path in [folder, *folder.parents]:
            if root not in (path, *path.parents):
                break
            limit = facts.text(f"{path}/cpu.max").split() or [
                facts.text(f"{path}/cpu.cfs_quota_us").strip(),
                facts.text(f"{path}/cpu.cfs_period_us").strip(),
            ]
            if limit[0] not in ("", "max", "-1"):
                own = int(limit[0]) / int(limit[1])
                least = own if least is None else min(least, own)
    return least


def compute(_wish: dict[str, Any]) -> list[float]:
    """Return the times of a fixed computation. It runs in a child, because this process's threads would slow it."""
    code = (
        "import time\n"
        "for _ in range(9):\n"
        "    started = time.perf_counter()\n"
        "    x = 1\n"
        "    for i in range(1500000):\n"
        "        x = (x * 1103515245 + i) & 0x7fffffff\n"
        "    print(time.perf_counter() - started, flush=True)\n"
    )
    _code, out, err = children.run(["/usr/bin/python3", "-c", code], 40.0)
    if not out:
        raise RuntimeError(err.strip() or "the computation gave nothing")
    return [float(line) for line in out.split()]


def system(_wish: dict[str, Any]) -> dict[str, Any]:
    """Return system, kernel, processors, memory; and the packages as a number and a hash, which shows changes."""
    packages = children.output("dpkg-query", "-W") or children.output("rpm", "-qa")
    lines = sorted(packages.splitlines())
    memory = re.search(r"^MemTotal:\s+(\d+) kB", facts.text("/proc/meminfo"), re.M)
    return {
        "system": facts.release().get("PRETTY_NAME", ""),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_mib": int(memory[1]) // 1024 if memory else None,
        "packages": f"{len(lines)} packages, {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:12]}",
    }


CALLS = {
    "names": names,
    "clock": clock,
    "time_service": time_service,
    "resources": resources,
    "processors": processors,
    "system": system,
}
