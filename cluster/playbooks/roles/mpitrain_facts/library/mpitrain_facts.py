#!/usr/bin/python
"""The facts about a node on which preflight and the roles decide, gathered in one login. Changes nothing."""

from __future__ import annotations

import grp
import json
import os
import platform
import pwd
import re
import shutil
import socket
import stat
import subprocess
import time
import uuid
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: mpitrain_facts
short_description: What mpitrain's playbooks need to know about a node
description: Returns the fact C(mpitrain). Changes nothing; each command it runs has a deadline.
options:
  user: {description: name of the shared user, type: str, required: true}
  uid: {description: its number, type: int, required: true}
  gid: {description: number of its group, type: int, required: true}
  share: {description: path of the shared folder, type: path, required: true}
  venv: {description: path of the virtual environment in it, type: path, required: true}
  python: {description: the Python of that environment, type: path, required: true}
  mpiexec: {description: an mpiexec that must be there, type: path, default: ''}
  packages: {description: "by package manager, the packages that must be there", type: dict, required: true}
  wireguard: {description: whether there is to be a tunnel, type: bool, default: false}
  peers: {description: addresses of all nodes, type: list, elements: str, required: true}
author: mpitrain
"""

CHILD_SECONDS = 8
VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
LOAD_SECONDS = 30
LOGIND = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
TIME_DAEMONS = ("chrony", "chronyd", "systemd-timesyncd", "ntp", "ntpd", "ntpsec", "openntpd")


def output(*command: str, merge: bool = False, late: str = "", given: str = "") -> str:
    """What a command prints; empty if the command is missing or fails, `late` if it takes too long."""
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    try:
        done = subprocess.run(
            command,
            input=given.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge else subprocess.DEVNULL,
            env={"PATH": path, "LC_ALL": "C"},
            timeout=CHILD_SECONDS,
            check=False,
        )
    except OSError:
        return ""
    except subprocess.TimeoutExpired:
        return late
    return done.stdout.decode(errors="replace") if merge or done.returncode == 0 else ""


def text(path: str) -> str:
    """A file's content; empty if the file cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def note(path: Path) -> str:
    """The content of a small file in a folder of the shared user, who may have put a link or a pipe there."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(file, "rb") as opened:
        regular = stat.S_ISREG(os.fstat(file).st_mode)
        return opened.read(2**16).decode(errors="replace") if regular else ""


def system() -> dict:
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text("/etc/os-release"), re.M))
    likes = {release.get("ID", ""), *release.get("ID_LIKE", "").split()}
    family = "Debian" if likes & {"debian", "ubuntu"} else "RedHat" if likes & {"rhel", "fedora", "centos"} else ""
    return {
        "os": release.get("PRETTY_NAME") or release.get("ID") or "an unknown system",
        "family": family,
        "architecture": platform.machine(),
        "hostname": socket.gethostname().split(".")[0],
        "container": bool(output("systemd-detect-virt", "--container")),
        "systemd": Path("/run/systemd/system").is_dir(),
        "cloud_init": Path("/etc/cloud/cloud.cfg.d").is_dir(),
        "selinux_enforcing": text("/sys/fs/selinux/enforce").strip() == "1",
        "addresses": [
            info["local"] for link in json.loads(output("ip", "-j", "address") or "[]") for info in link["addr_info"]
        ],
    }


def account(user: str, uid: int, gid: int) -> dict:
    """The owners of the user's name, uid and gid. getpwnam also asks a directory service, as a login does."""

    def ask(function, key, field):
        try:
            return getattr(function(key), field)
        except KeyError:
            return None

    return {
        "user_uid": ask(pwd.getpwnam, user, "pw_uid"),
        "user_gid": ask(pwd.getpwnam, user, "pw_gid"),
        "uid_user": ask(pwd.getpwuid, uid, "pw_name"),
        "group_gid": ask(grp.getgrnam, user, "gr_gid"),
        "gid_group": ask(grp.getgrgid, gid, "gr_name"),
        "processes": [
            line.strip()
            for line in output("ps", "-o", "pid=,args=", "-u", str(uid)).splitlines()
            if not re.search(r"(systemd --user|\(sd-pam\))", line)
        ],
    }


