"""The conditions that a machine must meet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jobs import REPOSITORY
from mpitrain.errors import LaunchError
from testbed import host
from testbed.bed_record import BedRecord
from testbed.controller import environment


@pytest.mark.parametrize(("limit", "used", "num_nodes"), [(128, 0, 16), (128, 96, 4), (1024, 200, 64)])
def test_inotify_instances_that_suffice(limit: int, used: int, num_nodes: int) -> None:
    assert host.too_few_inotify(limit, used, num_nodes) == ""


def test_too_few_inotify_instances() -> None:
    assert host.too_few_inotify(128, 32, 32) == (
        "fs.inotify.max_user_instances is 128; 32 nodes need 288, with the 32 that are in use. "
        "Allow more: sudo sysctl -w fs.inotify.max_user_instances=1024"
    )
    assert host.too_few_inotify(1024, 600, 64).endswith("max_user_instances=2048")


def test_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_INOTIFY_A_NODE", 1 << 40)
    with pytest.raises(LaunchError, match=r"fs\.inotify\.max_user_instances is \d+; 3 nodes need"):
        host.require_inotify(3)


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="there is no apt-get")
def test_apt_waits_for_another_one_that_reads_the_package_lists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two beds that come up at once on a fresh machine both run `apt-get update`."""
    (tmp_path / "lists/partial").mkdir(parents=True)
    (tmp_path / "Packages").touch()
    (tmp_path / "sources.list").write_text(f"deb [trusted=yes] file:{tmp_path} ./\n")
    settings = {"Dir::State::Lists": tmp_path / "lists", "Dir::Etc::SourceList": tmp_path / "sources.list"}
    settings |= {"Dir::Etc::SourceParts": "/dev/null", "Dir::Cache": tmp_path}
    (tmp_path / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    holds = "file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", f"import fcntl, sys; {holds}", str(tmp_path / "lists/lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        refused = subprocess.run(["apt-get", "update"], capture_output=True, text=True, check=False)
        assert "Could not get lock" in refused.stderr  # else this test shows nothing
        threading.Timer(2, other.stdin.close).start()
        host._apt(["update"])
        assert other.stdin.closed


def test_the_controller_builds_the_checkout_with_the_hatchling_that_is_here(tmp_path: Path) -> None:
    """Without a place from which pip could fetch another."""
    pytest.importorskip("hatchling")
    record = BedRecord(state=tmp_path, name="none", full=False, num_nodes=1, subnet="10.77.250", image="none")
    env = environment(record, os.environ) | {"PIP_FIND_LINKS": str(tmp_path)}
    line = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={tmp_path}", str(REPOSITORY)]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name.partition("-")[0] for path in tmp_path.glob("*.whl")] == ["mpitrain"]
