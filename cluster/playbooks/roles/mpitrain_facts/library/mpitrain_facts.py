#!/usr/bin/python
"""The facts about a node on which preflight and the roles decide, gathered in one login. Changes nothing.

What mpitrain's own commands ask too is in mpitrain/facts.py, which Ansible sends along: see ../module_utils.
"""

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

from ansible.module_utils import mpitrain_host as host
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
LATE, ABSENT = -1, -2


def run(command: list, given: str = "", seconds: float = CHILD_SECONDS, **variables: str) -> tuple:
    """Exit code, stdout and stderr of a command; the code is ABSENT or LATE if there is none."""
    try:
        done = subprocess.run(
            command,
            input=given.encode(),
            capture_output=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", **variables},
            cwd="/",
            timeout=seconds,
            check=False,
        )
    except OSError:
        return ABSENT, "", ""
    except subprocess.TimeoutExpired:
        return LATE, "", ""
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def output(*command: str, given: str = "") -> str:
    """What a command prints; empty if the command is missing, fails or takes too long."""
    code, out, _ = run(list(command), given)
    return out if code == 0 else ""


def ip(*arguments: str) -> list:
    """What `ip -j` says; nothing if it fails."""
    return json.loads(output("ip", "-j", *arguments) or "[]")


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
    release = host.release()
    return {
        "os": release.get("PRETTY_NAME") or release.get("ID") or "an unknown system",
        "family": host.family(),
        "architecture": platform.machine(),
        "hostname": socket.gethostname().split(".")[0],
        "container": bool(host.container(run)),
        "systemd": Path("/run/systemd/system").is_dir(),
        "cloud_init": Path("/etc/cloud/cloud.cfg.d").is_dir(),
        "selinux_enforcing": host.text("/sys/fs/selinux/enforce").strip() == "1",
        "addresses": host.local_addresses(ip("address")),
    }


def account(user: str, uid: int, gid: int) -> dict:
    """The owners of the user's name, uid and gid. getpwnam also asks a directory service, as a login does."""

    def ask(function, field):
        try:
            return getattr(function(user), field)
        except KeyError:
            return None

    return {
        "user_uid": ask(pwd.getpwnam, "pw_uid"),
        "user_gid": ask(pwd.getpwnam, "pw_gid"),
        "uid_user": host.user_name(uid),
        "group_gid": ask(grp.getgrnam, "gr_gid"),
        "gid_group": host.group_name(gid),
        "processes": [
            line.strip()
            for line in output("ps", "-o", "pid=,args=", "-u", str(uid)).splitlines()
            if not re.search(r"(systemd --user|\(sd-pam\))", line)
        ],
    }


def share(path: str) -> dict:
    """What is at the shared folder's path. A network mount is never touched, because it may hang."""
    layers = [one for one in host.mounts(path) if one["path"] == path]
    facts = {"kind": "missing", "type": "", "source": "", "owner": None, "empty": True, "free_mib": None}
    if layers:
        top = layers[-1]
        facts |= {"kind": "mount", "type": top["type"], "source": top["source"], "empty": False}
        if top["type"].startswith(("nfs", "fuse.nfs", "autofs")):
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
    version = re.search(r"OpenSSH_(\d+)\.(\d+)", run(["ssh", "-V"])[2])
    include = r"^\s*Include\s+.*/etc/ssh/%s/\*\.conf"
    unit = "ssh" if output("systemctl", "cat", "ssh.service") else "sshd"
    return {
        "host_keys": host.host_keys(),
        # Computed from the private key. An incomplete private key gives no public key, and the role makes a new pair.
        "public_key": " ".join(output("ssh-keygen", "-y", "-P", "", "-f", private).split()[:2]),
        "openssh": [int(part) for part in version.groups()] if version else [0, 0],
        "sshd_includes": bool(re.search(include % "sshd_config.d", host.text("/etc/ssh/sshd_config"), re.M | re.I)),
        "ssh_includes": bool(re.search(include % "ssh_config.d", host.text("/etc/ssh/ssh_config"), re.M | re.I)),
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
        r"^# BEGIN mpitrain cluster$.*?^# END mpitrain cluster$", "", host.text("/etc/hosts"), flags=re.M | re.S
    ).splitlines()


def sources(peers: list) -> dict:
    """The address from which this node reaches each other; empty if there is no route."""
    routes = host.routes({address: ip("route", "get", address) for address in peers}, [])
    return {address: route.get("source", "") for address, route in routes.items()}