def share(path: str) -> dict:
    """What is at the share's path. A network mount is never touched, because it may hang."""
    mounts = [line.split() for line in text("/proc/self/mountinfo").splitlines()]
    layers = [(m[m.index("-") + 1], m[m.index("-") + 2]) for m in mounts if m[4].replace("\\040", " ") == path]
    facts = {"kind": "missing", "type": "", "source": "", "owner": None, "empty": True, "free_mib": None}
    if layers:
        # The last mount is on top. systemd's automount is below the mount that it makes.
        facts |= {"kind": "mount", "type": layers[-1][0], "source": layers[-1][1], "empty": False}
        if layers[-1][0].startswith(("nfs", "fuse.nfs", "autofs")):
            return facts
    elif Path(path).is_symlink():
        return facts | {"kind": "symbolic link", "source": str(Path(path).readlink()), "empty": False}
    elif Path(path).is_dir():
        facts |= {"kind": "folder"}
    elif Path(path).exists():
        return facts | {"kind": "file", "empty": False}
    parent = Path(path)
    while not parent.is_dir():
        parent = parent.parent
    room = os.statvfs(parent)
    facts["free_mib"] = room.f_bavail * room.f_frsize // 2**20
    if parent == Path(path):
        facts |= {"owner": parent.stat().st_uid, "empty": not any(parent.iterdir())}
    return facts


def ssh() -> dict:
    private = "/etc/ssh/mpitrain/id_ed25519"
    version = re.search(r"OpenSSH_(\d+)\.(\d+)", output("ssh", "-V", merge=True))
    keys = [text(str(path)).split()[:2] for path in sorted(Path("/etc/ssh").glob("ssh_host_*_key.pub"))]
    include = r"^\s*Include\s+.*/etc/ssh/%s/\*\.conf"
    unit = "ssh" if output("systemctl", "cat", "ssh.service") else "sshd"
    return {
        "host_keys": [" ".join(key) for key in keys if len(key) == 2],
        # Computed from the private key. An incomplete private key gives no public key, and the role makes a new pair.
        "public_key": " ".join(output("ssh-keygen", "-y", "-P", "", "-f", private).split()[:2]),
        "openssh": [int(part) for part in version.groups()] if version else [0, 0],
        "sshd_includes": bool(re.search(include % "sshd_config.d", text("/etc/ssh/sshd_config"), re.M | re.I)),
        "ssh_includes": bool(re.search(include % "ssh_config.d", text("/etc/ssh/ssh_config"), re.M | re.I)),
        "ssh_unit": unit,
        "sshd_behind": is_behind(f"{unit}.service", "/etc/ssh/sshd_config.d/10-mpitrain.conf"),
    }


def is_behind(unit: str, path: str) -> bool:
    """Whether a file is newer than the service's last start or reload: a run was interrupted between the two."""
    since = output("systemctl", "show", unit, "--property=StateChangeTimestampMonotonic", "--value").strip()
    if not Path(path).exists() or not since.isdigit():
        return False
    age_seconds = time.clock_gettime(time.CLOCK_MONOTONIC) - int(since) / 1e6
    return Path(path).stat().st_mtime > time.time() - age_seconds


def firewall() -> dict:
    """The active firewall, the addresses that it lets in, and those among them that set-up made it trust."""
    if re.search(r"^Status: active", output("ufw", "status"), re.M):
        added = output("ufw", "show", "added")
        let_in = re.findall(r"^ufw allow from (\S+)(?: comment .*)?$", added, re.M)
        trusted = re.findall(r"^ufw allow from (\S+) comment 'mpitrain'$", added, re.M)
        return {"firewall": "ufw", "let_in": let_in, "trusted": trusted}
    if output("firewall-cmd", "--state").strip() == "running":
        trusted = output("firewall-cmd", "--zone=trusted", "--list-sources").split()
        return {"firewall": "firewalld", "let_in": trusted, "trusted": []}
    closed = re.search(r"hook input [^;]*;\s*policy drop", output("nft", "list", "ruleset"))
    return {"firewall": "own rules" if closed else "", "let_in": [], "trusted": []}


