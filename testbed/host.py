"""The requirements of a test bed. Machines without them are refused early, before anything is made."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mpitrain.errors import ConfigError, LaunchError
from testbed.processes import execute

_PACKAGES = ["mmdebstrap", "systemd-container", "iproute2", "nftables", "openssh-client", "util-linux"]
_FULL_PACKAGES = ["user-mode-linux", "e2fsprogs", "kmod"]
_APT_SECONDS = 600.0
_INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
# Counted on beds of 4 and 32 nodes after a set-up.
_INOTIFY_A_NODE = 8


def require_root() -> None:
    """Refuse an ordinary user."""
    if os.geteuid() != 0:
        raise ConfigError(
            "a test bed needs root, for namespaces, mounts and control groups; run the command with sudo: "
            "sudo env PATH=$PATH scripts/testbed ..."
        )


def require_kernel(*, full: bool, delay: bool) -> None:
    """Refuse a machine whose kernel lacks a feature that a bed needs.

    Raises:
        LaunchError: a feature is missing. The error names it.
    """
    namespaces = ("net", "mnt", "pid", "ipc", "uts")
    missing = [f"{kind} namespaces" for kind in namespaces if not Path(f"/proc/self/ns/{kind}").exists()]
    known = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    if not full:
        for kind, module in (("overlay", "overlay"), ("fuse", "fuse")):
            if kind not in known and not _load(module):
                missing.append(f"the {kind} file system")
        if not Path("/dev/fuse").exists():
            missing.append("/dev/fuse")
    if (full or delay) and not (Path("/dev/net/tun").exists() or _load("tun")):
        missing.append("/dev/net/tun")
    if missing:
        raise LaunchError(
            f"this machine's kernel lacks what a test bed needs: {', '.join(missing)}. In a container, start it with "
            "more rights (docker run --privileged), or use a virtual machine"
        )


def require_inotify(num_nodes: int) -> None:
    """Refuse a bed whose nodes' systemd would run out of inotify instances, which all of root's processes share.

    Raises:
        LaunchError: there are too few. The error says how many there are, how many are needed, and how to allow more.
    """
    limit = int(_INOTIFY.read_text())
    used = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended
            if process.stat().st_uid == 0:
                used += sum(str(link.readlink()) == "anon_inode:inotify" for link in (process / "fd").iterdir())
    if words := too_few_inotify(limit, used, num_nodes):
        raise LaunchError(words)


def too_few_inotify(limit: int, used: int, num_nodes: int) -> str:
    """Return what is wrong if `num_nodes` more nodes do not fit; empty if they do."""
    needed = used + _INOTIFY_A_NODE * num_nodes
    if needed <= limit:
        return ""
    more = max(1024, 1 << (needed - 1).bit_length())
    return (
        f"fs.inotify.max_user_instances is {limit}; {num_nodes} nodes need {needed}, with the {used} that are in use. "
        f"Allow more: sudo sysctl -w fs.inotify.max_user_instances={more}"
    )


def require_own_folder(folder: Path) -> None:
    """Make the state folder, or refuse an unsafe one: its files run as root, or are removed when they are old.

    Raises:
        ConfigError: other users may read or own it, or something else is in it.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not is_private or not ((folder / "images" / "lock").exists() or not any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists already and is not for test beds; name a new folder, such as --state {folder}/testbed"
        )


def require_real_disk(folder: Path) -> None:
    """Refuse a folder on an overlay: a node's disk is an overlay, which cannot lie on another overlay."""
    kind = execute(["stat", "-f", "-c", "%T", folder]).strip()
    if kind == "overlayfs":
        raise LaunchError(
            f"{folder} is on an overlay file system (as in a container), which cannot hold the nodes' disks; "
            "name a folder on another file system, such as a tmpfs: --state /dev/shm/mpitrain"
        )


def install_packages(*, full: bool, say: Callable[[str], None]) -> None:
    """Report and install the missing Debian packages that a bed needs."""
    missing = [name for name in _PACKAGES + (_FULL_PACKAGES if full else []) if not _is_installed(name)]
    if not missing:
        return
    if subprocess.run(["sh", "-c", "command -v apt-get"], capture_output=True, check=False).returncode != 0:
        raise LaunchError(f"test beds need Debian or Ubuntu, and there is no apt-get; missing: {' '.join(missing)}")
    say(f"installing Debian packages: apt-get install {' '.join(missing)}")
    _apt(["update"])
    _apt(["install", "--yes", "--no-install-recommends", *missing])


def _apt(words: Sequence[str]) -> None:
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    lock = f"DPkg::Lock::Timeout={_APT_SECONDS:.0f}"
    deadline = time.monotonic() + _APT_SECONDS
    while True:
        try:
            execute(["apt-get", "--quiet", "-o", lock, *words], timeout_seconds=_APT_SECONDS, env=env)
        except LaunchError as error:
            # apt's option waits for dpkg's lock alone. `update` ends at once if another apt, such as that of a second
            # bed, holds the one of the package lists.
            if "Could not get lock" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1)
        else:
            return


def _is_installed(package: str) -> bool:
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout == "installed"
    except FileNotFoundError:
        return False


def _load(module: str) -> bool:
    try:
        return subprocess.run(["modprobe", module], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