def environment(venv: Path, user: str, mpiexec: str, mounted: bool) -> dict:
    """What the environment's own note says that it holds, whether it works, and whether others' files are there."""
    if mounted:
        return {"runtime": "", "runtime_damaged": False, "venv_foreign": False}
    noted = note(venv / ".mpitrain")
    # Without a Python this is no environment, whatever its note says. Set-up makes a new one.
    held = noted if os.access(venv / "bin/python", os.X_OK) else ""
    is_own = bool(noted) or host.text("/etc/mpitrain/venv").strip() == str(venv)
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
    variables = {"OMP_NUM_THREADS": "1"}
    if mpiexec not in ("", "/usr/bin/mpiexec"):  # as launch.j2 of mpitrain_runtime does
        variables["MPI4PY_LIBMPI"] = str(Path(mpiexec).parent.parent / "lib/libmpi.so")
    code, _, _ = run(command, seconds=LOAD_SECONDS, **variables)
    return code not in (0, LATE, ABSENT)


def has_wireguard() -> bool:
    """Whether the kernel has WireGuard: loaded, built in or as a module. If not, a program in user space is used."""
    return Path("/sys/module/wireguard").is_dir() or bool(output("modprobe", "--dry-run", "-v", "wireguard"))


def tunnel() -> dict:
    """The state of the tunnel and of the gate around it, and the routes and ports that could conflict with them."""
    kept = host.text("/etc/wireguard/mpitrain.d/1-key").rpartition("PrivateKey = ")[2]
    key = output("wg", "pubkey", given=kept).strip() if kept else ""
    written = re.findall(r"^PublicKey = (\S+)$", host.text("/etc/wireguard/mpitrain.conf"), re.M)
    runs = output("wg", "show", "mpitrain", "public-key").split() + output("wg", "show", "mpitrain", "peers").split()
    return {
        "tunnel": Path("/etc/wireguard/mpitrain.d").is_dir(),
        "tunnel_key": key,
        # The running tunnel has other keys than the files: somebody changed them, or a run was interrupted.
        "tunnel_behind": sorted(runs) != sorted([key, *written]),
        "tunnel_addresses": host.local_addresses(ip("address"), "mpitrain"),
        "tunnel_possible": has_wireguard() or Path("/dev/net/tun").exists(),
        "gate": Path("/etc/mpitrain/gate.nft").is_file(),
        "gate_closed": host.gate(output("nft", "-s", "list", "table", "inet", "mpitrain")) == "closed",
        "routes": [
            route["dst"]
            for route in ip("route", "show", "table", "all")
            if route.get("dev") not in ("mpitrain", "lo") and route.get("type", "unicast") == "unicast"
        ],
        "sshd_ports": sorted({int(port) for port in host.sshd_settings(output("sshd", "-T")).get("port", "").split()}),
    }


def packages(wanted: dict, in_user_space: bool) -> dict:
    """The missing packages, among them the program for the tunnel if the kernel has no WireGuard."""
    if shutil.which("dpkg-query"):
        manager = "apt"
        shown = run(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n"])[1]
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
    nvidia = host.nvidia()
    code, python, _ = run([given["python"], "-c", VERSION])
    place = share(given["share"])
    # On a client the mount may hang. Only the server's facts about the folder are used.
    mounted = place["kind"] == "mount" and place["free_mib"] is None
    facts = {
        **system(),
        **account(given["user"], given["uid"], given["gid"]),
        **ssh(),
        **firewall(),
        **tunnel(),
        **packages(given["packages"], in_user_space=given["wireguard"] and not has_wireguard()),
        # The temporary files of this run on the shared folder have this in their names.
        "run": uuid.uuid4().hex[:12],
        "share": place,
        "python": {0: python.strip(), LATE: "silent"}.get(code, ""),
        "mpiexec_found": not given["mpiexec"] or os.access(given["mpiexec"], os.X_OK),
        "time_daemons": host.time_daemons(run),
        "installed_by_us": host.text("/etc/mpitrain/packages").split(),
        "made_by_us": host.text("/etc/mpitrain/account").split(),
        "hostname_before": host.text("/etc/mpitrain/hostname").strip(),
        **environment(Path(given["venv"]), given["user"], given["mpiexec"], mounted),
        "examples": not mounted and os.path.lexists(f"{given['share']}/examples"),
        "hosts_lines": hosts_lines(),
        "sources": sources(given["peers"]),
        "exports_behind": newer("/etc/exports.d/mpitrain.exports", "/var/lib/nfs/etab"),
        "removes_ipc": host.removes_ipc(run) is True,
        "nvidia_cards": nvidia["cards"],
        "nvidia_driver": nvidia["driver"],
        "logind_active": output("systemctl", "is-active", "systemd-logind.service").strip() == "active",
    }
    module.exit_json(changed=False, ansible_facts={"mpitrain": facts})


def newer(path: str, than: str) -> bool:
    """Whether a file was written after another."""
    return Path(path).exists() and Path(than).exists() and Path(path).stat().st_mtime > Path(than).stat().st_mtime


if __name__ == "__main__":
    main()
