"""What the system lets a job have: cores, open files, locked and shared memory; and what dead jobs still hold."""

from __future__ import annotations

import os
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from mpitrain.diagnostics.finding import Finding

_SHM = Path("/dev/shm")
# What MPICH, Intel MPI and Open MPI (4, 5) call their files there.
SHM_PATTERNS = ("mpich_shm_*", "Intel_MPI_*", "vader_segment.*", "sm_segment.*")
# A job that is just starting has made its files, and not mapped them yet.
_YOUNG_SECONDS = 60.0

_FEW_FILES = 1024
_LITTLE_SHM_BYTES = 256 << 20


@dataclass(frozen=True)
class Facts:
    """Limits of this process and of the machine. None: without a limit, or not there."""

    cores: int  # of the machine
    usable_cores: int  # that this process may run on
    quota_cores: float | None  # of processor time, by cgroup
    open_files: int | None
    open_files_hard: int | None
    locked_bytes: int | None
    has_rdma: bool
    shm_bytes: int | None
    shm_free_bytes: int
    leftovers: list[str]  # files of dead jobs in /dev/shm
    leftover_bytes: int

    def lines(self) -> list[tuple[str, str]]:
        """For people."""
        quota = f", processor time for {self.quota_cores:g}" if self.quota_cores else ""
        shm = "not there" if self.shm_bytes is None else f"{_mib(self.shm_free_bytes)} free of {_mib(self.shm_bytes)}"
        locked = "unlimited" if self.locked_bytes is None else _mib(self.locked_bytes)
        return [
            ("Cores", f"{self.usable_cores} usable of {self.cores}{quota}"),
            ("Open files", f"at most {'unlimited' if self.open_files is None else self.open_files}"),
            ("Locked memory", f"at most {locked}"),
            ("/dev/shm", shm),
        ]


def _mib(count_bytes: int) -> str:
    return f"{count_bytes / 2**20:,.0f} MiB"


def collect() -> Facts:
    """Look at this process's limits and at /dev/shm."""
    soft, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    usable = _SHM.is_dir() and os.access(_SHM, os.W_OK)
    shm = shutil.disk_usage(_SHM) if usable else None
    leftovers = _leftovers() if usable else []
    return Facts(
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        quota_cores=_quota(),
        open_files=soft,
        open_files_hard=hard,
        locked_bytes=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        has_rdma=any(Path("/sys/class/infiniband").glob("*")),
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else 0,
        leftovers=[str(path) for path, _ in leftovers],
        leftover_bytes=sum(size for _, size in leftovers),
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _quota() -> float | None:
    """Processor time by cgroup (version 2, else 1) in cores; None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = (
                Path("/sys/fs/cgroup/cpu", name).read_text().strip()
                for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _leftovers() -> list[tuple[Path, int]]:
    """Files of MPI libraries that belong to this user (root: to anybody) and that no process has mapped."""
    user = os.geteuid()
    old = time.time() - _YOUNG_SECONDS
    found: dict[Path, int] = {}
    for pattern in SHM_PATTERNS:
        for path in _SHM.glob(pattern):
            try:
                status = path.stat()
            except OSError:
                continue  # its job has just ended
            if user in (0, status.st_uid) and status.st_mtime < old:
                found[path] = status.st_blocks * 512
    if not found:
        return []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            continue
        found = {path: size for path, size in found.items() if str(path) not in text}
    return sorted(found.items())


def judge(facts: Facts) -> list[Finding]:
    """Which limit a job would run into."""
    findings = []
    if facts.quota_cores and facts.quota_cores < facts.usable_cores:
        threads = max(1, int(facts.quota_cores))
        findings.append(
            Finding(
                "warn",
                f"{facts.usable_cores} cores are usable, but processor time only for {facts.quota_cores:g}",
                "NumPy starts a thread for each core, and all of them are stopped whenever the time is used up.",
                f"export OMP_NUM_THREADS={threads}",
            )
        )
    if facts.open_files is not None and facts.open_files < _FEW_FILES:
        best = "unlimited" if facts.open_files_hard is None else str(facts.open_files_hard)
        findings.append(
            Finding(
                "warn",
                f"a process may open only {facts.open_files} files",
                "A rank needs several sockets for each other rank, beside its data files.",
                f"ulimit -n {best}",
            )
        )
    if facts.has_rdma and facts.locked_bytes is not None:
        findings.append(
            Finding(
                "warn",
                f"there is RDMA hardware, but only {_mib(facts.locked_bytes)} of memory may be locked",
                "RDMA sends from locked memory only; MPI fails at larger messages or goes back to TCP.",
                r"printf '* soft memlock unlimited\n* hard memlock unlimited\n' | "
                "sudo tee /etc/security/limits.d/mpitrain.conf",
            )
        )
    if facts.shm_bytes is None:
        findings.append(
            Finding(
                "fail",
                "/dev/shm is not there or may not be written",
                "The ranks of one machine exchange their gradients through it.",
                "sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
            )
        )
    elif facts.shm_free_bytes < _LITTLE_SHM_BYTES:
        findings.append(
            Finding(
                "warn",
                f"/dev/shm has only {_mib(facts.shm_free_bytes)} free of {_mib(facts.shm_bytes)}",
                "The ranks of one machine exchange their gradients through it; a full one kills them (SIGBUS).",
                "sudo mount -o remount,size=4g /dev/shm  # in Docker: docker run --shm-size=4g",
            )
        )
    if facts.leftovers:
        findings.append(
            Finding(
                "warn",
                f"dead jobs have left {len(facts.leftovers)} files of {_mib(facts.leftover_bytes)} in {_SHM}",
                "They take up memory until they are removed.",
                _removal(facts.leftovers),
            )
        )
    return findings


def _removal(paths: list[str]) -> str:
    """A command that removes such files, but none of a job that runs."""
    patterns = [p for p in SHM_PATTERNS if any(Path(path).match(p) for path in paths)]
    files = " ".join(f"{_SHM}/{pattern}" for pattern in patterns)
    return f'for f in {files}; do grep -qsF "$f" /proc/[0-9]*/maps || rm -f "$f"; done'
