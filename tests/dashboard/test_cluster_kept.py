"""What `mpitrain check-cluster` keeps for the cluster's page, and what happens where it cannot be kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from free_ports import free_port
from jobs import HANG_SECONDS, clean_environment
from mpitrain.check import report
from mpitrain.dashboard.cluster_reports import last_check
from mpitrain.state_files import read_state


def nobody_listens() -> str:
    """An inventory of a node at which no sshd listens."""
    line_of_node = f"node1 ansible_host=127.0.0.1 ansible_port={free_port()}"
    return f"[head]\n{line_of_node}\n[workers]\n[cluster:children]\nhead\nworkers\n"


# Such as in a container: there is no HOME, and the user has no entry.
HOMELESS = """
import json, os, pathlib, pwd, sys
def no_entry(uid):
    raise KeyError(uid)
pwd.getpwuid = no_entry
"""


def homeless(code: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment({"USER": "nobody"})
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    line = [sys.executable, "-c", HOMELESS + code]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def test_a_dashboard_without_a_home_folder(tmp_path: Path) -> None:
    """The page says so, and has the rest."""
    inventory = tmp_path / "hosts"
    inventory.write_text(nobody_listens())
    code = "from mpitrain.dashboard.cluster import ClusterView\n"
    done = homeless(code + f"print(json.dumps(ClusterView(None, pathlib.Path({str(inventory)!r})).known()))")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["inventory"] == str(inventory)
    assert answer["problems"] and all("Set XDG_STATE_HOME" in problem for problem in answer["problems"])


def test_no_dashboard_without_a_folder_for_its_index(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="needs Starlette and uvicorn: pip install 'mpitrain[dashboard]'")
    words = ["dashboard", "--port", "0", str(tmp_path)]
    done = homeless(f"from mpitrain.cli import main\nsys.exit(main({words!r}))")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "has no entry with a home folder. Set XDG_CACHE_HOME to a folder of yours" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_cluster_without_a_home_folder(tmp_path: Path) -> None:
    """The report is printed, and a line says that it is not kept."""
    pytest.importorskip("fabric", reason="needs the packages for clusters: pip install 'mpitrain[cluster]'")
    (tmp_path / "hosts").write_text(nobody_listens())
    words = ["check-cluster", "-i", str(tmp_path / "hosts"), "--level", "quick", "--json"]
    done = homeless(f"from mpitrain.cli import main\nsys.exit(main({words!r}))")
    assert done.returncode == 1 and json.loads(done.stdout)["schema"] == 1, done.stderr
    assert "mpitrain check-cluster: " in done.stderr and "Set XDG_STATE_HOME" in done.stderr


def test_check_cluster_keeps_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node at which no sshd listens. A check that cannot be kept is made all the same."""
    pytest.importorskip("fabric", reason="needs the packages for clusters: pip install 'mpitrain[cluster]'")
    (tmp_path / "hosts").write_text(nobody_listens())
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    line = [sys.executable, "-m", "mpitrain", "check-cluster", "-i", "hosts", "--level", "quick", "--json"]
    environment = clean_environment()

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )

    done = check()
    assert (done.returncode, done.stderr) == (1, ""), done.stderr
    kept = read_state(state / "mpitrain" / report.REPORT_FILE, 1, 1 << 20)
    assert kept is not None
    assert kept["report"] == json.loads(done.stdout)
    assert (kept["level"], kept["only"], kept["machines"]) == ("quick", [], {})
    found = last_check()
    assert found is not None and found["nodes"]["node1"]["address"] == "127.0.0.1"
    assert any(one["verdict"] == "fail" and one["remedy"] for one in found["findings"])
    (state / "mpitrain" / report.REPORT_FILE).unlink()
    (state / "mpitrain").rmdir()
    (state / "mpitrain").touch()
    done = check()
    assert done.returncode == 1 and json.loads(done.stdout)["schema"] == 1
    assert "cannot be written, so `mpitrain dashboard` does not show this result" in done.stderr
