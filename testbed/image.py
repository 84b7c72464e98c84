"""What nodes are made from: one bare Debian 12 root, the packages and wheels they may install, and the NFS stand-in.

images/HASH/root         the bare root, as a cloud's: sshd, Python, sudo, a user admin with the controller's key
images/HASH/repository   deb/ with its index for apt, wheels/ for pip; served to the nodes, which have no way out
images/HASH/nfs          a layer over the root that makes NFS work without the kernel's; container nodes only
images/HASH/key          the controller's key
images/HASH/wire         the cable with a delay
images/HASH/full.img     the root as a disk for User-mode Linux; made at the first `up --full`

HASH is over everything that the image is made from, so a changed recipe makes a new image.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from mpitrain.errors import ConfigError, LaunchError
from mpitrain.reading import json_of, read_file
from testbed import processes
from testbed.bed_record import locked
from testbed.processes import execute

HERE = Path(__file__).parent
MIRROR = "deb http://deb.debian.org/debian bookworm main"

_ROOT_PACKAGES = (
    "openssh-server,python3,python3-apt,sudo,systemd-sysv,dbus,udev,kmod,iproute2,iputils-ping,netbase,"
    "ca-certificates,procps,hostname,libnss-myhostname"
)
_PATHS_LEFT_OUT = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*")
# Packages that playbooks and users of a bed may install with apt, with their dependencies.
NODE_PACKAGES = [
    *("acl", "attr", "chrony", "curl", "ethtool", "firewalld", "iperf3", "iptables", "nfs-common", "nfs-kernel-server"),
    *("nftables", "openmpi-bin", "psmisc", "python3-pip", "python3-venv", "rpcbind", "rsync", "strace", "stress-ng"),
    *("tcpdump", "tree", "ufw", "wireguard-go", "wireguard-tools"),
    *("nfs-ganesha", "nfs-ganesha-vfs"),  # for the stand-in itself
]
# No job that takes the lock of apt or uses the network starts by itself on a node.
_MASKED = ("apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer", "systemd-timesyncd.service")
_PYTHON = "3.11"  # Debian 12's
_BUILD_SECONDS = 900.0


def build_image(state: Path, say: Callable[[str], None]) -> str:
    """Make the image unless it is there; returns its name.

    Raises:
        LaunchError: a tool failed; nothing half made stays.
    """
    name = _recipe_hash()
    (state / "images").mkdir(parents=True, exist_ok=True)
    with locked(state / "images" / "lock", "the image", timeout_seconds=_BUILD_SECONDS):
        folder = state / "images" / name
        if folder.exists():
            return name
        for left in (state / "images").glob("new-*"):  # of a build that was killed
            processes.kill(_workshop(left))
            processes.remove(_workshop(left))
            shutil.rmtree(left)
        say(f"building the nodes' image in {folder} (once; about a minute)")
        new = Path(tempfile.mkdtemp(prefix="new-", dir=state / "images"))
        try:
            _build(new, say)
            new.rename(folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        _remove_unused(state, name)
    return name


def _remove_unused(state: Path, newest: str) -> None:
    """Remove the images of older recipes, but for those that a bed or a snapshot stands on."""
    records = [*state.glob("beds/*/record.json"), *state.glob("snapshots/*/snapshot.json")]
    used = {json_of(read_file(path, ConfigError), ConfigError, str(path)).get("image") for path in records}
    for folder in (state / "images").iterdir():
        if folder.is_dir() and folder.name not in (*used, newest):
            shutil.rmtree(folder)


def _build(new: Path, say: Callable[[str], None]) -> None:
    new.chmod(0o755)
    (new / "key").mkdir(mode=0o700)
    execute(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed controller", "-f", new / "key/id_ed25519"])
    say("  Debian 12 (mmdebstrap)")
    _make_root(new)
    say(f"  packages for the nodes, programs in C ({len(NODE_PACKAGES)} packages with what they need)")
    copy_tree(HERE / "files/nfs", new / "nfs")
    (new / "repository/wheels").mkdir(parents=True)
    _work_in(new)
    for path in [new / "root/etc/apt/sources.list", *new.glob("root/etc/apt/sources.list.d/*")]:
        path.unlink(missing_ok=True)  # each node gets its own bed's
    (new / "nfs/usr/sbin/mount.nfs4").unlink(missing_ok=True)
    (new / "nfs/usr/sbin/mount.nfs4").symlink_to("mount.nfs")
    for unit in ("run-rpc_pipefs.mount", "proc-fs-nfsd.mount"):  # there is no kernel behind them
        (new / "nfs/etc/systemd/system" / unit).unlink(missing_ok=True)
        (new / "nfs/etc/systemd/system" / unit).symlink_to("/dev/null")
    say("  wheels (pip download)")
    _download_wheels(new / "repository/wheels")


def _make_root(new: Path) -> None:
    root = new / "root"
    options = [f"--dpkgopt=path-exclude={path}" for path in _PATHS_LEFT_OUT]
    options += ["--dpkgopt=force-unsafe-io", '--aptopt=Acquire::Languages "none"']
    execute(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={_ROOT_PACKAGES}", *options, "bookworm", str(root)]
        + debian_sources(),
        timeout_seconds=_BUILD_SECONDS,
    )
    copy_tree(HERE / "files/root", root)
    (root / "etc/sudoers.d/admin").chmod(0o440)
    execute(["chroot", root, "useradd", "--create-home", "--shell", "/bin/bash", "--uid", "1000", "admin"])
    ssh = root / "home/admin/.ssh"
    ssh.mkdir(mode=0o700)
    shutil.copy(new / "key/id_ed25519.pub", ssh / "authorized_keys")
    execute(["chroot", root, "chown", "-R", "admin:", "/home/admin/.ssh"])
    # Remove what each machine has for itself. Its host keys and its id are made at the first boot.
    for path in [root / "etc/hostname", *root.glob("etc/ssh/ssh_host_*")]:
        path.unlink(missing_ok=True)
    (root / "etc/machine-id").write_text("")
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/resolv.conf").write_text("")
    execute(["chroot", root, "systemctl", "--quiet", "enable", "host-keys.service"])
    execute(["chroot", root, "systemctl", "--quiet", "mask", *_MASKED])


def _work_in(new: Path) -> None:
    """Run workshop.sh in the root; what it changes there is thrown away."""
    command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--as-pid2", "--volatile=overlay"]
    command += ["--directory", str(new / "root"), "--resolv-conf=replace-host", "--timezone=off", "--link-journal=no"]
    command += [f"--bind={new}:/output", f"--bind-ro={HERE}:/sources", "--"]
    command += ["sh", "/sources/workshop.sh", "/sources", "/output", *NODE_PACKAGES]
    group = _workshop(new)
    try:
        execute(processes.in_group(group, command), timeout_seconds=_BUILD_SECONDS)
    finally:
        processes.kill(group)
        processes.remove(group)


def _workshop(new: Path) -> Path:
    """The control group of what works on a new image. No bed can have such a name."""
    return processes.group(f".{new.name}")


def _download_wheels(folder: Path) -> None:
    """The wheels of mpitrain's needs, MPICH among them, for the nodes' Python, by this Python's pip as it is set up."""
    wanted = [requirement.partition(";")[0] for requirement in mpitrain_requirements()]
    wanted += ["hatchling>=1.24,<2", "editables", "pip", "setuptools", "wheel"]
    machine = os.uname().machine
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(36, 16, -1)]  # glibc 2.36 and older
    platforms += [f"--platform=manylinux2014_{machine}"]
    if (
        execute([sys.executable, "-c", "import importlib.util as i; print(i.find_spec('pip') is None)"]).strip()
        == "True"
    ):
        raise ConfigError(
            f"{sys.executable} has no pip, which downloads the nodes' wheels: run {sys.executable} -m ensurepip"
        )
    execute(
        [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", f"--python-version={_PYTHON}"]
        + ["--implementation=cp", "--abi=cp311", "--abi=abi3", "--abi=none", *platforms]
        + ["--dest", folder, *wanted],
        timeout_seconds=_BUILD_SECONDS,
    )


def mpitrain_requirements() -> list[str]:
    """What mpitrain needs on a node, in the versions that its own metadata allows."""
    needs = importlib.metadata.requires("mpitrain") or []
    extra = re.compile(r"""extra\s*==\s*['"](\w+)""")
    return [need for need in needs if (other := extra.search(need)) is None or other[1] == "mpich"]


def debian_sources() -> list[str]:
    """Where Debian's packages come from: as this machine is set up if it is a Debian 12, else Debian's mirror."""
    release = Path("/etc/os-release").read_text()
    if "\nID=debian" in f"\n{release}" and 'VERSION_ID="12"' in release:
        files = [Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d/debian.sources")]
        own = [str(file) for file in files if file.is_file() and "bookworm" in file.read_text()]
        if own:
            return own
    return [MIRROR]


def copy_tree(source: Path, target: Path) -> None:
    """Copy files to the places that their paths name; those that begin with #! can be run."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            copy.chmod(0o755 if copy.read_bytes().startswith(b"#!") else 0o644)


def content_hash(paths: Iterable[Path]) -> str:
    """A short hash over names and contents of files of this package."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(HERE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _recipe_hash() -> str:
    """Over what makes the image; the rest of the package may change without a new one."""
    files = [path for part in ("root", "nfs") for path in (HERE / "files" / part).rglob("*")]
    recipe = content_hash([Path(__file__), *HERE.glob("*.c"), *HERE.glob("*.sh"), *files])
    wanted = json.dumps([recipe, mpitrain_requirements(), debian_sources()])
    return hashlib.sha256(wanted.encode()).hexdigest()[:12]


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