def hosts_lines() -> list[str]:
    """The lines of /etc/hosts that set-up did not write. The first line with a name gives the address."""
    return re.sub(
        r"^# BEGIN mpitrain cluster$.*?^# END mpitrain cluster$", "", text("/etc/hosts"), flags=re.M | re.S
    ).splitlines()


def source(address: str) -> str:
    """The address from which this node reaches another; empty if there is no route."""
    routes = json.loads(output("ip", "-j", "route", "get", address) or "[]")
    return routes[0].get("prefsrc", "") if routes else ""


def environment(venv: Path, user: str, mpiexec: str, mounted: bool) -> dict:
    """What the environment's own note says that it holds, whether it works, and whether others' files are there."""
    if mounted:
        return {"runtime": "", "runtime_damaged": False, "venv_foreign": False}
    noted = note(venv / ".mpitrain")
    # Without a Python this is no environment, whatever its note says. Set-up makes a new one.
    held = noted if os.access(venv / "bin/python", os.X_OK) else ""
    is_own = bool(noted) or text("/etc/mpitrain/venv").strip() == str(venv)
    there = venv.is_symlink() or venv.is_file() or (venv.is_dir() and any(venv.iterdir()))
    return {
        "runtime": held,
        "runtime_damaged": bool(held) and damaged(venv, user, mpiexec),
        "venv_foreign": there and not is_own,
    }


def damaged(venv: Path, user: str, mpiexec: str) -> bool:
    """Whether Python fails to load what set-up installed. If it gives no answer in time, that counts as no damage.

    The shared user runs it, because the files belong to that user: root must not run them.
    """
    load = "import mpi4py, numpy; mpi4py.rc.initialize = False; from mpi4py import MPI"
    command = ["runuser", "-u", user, "--", f"{venv}/bin/python", "-c", load]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    if mpiexec not in ("", "/usr/bin/mpiexec"):  # as launch.j2 of mpitrain_runtime does
        environment["MPI4PY_LIBMPI"] = str(Path(mpiexec).parent.parent / "lib/libmpi.so")
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            cwd="/",
            timeout=LOAD_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode != 0


def gpu() -> dict:
    """NVIDIA cards on the PCI bus, and the version of the driver that is loaded."""
    cards = [
        card
        for card in Path("/sys/bus/pci/devices").glob("*")
        if text(f"{card}/vendor").strip() == "0x10de" and text(f"{card}/class").startswith("0x03")
    ]
    version = re.search(r"Module\s+(\d+\.[\d.]+)", text("/proc/driver/nvidia/version"))
    return {"nvidia_cards": len(cards), "nvidia_driver": version.group(1) if version else ""}


def has_wireguard() -> bool:
    """Whether the kernel has WireGuard: loaded, built in or as a module. If not, a program in user space is used."""
    return Path("/sys/module/wireguard").is_dir() or bool(output("modprobe", "--dry-run", "-v", "wireguard"))


