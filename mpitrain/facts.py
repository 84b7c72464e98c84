"""The facts about a host that several commands collect, as plain values that JSON can hold.

`mpitrain run`, `mpitrain check-cluster` and provisioning use them: the text of this module is sent to every host,
before mpitrain is known to be installed there. The agents of both commands import it, and so does the provisioning
module mpitrain_facts, with which Ansible sends it (cluster/playbooks/roles/mpitrain_facts/module_utils). All of them
run it with the system's Python. The job's own Python runs it (`python -c TEXT SCRIPT`) to report what a job would find:
its code, its packages, its MPI. So this module imports only the standard library, and the functions for agents must run
with Python 3.8. They start no process: each agent has its own function that runs a command with a deadline, and passes
it as `run` to those that need one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    # Takes a command, and returns its exit code (other than 0 if there is no such program), stdout and stderr.
    Run = Callable[[list[str]], tuple[int, str, str]]

# For the socket at which ranks register: each host has its own.
OF_SOCKETS = "/tmp"

# The script's folder may hold half a disk.
_MAX_FILES = 2000
_MAX_BYTES = 32 << 20
_MAX_FOLDERS = 2000
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
_FAMILIES = {"Debian": {"debian", "ubuntu"}, "RedHat": {"rhel", "fedora", "centos"}}
_TIME_DAEMONS = ("chrony", "chronyd", "systemd-timesyncd", "ntp", "ntpd", "ntpsec", "openntpd")
_LOGIND = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")


def text(path: str) -> str:
    """Return a file's content; empty if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


# -- for agents and provisioning: the system --------------------------------------------------------------------------


def release() -> dict[str, str]:
    """Return the fields of /etc/os-release by name."""
    return dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text("/etc/os-release"), re.M))


def family() -> str:
    """Return the family of this system, for names that differ: "Debian", "RedHat", or "" for any other."""
    fields = release()
    likes = {fields.get("ID", ""), *fields.get("ID_LIKE", "").split()}
    return next((name for name, members in _FAMILIES.items() if likes & members), "")


def container(run: Run) -> str:
    """Return the kind of container, such as docker; empty on a machine. Linux within Windows is "wsl"."""
    if Path("/.dockerenv").exists():
        return "docker"
    kind = run(["systemd-detect-virt", "--container"])[1].strip()
    return "" if kind == "none" else kind


def time_daemons(run: Run) -> list[str]:
    """Return the active services that set the clock."""
    states = run(["systemctl", "is-active", *_TIME_DAEMONS])[1].split()  # the command fails if any is not active
    return [_TIME_DAEMONS[number] for number, state in enumerate(states) if state == "active"]


def removes_ipc(run: Run) -> bool | None:
    """Return the present value of systemd-logind's RemoveIPC; None if there is none."""
    value = run(["busctl", "get-property", *_LOGIND, "RemoveIPC"])[1].strip()
    return {"b true": True, "b false": False}.get(value)


def nvidia() -> dict[str, Any]:
    """Return the number of NVIDIA "cards" on the PCI bus, and the version of the "driver" that is loaded."""
    cards = [
        card
        for card in Path("/sys/bus/pci/devices").glob("*")
        if text(f"{card}/vendor").strip() == "0x10de" and text(f"{card}/class").startswith("0x03")
    ]
    # NVIDIA's open driver says "Open Kernel Module for x86_64" before its version.
    version = re.search(r"Module\s+(?:for \S+\s+)?(\d+\.[\d.]+)", text("/proc/driver/nvidia/version"))
    return {"cards": len(cards), "driver": version.group(1) if version else ""}


def user_name(uid: int) -> str | None:
    """Return the name of the user with this number. This also asks a directory service, as a login does."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def own_user() -> str:
    """Return the name of this process's user; its number if it has no name, as can happen in a container."""
    return user_name(os.getuid()) or str(os.getuid())


