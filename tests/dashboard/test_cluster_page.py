"""The cluster's page over HTTP, the last check and measurements that it shows, and what check-cluster keeps for it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_made import AT, INVENTORY, change, keep_check, keep_profile, keep_ways

from check.made_up import seen
from free_ports import free_port
from jobs import HANG_SECONDS, clean_environment
from mpitrain.check import report
from mpitrain.dashboard.cluster import _load
from mpitrain.dashboard.cluster_reports import last_check, measured_ways
from mpitrain.errors import DataError
from mpitrain.state_files import read_state
from serving import Dashboard, dashboard
from watching_live import training

NONE = None


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's state, which is empty; no profile is named."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MPITRAIN_PROFILE", raising=False)
    return tmp_path / "state"


def ways() -> list[dict[str, Any] | None]:
    return [read() for _, read in measured_ways()]


def test_nothing_is_known(state: Path) -> None:
    assert (last_check(), ways()) == (None, [None])


def test_the_last_check(state: Path) -> None:
    keep_check(state)
    found = last_check()
    assert found is not None
    (finding,) = found["findings"]
    assert (finding["id"], finding["verdict"], finding["places"]) == ("AAA01", "fail", "node[2-3]")
    assert (finding["found"], finding["why"]) == ("not mounted", "Ranks write there.")
    assert (found["at"], found["level"], found["skip"]) == (AT, "full", ["NFS01"])
    assert (found["counts"]["fail"], found["counts"]["pass"]) == (1, 0)
    assert found["nodes"] == {
        "node1": {"address": "10.0.0.1", "cores": 8, "memory_bytes": 16000 << 20},
        "node2": {"address": "10.0.0.2", "cores": None, "memory_bytes": None},
        "node3": {"address": "10.0.0.3", "cores": None, "memory_bytes": None},
        "node4": {"address": "10.0.0.4", "cores": 4, "memory_bytes": None},
    }


def test_what_was_measured_between_nodes(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_ways(state)
    monkeypatch.setenv("MPITRAIN_PROFILE", str(keep_profile(tmp_path / "profile.json")))
    of_check, of_profile = ways()
    assert of_check is not None and of_profile is not None
    assert (of_check["measured"], of_check["nodes"]) == (AT, ["node1", "node2", "node3", "node4"])
    assert of_check["bytes_per_second"] == [
        [NONE, 21e6, 31e6, 41e6],
        [NONE, NONE, 32e6, 42e6],
        [13e6, 23e6, NONE, 43e6],
        [14e6, 24e6, 34e6, NONE],
    ]
    assert of_check["latency_us"][2] == [pytest.approx(4.0), pytest.approx(5.0), NONE, pytest.approx(7.0)]
    assert (of_profile["nodes"], of_profile["bytes_per_second"]) == (["a", "b"], [[NONE, 1e8], [5e7, NONE]])
    assert of_profile["latency_us"] == [[NONE, 30.0], [40.0, NONE]]
    old = json.loads((tmp_path / "profile.json").read_text())
    del old["measured"]["link_latency_us"]
    (tmp_path / "profile.json").write_text(json.dumps(old))
    of_profile = ways()[1]
    assert of_profile is not None and of_profile["latency_us"] is None
    keep_profile(tmp_path / "profile.json", link_bytes_per_second=None)
    assert ways()[1] is None, "of one node"


def test_nothing_was_measured() -> None:
    saw = seen(2)
    for rates in ({}, {"ways": {}}, {"ways": {"error": "no answer"}}, {"ways": {"node1 node2": {"error": "x"}}}):
        saw.cluster = rates
        assert report.ways(saw, measured=AT) is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": 2}, "is of version 2"),
        ({"report": []}, "is damaged"),
        ({"report": {"schema": 2}}, "its report has the schema 2; this mpitrain reads 1"),
        ({"level": None}, "is damaged"),
        ({"only": [3]}, "is damaged"),
        ({"machines": {"node1": {"cores": "<b>"}}}, "is damaged"),
        ({"machines": {"node1": {"cores": float("inf")}}}, "is damaged"),
    ],
)
def test_a_report_that_is_damaged(state: Path, fields: dict[str, Any], says: str) -> None:
    path = keep_check(state)
    change(path, **fields)
    with pytest.raises(DataError) as caught:
        last_check()
    assert str(path) in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"nodes": ["node1"]},
        {"nodes": "node"},
        {"nodes": [1, 2, 3, 4]},
        {"latency_us": [[1.0]]},
        {"latency_us": None},
        {"bytes_per_second": [[0.0, "x", 0.0, 0.0]] * 4},
        {"bytes_per_second": [[0.0, float("nan"), 0.0, 0.0]] * 4},
        {"bytes_per_second": [[0.0, -1.0, 0.0, 0.0]] * 4},
        {"measured": "today"},
    ],
)
def test_measurements_that_are_damaged(state: Path, fields: dict[str, Any]) -> None:
    change(keep_ways(state), **fields)
    with pytest.raises(DataError, match="is damaged"):
        ways()


def test_a_large_cluster(state: Path) -> None:
    """A report of 512 nodes has about 40 MiB. Of what has more nodes, the page says why it is not shown."""
    path = keep_ways(state)
    found = ways()[0]
    assert found is not None
    with path.open("ab") as file:
        file.write(b" " * (40 << 20))
    assert ways()[0] == found
    change(path, nodes=[f"n{number}" for number in range(513)])
    with pytest.raises(DataError, match="between 513 nodes is not shown; allowed are at most 512"):
        ways()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": 2}', b"[" * 10**5])
def test_a_profile_that_is_damaged(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    path = tmp_path / "profile"
    monkeypatch.setenv("MPITRAIN_PROFILE", str(path))
    with pytest.raises(DataError, match=r"MPITRAIN_PROFILE names .* and there is no such file"):
        ways()
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        ways()


def test_a_load_of_a_later_version() -> None:
    assert _load(None) is None and _load("busy") is None
    load = {"cores": 2, "busy": None, "name": "<b>", "more": True, "gpus": [{"busy": 0.5, "x": []}, 7]}
    assert _load(load) == {"cores": 2, "gpus": [{"busy": 0.5}, {}]}


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text(INVENTORY)
    return tmp_path / "hosts"


@pytest.fixture
def served(state: Path, tmp_path: Path, inventory: Path) -> Iterator[Dashboard]:
    (tmp_path / "runs").mkdir()
    profile = {"MPITRAIN_PROFILE": str(tmp_path / "profile")}
    with dashboard(tmp_path / "cache", str(tmp_path / "runs"), "-i", str(inventory), env=profile) as made:
        yield made


def hosts_by_name(answer: Any) -> dict[str, dict[str, Any]]:
    return {host["name"]: host for host in answer["hosts"]}


def test_hosts_without_a_job(served: Dashboard, state: Path, tmp_path: Path, inventory: Path) -> None:
    """The files are read anew for each answer; those that cannot be read are named, and the rest is shown."""
    answer = served.get("/api/cluster")
    hosts = hosts_by_name(answer)
    assert [hosts[f"node{number}"]["address"] for number in (1, 2, 3)] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert (answer["check"], answer["ways"], answer["inventory"]) == (None, [], str(inventory))
    (problem,) = answer["problems"]
    assert problem.startswith("MPITRAIN_PROFILE names")
    keep_check(state, observed="<script>window.hacked=1</script>")
    keep_profile(tmp_path / "profile")
    (state / "mpitrain" / report.WAYS_FILE).write_text("{")
    inventory.write_text("node1\n")
    answer = served.get("/api/cluster")
    hosts = hosts_by_name(answer)
    assert (hosts["node1"]["cores"], hosts["node1"]["load"], hosts["node1"]["jobs"]) == (8, None, [])
    assert hosts["node4"]["address"] == "10.0.0.4"
    assert [one["nodes"] for one in answer["ways"]] == [["a", "b"]]
    assert answer["check"]["findings"][0]["found"] == "<script>window.hacked=1</script>"
    assert len(answer["problems"]) == 2 and all(
        any(text in problem for problem in answer["problems"]) for text in ("check-cluster-ways.json", f"{inventory}")
    )
    inventory.unlink()
    os.mkfifo(inventory)
    assert served.get("/api/cluster")["problems"], "a pipe does not hold up the page"


def test_a_host_with_a_job_has_its_load(served: Dashboard, tmp_path: Path) -> None:
    """The agent says it because the dashboard watches the job."""
    host = socket.gethostname()
    folder = tmp_path / "job"
    folder.mkdir()
    with training(folder, 2):

        def is_known(answer: Any) -> bool:
            one = hosts_by_name(answer).get(host)
            return bool(
                one and one["load"] and "busy" in one["load"] and any(job["name"] == "record" for job in one["jobs"])
            )

        one = hosts_by_name(served.wait_for("/api/cluster", is_known))[host]
        assert one["cores"] == os.cpu_count() and 0 <= one["load"]["busy"] <= 1
        assert 0 < one["load"]["memory_used_bytes"] < one["memory_bytes"]
        assert one["ranks"] >= 2
        assert any(served.get(f"/api/runs/{job['id']}")["live"] for job in one["jobs"])


def test_the_stream_of_hosts(served: Dashboard) -> None:
    import http.client

    line = http.client.HTTPConnection("127.0.0.1", served.port, timeout=HANG_SECONDS)
    line.request("GET", "/api/stream?cluster", headers={"Authorization": f"Bearer {served.viewer}"})
    answer = line.getresponse()
    while not (text := answer.readline().decode()).startswith("data: "):
        assert text, "the stream has ended"
    assert {"node1", "node2", "node3"} <= hosts_by_name(json.loads(text[6:])).keys()
    line.close()


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