def tunnel() -> dict:
    """The state of the tunnel and of the gate around it, and the routes and ports that could conflict with them."""
    kept = text("/etc/wireguard/mpitrain.d/1-key").rpartition("PrivateKey = ")[2]
    key = output("wg", "pubkey", given=kept).strip() if kept else ""
    written = re.findall(r"^PublicKey = (\S+)$", text("/etc/wireguard/mpitrain.conf"), re.M)
    runs = output("wg", "show", "mpitrain", "public-key").split() + output("wg", "show", "mpitrain", "peers").split()
    links = json.loads(output("ip", "-j", "-4", "address", "show", "dev", "mpitrain") or "[]")
    return {
        "tunnel": Path("/etc/wireguard/mpitrain.d").is_dir(),
        "tunnel_key": key,
        # The running tunnel has other keys than the files: somebody changed them, or a run was interrupted.
        "tunnel_behind": sorted(runs) != sorted([key, *written]),
        "tunnel_addresses": [info["local"] for link in links for info in link.get("addr_info", [])],
        "tunnel_possible": has_wireguard() or Path("/dev/net/tun").exists(),
        "gate": Path("/etc/mpitrain/gate.nft").is_file(),
        "gate_closed": bool(loaded := output("nft", "-s", "list", "table", "inet", "mpitrain"))
        and loaded == text("/etc/mpitrain/gate.loaded"),
        "routes": [
            route["dst"]
            for route in json.loads(output("ip", "-j", "route", "show", "table", "all") or "[]")
            if route.get("dev") not in ("mpitrain", "lo") and route.get("type", "unicast") == "unicast"
        ],
        "sshd_ports": sorted({int(port) for port in re.findall(r"^port (\d+)$", output("sshd", "-T"), re.M)}),
    }


def packages(wanted: dict, in_user_space: bool) -> dict:
    """The missing packages, among them the program for the tunnel if the kernel has no WireGuard."""
    if shutil.which("dpkg-query"):
        manager = "apt"
        shown = output("dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", merge=True)
        present = set(re.findall(r"^installed (\S+)$", shown, re.M))
    else:
        manager = "dnf"
        present = set(output("rpm", "-qa", "--queryformat", "%{NAME}\n").split())
    wanted = wanted.get(manager, []) + (["wireguard-go"] if in_user_space and manager == "apt" else [])
    return {"packages_missing": [name for name in wanted if name not in present]}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "user": {"type": "str", "required": True},
            "uid": {"type": "int", "required": True},
            "gid": {"type": "int", "required": True},
            "share": {"type": "path", "required": True},
            "venv": {"type": "path", "required": True},
            "python": {"type": "path", "required": True},
            "mpiexec": {"type": "path", "default": ""},
            "packages": {"type": "dict", "required": True},
            "wireguard": {"type": "bool", "default": False},
            "peers": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    given = module.params
    active = output("systemctl", "is-active", *TIME_DAEMONS, merge=True).split()
    place = share(given["share"])
    # On a client the mount may hang. Only the server's facts about the folder are used.
    mounted = place["kind"] == "mount" and place["free_mib"] is None
    facts = {
        **system(),
        **account(given["user"], given["uid"], given["gid"]),
        **ssh(),
        **firewall(),
        **gpu(),
        **tunnel(),
        **packages(given["packages"], in_user_space=given["wireguard"] and not has_wireguard()),
        # The temporary files of this run on the share have this in their names.
        "run": uuid.uuid4().hex[:12],
        "share": place,
        "python": output(given["python"], "-c", VERSION, late="silent").strip(),
        "mpiexec_found": not given["mpiexec"] or os.access(given["mpiexec"], os.X_OK),
        "time_daemons": [TIME_DAEMONS[number] for number, state in enumerate(active) if state == "active"],
        "installed_by_us": text("/etc/mpitrain/packages").split(),
        "made_by_us": text("/etc/mpitrain/account").split(),
        "hostname_before": text("/etc/mpitrain/hostname").strip(),
        **environment(Path(given["venv"]), given["user"], given["mpiexec"], mounted),
        "examples": not mounted and os.path.lexists(f"{given['share']}/examples"),
        "hosts_lines": hosts_lines(),
        "sources": {address: source(address) for address in given["peers"]},
        "exports_behind": newer("/etc/exports.d/mpitrain.exports", "/var/lib/nfs/etab"),
        "removes_ipc": output("busctl", "get-property", *LOGIND, "RemoveIPC").strip() == "b true",
        "logind_active": output("systemctl", "is-active", "systemd-logind.service").strip() == "active",
    }
    module.exit_json(changed=False, ansible_facts={"mpitrain": facts})


def newer(path: str, than: str) -> bool:
    """Whether a file was written after another."""
    return Path(path).exists() and Path(than).exists() and Path(path).stat().st_mtime > Path(than).stat().st_mtime


if __name__ == "__main__":
    main()