def group_name(gid: int) -> str | None:
    """Return the name of the group with this number."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return None


def mounts(path: str) -> list[dict[str, Any]]:
    """Return the mounts of `path`, the topmost last; if it has none, the mount that contains it. Access none of them.

    systemd's automount lies below the mount that it triggers.
    """
    found: list[dict[str, Any]] = []
    for line in text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        at = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4])
        kind, source, super_options = (right.split(" ", 2) + ["", ""])[:3]
        if at == path.rstrip("/") or path.startswith(at.rstrip("/") + "/"):
            options = [*left.split()[5].split(","), *super_options.split(",")]
            found.append({"path": at, "type": kind, "source": source, "options": options})
    longest = max((len(one["path"]) for one in found), default=0)
    return [one for one in found if len(one["path"]) == longest]


def host_keys() -> list[str]:
    """Return this machine's public keys for ssh, each as its kind and the key."""
    keys = [text(str(path)).split()[:2] for path in sorted(Path("/etc/ssh").glob("ssh_host_*_key.pub"))]
    return [" ".join(key) for key in keys if len(key) == 2]


def sshd_settings(shown: str) -> dict[str, str]:
    """Return the settings in the output of `sshd -T`: values by keyword; for a keyword with several lines, such as
    port, all values."""
    settings: dict[str, str] = {}
    for line in shown.splitlines():
        word, _, value = line.partition(" ")
        settings[word] = f"{settings[word]} {value}" if word in settings else value
    return settings


def gate(loaded: str) -> str:
    """Say what is loaded (of `nft -s list table inet mpitrain`): "closed" as by set-up, "changed", or "open"."""
    return "open" if not loaded else "closed" if loaded == text("/etc/mpitrain/gate.loaded") else "changed"


def local_addresses(links: list[dict[str, Any]], name: str = "") -> list[str]:
    """Return the addresses in the output of `ip -j address`, without prefixes; with a name, IPv4 of that interface."""
    return [
        one["local"]
        for link in links
        for one in link.get("addr_info", [])
        if "local" in one and (not name or (link["ifname"] == name and one.get("family", "inet") == "inet"))
    ]


# -- for agents: the load, the network, the folders of a job ----------------------------------------------------------


