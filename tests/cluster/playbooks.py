"""Run the playbooks on a bed from a test, and look at the result on its nodes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from jobs import REPOSITORY
from nodes.beds import BEFORE
from testbed import Bed

SETUP = "cluster/setup.yml"
TEARDOWN = "cluster/teardown.yml"
USER = "cluster"
SHARE = "/home/cluster/nfs"
FASHION = Path.home() / ".cache/mpitrain/fashion"

# Printed as JSON: every path under /etc, or a copy of it, with its kind, mode, owner and content.
_TREE = """
import hashlib, json, os, stat, sys
# Debian's packages leave the system users that they make behind when they go: a number must never be given twice.
ACCOUNTS = ("/etc/passwd", "/etc/shadow", "/etc/group", "/etc/gshadow")
SYSTEM_USERS = (b"_rpc:", b"statd:", b"_chrony:")
tree = {}
for folder, names, files in os.walk(sys.argv[1]):
    for name in names + files:
        there = os.path.join(folder, name)
        path = "/etc" + there[len(sys.argv[1]):]
        info = os.lstat(there)
        if stat.S_ISLNK(info.st_mode):
            what = os.readlink(there)
        elif stat.S_ISREG(info.st_mode):
            lines = open(there, "rb").read().split(b"\\n")
            kept = [line for line in lines if path not in ACCOUNTS or not line.startswith(SYSTEM_USERS)]
            what = hashlib.sha256(b"\\n".join(kept)).hexdigest()
        else:
            what = ""
        tree[path] = [oct(info.st_mode), info.st_uid, info.st_gid, what]
print(json.dumps(tree))
"""
# Files that package and account tools rewrite each time.
_NOT_OURS = {
    **dict.fromkeys(
        ("/etc/passwd-", "/etc/shadow-", "/etc/group-", "/etc/gshadow-", "/etc/subuid-", "/etc/subgid-"),
        "the account tools' copy of the file as it was before the last change",
    ),
    "/etc/ld.so.cache": "ldconfig's index, written anew at each installation",
    "/etc/.pwd.lock": "the account tools' lock, made at its first use and never removed",
}


def log_of(stdout: str, folder: Path) -> str:
    """Ansible's full output of a run, from the log file that the short output names. Paths are relative to `folder`."""
    name = re.search(r"^All output goes to (\S+)", stdout, re.M)
    assert name is not None, stdout
    return (folder / name[1]).read_text()


def recap(log: str) -> dict[str, dict[str, int]]:
    """The counts in Ansible's last lines, by node."""
    return {
        name: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", rest)}
        for name, rest in re.findall(r"^(\S+)\s+: (ok=.*)$", log.rpartition("PLAY RECAP")[2], re.M)
    }


class Run:
    """An ended run of ansible-playbook: its exit code, its output, its log, and the counts of its last lines."""

    def __init__(self, done: subprocess.CompletedProcess[str], checkout: Path) -> None:
        self.code = done.returncode
        self.stdout = done.stdout
        self.output = done.stdout + done.stderr
        self.log = log_of(done.stdout, checkout)
        # Join the lines, because Ansible breaks long messages.
        self.text = re.sub(r"\s+", " ", self.output)
        self.counts = recap(self.log)

    def changed(self) -> dict[str, int]:
        """Number of changed tasks by node, without the nodes that have none."""
        return {name: counts["changed"] for name, counts in self.counts.items() if counts["changed"]}


def playbook(bed: Bed, *arguments: str, inventory: Path | None = None, timeout_seconds: float = 1200) -> Run:
    """Run ansible-playbook on the bed's controller from the root of the checkout, with the bed's inventory or another.

    A set-up leaves the examples out where their data set is not here: a bed has no Internet access.
    """
    skipped = [] if FASHION.is_dir() or arguments[0] != SETUP else ["--skip-tags", "examples"]
    line = ["ansible-playbook", "-i", str(inventory or bed.inventory), *arguments, *skipped]
    return Run(bed.run(line, timeout_seconds=timeout_seconds, cwd=REPOSITORY), REPOSITORY)


def inventory_of(bed: Bed, path: Path, names: tuple[str, ...]) -> Path:
    """Write an inventory of some of the bed's nodes. The first one is the head."""
    lines = [f"{name} ansible_host={bed.address(name)} ansible_user=admin" for name in names]
    groups = ["[head]", lines[0], "", "[workers]", *lines[1:], "", "[cluster:children]", "head", "workers", ""]
    path.write_text("\n".join(groups))
    return path


def etc(bed: Bed, node: str, folder: str = "/etc") -> dict[str, list[object]]:
    """The tree under /etc on a node, or under a copy of it, without files that other tools rewrite."""
    done = bed.node_run(node, ["/usr/bin/python3", "-c", _TREE, folder], timeout_seconds=400)
    assert done.returncode == 0, done.stderr
    return {path: what for path, what in json.loads(done.stdout).items() if path not in _NOT_OURS}


def changed_files(bed: Bed, node: str) -> set[str]:
    """The paths under /etc on a node of `bed` that are not as they were before the set-up."""
    return difference(etc(bed, node, BEFORE), etc(bed, node))


def difference(before: dict[str, list[object]], after: dict[str, list[object]]) -> set[str]:
    """The paths that differ between two trees."""
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def root(bed: Bed, node: str, script: str, timeout_seconds: float = 400) -> subprocess.CompletedProcess[str]:
    """Run a shell script as root on a node."""
    return bed.node_run(node, ["bash", "-c", script], timeout_seconds=timeout_seconds)


def shared_user(bed: Bed, node: str, script: str, timeout_seconds: float = 400) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a login shell of the shared user, as `sudo -iu cluster` gives one."""
    return bed.node_run(node, ["su", "-", USER, "-c", script], timeout_seconds=timeout_seconds)
