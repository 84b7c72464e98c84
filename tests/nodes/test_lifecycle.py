"""A bed is removed completely: by the command, after an interruption, after the death of the command that made it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jobs import REPOSITORY, clean_environment
from mpitrain.errors import ConfigError, LaunchError
from testbed import Bed, down, find, forget_snapshot, up
from testbed.bed_record import STATE
from testbed.container import Container

from .beds import cli, command, new_name, traces

OTHERS = ("down", "build", "ssh node1", "forget a")
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def start_up_and_wait_for(name: str, path: Path) -> subprocess.Popen[str]:
    """Start `scripts/testbed up 2`, and wait until `path` exists."""
    process = subprocess.Popen(
        command("up", "2", "--name", name),
        cwd=REPOSITORY,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return process


@pytest.mark.parametrize(
    "stage", [*(pytest.param(stage, marks=pytest.mark.nightly) for stage in ("record", "namespace", "disk")), "console"]
)
def test_down_removes_what_a_killed_up_left(image: str, stage: str) -> None:
    name = new_name()
    folder = STATE / "beds" / name
    path = {
        "record": folder / "record.json",
        "namespace": Path("/run/netns", f"mpitrain-{name}"),
        "disk": folder / "node2/upper",
        "console": folder / "node2/console.log",
    }[stage]
    with start_up_and_wait_for(name, path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    assert traces(name) != []
    with pytest.raises(ConfigError, match=r"is not \(yet\) up"):
        find(name)
    down(STATE, name)
    assert traces(name) == []


@pytest.mark.nightly
def test_a_bed_that_a_restart_of_the_machine_has_ended(image: str) -> None:
    with up(1, name=new_name()) as bed:
        subprocess.run(["ip", "netns", "del", bed.record.namespace], check=True, timeout=60)
        with pytest.raises(ConfigError, match=f"was this machine restarted.*testbed down --name {bed.name}"):
            find(bed.name)
    assert traces(bed.name) == []


@pytest.mark.parametrize("found", ["open", "used", "link"])
def test_a_state_folder_that_is_for_something_else(image: str, tmp_path: Path, found: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755 if found == "open" else 0o700)
    if found == "used":
        (folder / "images/holiday").mkdir(parents=True)
    if found == "link":
        folder = tmp_path / "link"
        folder.symlink_to("data")
    before = folder.lstat().st_mode
    done = cli("up", "1", "--name", new_name(), "--state", str(folder))
    assert done.returncode == 2, done.stderr
    assert f"{folder} exists already and is not for test beds" in done.stderr
    assert folder.lstat().st_mode == before
    assert [*folder.rglob("*")] == ([folder / "images", folder / "images/holiday"] if found == "used" else [])


@pytest.mark.nightly
def test_up_takes_the_place_of_what_a_killed_up_left(image: str) -> None:
    name = new_name()
    with start_up_and_wait_for(name, Path("/run/netns", f"mpitrain-{name}-node1")) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    done = cli("up", "1", "--name", name)
    try:
        assert done.returncode == 0, done.stderr
        assert "removing what an interrupted `up` left" in done.stderr
        assert find(name).names == ("node1",)
    finally:
        down(STATE, name)
    assert traces(name) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_an_interrupted_up_cleans_up(image: str, number: signal.Signals) -> None:
    name = new_name()
    with start_up_and_wait_for(name, STATE / "beds" / name / "node1/console.log") as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=300)
    assert (process.returncode, output.splitlines()[-1]) == (130, "scripts/testbed: interrupted")
    assert traces(name) == []


def test_a_node_that_does_not_come_up_is_an_error_with_its_console(image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Container, "boot_seconds", 0.01)
    name = new_name()
    with pytest.raises(
        LaunchError, match=rf"node1 of test bed {name} was not up within 0.01 s. The end of its console"
    ):
        up(1, name=name)
    assert traces(name) == []


@pytest.mark.nightly
def test_two_beds_side_by_side(bed: Bed) -> None:
    with up(1, name=new_name(), delay_microseconds=20_000) as other:
        assert other.record.subnet != bed.record.subnet
        assert other.host_keys()["node1"] != bed.host_keys()["node1"]
        assert other.ssh("node1", "sudo touch /etc/mine").returncode == 0
        assert bed.ssh("node1", "ls /etc/mine").returncode != 0
        ping = ["ping", "-c", "2", "-W", "10"]
        assert other.node_run("node1", [*ping, bed.address("node1")]).returncode != 0  # no way from one to the other
        slow = other.node_run("node1", [*ping, other.record.controller])
        assert slow.returncode == 0
        least_milliseconds = float(slow.stdout.splitlines()[-1].split("=")[1].split("/")[0])
        assert least_milliseconds >= 40.0  # there and back
        listed = cli("status").stdout
        assert f"\n{other.name}: 1 nodes (containers), cables of 20000 us" in f"\n{listed}"
        ambiguous = cli("ssh", "node1", "true")
        assert ambiguous.returncode == 2
        assert "there are several test beds; name one: --name {" in ambiguous.stderr
        with pytest.raises(ConfigError, match=f"there is already a test bed {other.name}"):
            up(1, name=other.name)
    assert traces(other.name) == []
    assert bed.ssh("node1", "true").returncode == 0


@pytest.mark.nightly
def test_snapshot(image: str) -> None:
    name, snapshot = new_name(), new_name()
    with up(2, name=name) as bed:
        bed.ssh("node2", "echo one | sudo tee /etc/first; sudo rm /etc/issue")
        bed.save(snapshot)
        keys, subnet = bed.host_keys(), bed.record.subnet
        assert bed.ssh("node2", "true").returncode == 0  # it continues
    second = new_name()
    try:
        with up(name=name, snapshot=snapshot) as bed:
            assert bed.names == ("node1", "node2")
            assert (bed.host_keys(), bed.record.subnet) == (keys, subnet)
            assert bed.ssh("node2", "cat /etc/first; ls /etc/issue").stdout == "one\n"
            with pytest.raises(ConfigError, match=f"snapshot {snapshot} is in use by test bed {name}"):
                forget_snapshot(STATE, snapshot)
            with pytest.raises(ConfigError, match=f"there is already a snapshot {snapshot}"):
                bed.save(snapshot)
            bed.ssh("node2", "echo two | sudo tee /etc/second; sudo rm /etc/first")
            bed.save(second)  # based on the first one
        with up(name=name, snapshot=second) as bed:
            assert bed.ssh("node2", "cat /etc/second; ls /etc/first").stdout == "two\n"
        with pytest.raises(ConfigError, match=f"snapshot {snapshot} is in use by snapshot {second}"):
            forget_snapshot(STATE, snapshot)
        with pytest.raises(ConfigError, match="is of a fast bed of 2 nodes"):
            up(3, snapshot=snapshot)
    finally:
        for kept in (second, snapshot):
            cli("forget", kept)
    assert not list((STATE / "snapshots").glob(f"*{snapshot}*"))
    assert traces(name) == []


@pytest.mark.parametrize("words", ["up 2", "status", *(pytest.param(one, marks=pytest.mark.nightly) for one in OTHERS)])
def test_an_ordinary_user_is_told_to_use_sudo(words: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    done = subprocess.run(
        [*NOBODY, *command(*words.split())],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done
    assert "a test bed needs root" in done.stderr
    assert "sudo" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up"], "name the number of nodes, as in `sudo scripts/testbed up 4`"),
        (["up", "0"], "number of nodes: 0; it must be 1 to 64"),
        (["up", "2", "--name", "No"], "'No' cannot be the name of a test bed"),
        (["up", "2", "--delay-microseconds", "-1"], "a delay of -1 us; it must be 0 to 1000000"),
        (["up", "--snapshot", "there-is-none"], "there is no snapshot 'there-is-none'"),
        (["down", "--name", "there-is-none"], "there is no test bed 'there-is-none'"),
        (["down", "--all", "--name", "x"], "--all and --name exclude each other; give one"),
    ],
)
def test_wrong_use(words: list[str], message: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("test beds need root")
    done = cli(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