def patience(most: float) -> float:
    """Return a factor of 1 to `most` for the deadline of a command: a busy machine is slow."""
    return min(most, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def rdma_devices() -> list[str]:
    """Return the names of the RDMA devices."""
    return sorted(path.name for path in Path("/sys/class").glob("infiniband/*"))


def addresses(link: dict[str, Any]) -> list[str]:
    """Return the addresses of an entry of `ip -j address`, each with the length of its network's prefix."""
    return ["{local}/{prefixlen}".format(**one) for one in link.get("addr_info", []) if "local" in one]


def routes(answers: dict[str, list[dict[str, Any]]], links: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return how this host reaches each peer: its interface, the source address, the gateway, the network.

    A peer without a route has {}. An entry lacks "network" if the source is no address of the interface.

    Args:
        answers: by peer, the output of `ip -j route get ADDRESS`.
        links: the output of `ip -j address`.
    """
    import ipaddress  # not above: the job's Python would take a file of this name beside the script

    networks = {
        (link["ifname"], own.partition("/")[0]): str(ipaddress.ip_interface(own).network)
        for link in links
        for own in addresses(link)
    }
    by_peer: dict[str, dict[str, str]] = {}
    for peer, answer in answers.items():
        by_peer[peer] = {}
        for route in answer[:1]:
            name, source = route.get("dev", ""), route.get("prefsrc", "")
            by_peer[peer] = {"interface": name, "source": source, "gateway": route.get("gateway", "")}
            if (name, source) in networks:
                by_peer[peer]["network"] = networks[name, source]
    return by_peer


def why_no_socket(folder: str) -> str:
    """Return why this user cannot make a socket in `folder`; empty if they can. No file remains there."""
    import socket

    path = os.path.join(folder, f"mpitrain-check-{os.urandom(4).hex()}")  # noqa: PTH118 (bind() takes no Path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(path)
        except OSError as error:
            return error.strerror or str(error)
    os.unlink(path)  # noqa: PTH108
    return ""


def why_no_programs(folder: str) -> str:
    """Return why no program in `folder` can be run; empty if programs can be run."""
    return "it is mounted noexec" if os.statvfs(folder).f_flag & os.ST_NOEXEC else ""


# -- for the Python of a job ------------------------------------------------------------------------------------------


def python_files(root: Path) -> dict[str, str]:
    """Return the hash of every .py file in `root` and below, by relative path; bounded, in a fixed order."""
    hashes: dict[str, str] = {}
    num_bytes = 0
    for num_folders, (folder, folders, names) in enumerate(os.walk(root)):
        if num_folders >= _MAX_FOLDERS:
            break
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            # os.path, because Path.exists() raises for a folder that this user may not enter.
            if not name.startswith(".") and name not in _SKIPPED and not os.path.exists(here / name / "pyvenv.cfg")  # noqa: PTH110
        )
        for name in sorted(name for name in names if name.endswith(".py")):
            try:
                content = (here / name).read_bytes()
            except OSError as error:
                content = str(error.strerror).encode()
            hashes[str((here / name).relative_to(root))] = hashlib.sha256(content).hexdigest()
            num_bytes += len(content)
            if len(hashes) >= _MAX_FILES or num_bytes >= _MAX_BYTES:
                return hashes
    return hashes


def packages(path: list[str]) -> dict[str, str]:
    """Return the version of every installed package, from the folder names that installers write."""
    versions: dict[str, str] = {}
    for folder in path:
        try:
            names = [path.name for path in Path(folder or ".").iterdir()]
        except OSError:
            continue
        for name in names:
            parts = re.fullmatch(r"(.+)-([^-]+)\.dist-info", name)
            if parts:
                versions.setdefault(re.sub(r"[-_.]+", "-", parts[1]).lower(), parts[2])
    return versions


def hidden(path: str, installed: list[str]) -> dict[str, list[str]]:
    """Return the packages that a folder of PYTHONPATH shadows: the folder of each, and its version there, "" if
    unknown.

    `path` is the value of PYTHONPATH, `installed` the folders of the environment's packages.
    """
    copies: dict[str, list[str]] = {}
    for folder in path.split(os.pathsep):
        versions = packages([folder]) if folder else {}
        try:
            names = sorted(os.listdir(folder)) if folder and folder not in installed else []  # noqa: PTH208
        except OSError:
            continue
        for name in names:
            module = name.removesuffix(".py")
            places = [os.path.join(place, one) for place in installed for one in (module, f"{module}.py")]  # noqa: PTH118
            hides = any(map(os.path.exists, places))
            if (
                hides
                and module.isidentifier()
                and not module.startswith("__")
                and (module != name or _is_package(folder, name))
            ):
                copies.setdefault(module, [folder, versions.get(module.replace("_", "-").lower(), "")])
    return copies


def _is_package(folder: str, name: str) -> bool:
    return (Path(folder) / name / "__init__.py").exists()


def interpreter() -> dict[str, Any]:
    """Return version, processor, packages and mpitrain's code of this Python; "mpitrain" is None without mpitrain."""
    spec = importlib.util.find_spec("mpitrain")
    folders = list(spec.submodule_search_locations or []) if spec else []
    code = json.dumps(python_files(Path(folders[0]))) if folders else ""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": packages(sys.path),
        "mpitrain": hashlib.sha256(code.encode()).hexdigest() if code else None,
    }


def files_of(script: Path) -> dict[str, str]:
    """Return the hashes of the script and of the .py files beside and below it. Raises OSError: it cannot be read."""
    own = hashlib.sha256(script.read_bytes()).hexdigest()
    return {**python_files(script.parent), script.name: own}  # its name need not end in .py


def mpi_library() -> str:
    """Load MPI, without starting it, and return the library's own description. A broken library may kill the
    process."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    return str(MPI.Get_library_version()).strip("\0\n ")


def main(script: Path) -> None:
    """Print the facts for `mpitrain run` in two lines, the second with those of MPI: loading a broken MPI may kill the
    process."""
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    copies = hidden(os.environ.get("PYTHONPATH", ""), folders)
    print(json.dumps({**interpreter(), "hidden": copies, "files": files_of(script)}), flush=True)
    try:
        library = mpi_library()
    except Exception as error:
        print(json.dumps({"mpi_error": f"{type(error).__name__}: {error}".splitlines()[0]}), flush=True)
        return
    version = library.splitlines()[0]
    print(json.dumps({"mpi": re.sub(r"\s+", " ", version.split(", package:")[0])}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
