"""The disk of a User-mode Linux node: the bare root, the kernel's modules, and what takes the place of a network card's
set-up and of a screen to look at."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from mpitrain.errors import LaunchError
from mpitrain.testbed.bed_record import locked
from mpitrain.testbed.commands import execute
from mpitrain.testbed.image import HERE, content_hash, copy_tree

_DISK_SIZE = "8G"  # sparse: what is not written takes no room
_MODULES = Path("/usr/lib/uml/modules")
_SERVICES = ("testbed-network", "testbed-boot", "testbed-up")
_FAKETIME = "opt/mpitrain-testbed/lib/libfaketime.so.1"


def full_disk(image: Path) -> Path:
    """Where the disk is, or will be. Its name says what it is made of, beyond the image."""
    return image / f"full-{content_hash([Path(__file__), *(HERE / 'files/full').rglob('*')])}.img"


def build_full_image(image: Path, say: Callable[[str], None]) -> None:
    """Make the disk in an image's folder, unless it is there."""
    if not _MODULES.is_dir():
        raise LaunchError(f"there is no {_MODULES}; does this machine's Debian have user-mode-linux (amd64 only)?")
    with locked(image / "lock", f"image {image}", timeout_seconds=120):
        if full_disk(image).exists():
            return
        say(f"building the disk of User-mode Linux nodes, {full_disk(image)} (once; some seconds)")
        with tempfile.TemporaryDirectory(prefix="full-", dir=image) as folder:
            added, whole = Path(folder, "added"), Path(folder, "whole")
            added.mkdir(mode=0o755)
            whole.mkdir()
            copy_tree(HERE / "files/full", added)
            shutil.copytree(_MODULES, added / "usr/lib/modules", symlinks=True)
            (added / _FAKETIME).parent.mkdir(parents=True)
            shutil.copy(image / "nfs" / _FAKETIME, added / _FAKETIME)
            wants = added / "etc/systemd/system/multi-user.target.wants"
            wants.mkdir()
            for service in _SERVICES:
                (wants / f"{service}.service").symlink_to(f"../{service}.service")
            # Mount both layers as one, in a mount namespace that ends with the command.
            script = 'mount -t overlay overlay -o "lowerdir=$1" "$2" && shift 2 && exec "$@"'
            disk = Path(folder, "disk.img")
            execute(
                ["unshare", "--mount", "sh", "-ec", script, "sh", f"{added}:{image / 'root'}", str(whole)]
                + ["mke2fs", "-q", "-t", "ext4", "-J", "size=16", "-d", str(whole), str(disk), _DISK_SIZE],
                timeout_seconds=300,
            )
            disk.rename(full_disk(image))


def write_to_disk(disk: Path, files: dict[str, str]) -> None:
    """Put files on a disk that is not in use."""
    with tempfile.TemporaryDirectory() as folder:
        commands = []
        for number, (path, text) in enumerate(files.items()):
            source = Path(folder, str(number))
            source.write_text(text)
            source.chmod(0o644)
            parent, _, name = path.rpartition("/")
            commands += [f"cd /{parent}", f"rm {name}", f"write {source} {name}"]
        script = Path(folder, "commands")
        script.write_text("\n".join(commands) + "\n")
        execute(["debugfs", "-w", "-f", script, disk], env=os.environ | {"DEBUGFS_PAGER": "__none__"})
