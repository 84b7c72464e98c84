"""Beds of the tests: with unique names, as a cluster, and what one may have left on this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import REPOSITORY, clean_environment
from mpitrain.errors import LaunchError
from testbed import STATE, Bed, up

# Where a node has its /etc as it was before the set-up, and a line that its owner had in a file there.
BEFORE, OWN_LINE = "/var/lib/etc-before", "192.0.2.7 printer # the user's own line"
SETUP_SECONDS = 3000.0  # a guard against a hang; at a load of 60 it took 1500
_NUMBERS = itertools.count(1)


def new_name() -> str:
    """A name for a bed or a snapshot that no other run of the tests has."""
    return f"t{os.getpid()}-{next(_NUMBERS)}"


@contextlib.contextmanager
def cluster_bed(name: str) -> Iterator[tuple[Bed, str]]:
    """A bed of five, and what the set-up of node1 to node4 as a cluster has printed. node5 is bare, and an outsider."""
    with up(5, name=name) as bed:
        for node in bed.names:
            bed.node_run(node, ["sh", "-c", f"echo {shlex.quote(OWN_LINE)} >>/etc/hosts; cp -a /etc {BEFORE}"])
        lines = bed.inventory.read_text().splitlines(keepends=True)
        bed.inventory.write_text("".join(line for line in lines if not line.startswith("node5 ")))
        skipped = [] if (Path.home() / ".cache/mpitrain/fashion").is_dir() else ["--skip-tags", "examples"]
        line = ["ansible-playbook", "cluster/setup.yml", *skipped]  # a bed cannot download a data set
        done = bed.run(line, timeout_seconds=SETUP_SECONDS, cwd=REPOSITORY)
        assert done.returncode == 0, done.stdout + done.stderr
        yield bed, done.stdout


def checkout_copy(folder: Path) -> Path:
    """A copy of the files that the playbooks use, for a test that changes them."""
    ignored = shutil.ignore_patterns("__pycache__", "log", "hosts")
    for name in ("cluster", "mpitrain", "examples", "scripts"):
        shutil.copytree(REPOSITORY / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("ansible.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


@contextlib.contextmanager
def full_bed(num_nodes: int) -> Iterator[Bed]:
    """Nodes with kernels of their own. The test is skipped if this machine cannot run them."""
    if os.uname().machine != "x86_64" or not Path("/dev/net/tun").exists():
        pytest.skip("User-mode Linux is for x86_64 and needs /dev/net/tun")
    try:
        bed = up(num_nodes, full=True, name=new_name(), say=print)
    except LaunchError as error:
        if "has no room for all registers of this CPU" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
    with bed:
        yield bed


def command(*words: str) -> list[str]:
    """The line of a user's command."""
    return [f"{REPOSITORY}/scripts/testbed", *words]


def cli(*words: str, timeout_seconds: float = 400.0, **options: object) -> subprocess.CompletedProcess[str]:
    """Run `scripts/testbed`, as a user does."""
    return subprocess.run(
        command(*words),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        cwd=REPOSITORY,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def traces(name: str) -> list[str]:
    """Everything on this machine that belongs to a bed."""
    found = [str(path) for path in Path("/run/netns").glob(f"mpitrain-{name}*")]
    found += [str(path) for path in Path("/etc/netns").glob(f"*{name}*")]
    found += [str(path) for path in (STATE / "beds").glob(f"*{name}*")]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if f"/{name}/" in line]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/mpitrain-testbed/{name}")]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"beds/{name}/" in words or f"mpitrain-{name}-" in words:
            found.append(words)
    return found
