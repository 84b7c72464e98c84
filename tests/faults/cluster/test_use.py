"""`mpitrain check-cluster` as people and programs use it: Ctrl-C, repair, baseline, other formats and logins."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults.cluster.faults_network import EVERY
from faults.cluster.faults_speed import limit, no_limit
from faults.cluster.matrix import (
    ON_THE_SHARE,
    OURS,
    apply,
    assert_that_nothing_stays,
    check,
    check_process,
    findings,
)
from jobs import REPOSITORY
from testbed.bed import Bed
from testbed.processes import wait_until

pytestmark = [pytest.mark.timeout(3000), pytest.mark.nightly]

# Send Ctrl-C when a file appears.
INTERRUPTED = """
import pathlib, signal, subprocess, sys, time
check = subprocess.Popen(["mpitrain", "check-cluster", *sys.argv[2:]])
while not pathlib.Path(sys.argv[1]).exists() and check.poll() is None:
    time.sleep(0.02)
check.send_signal(signal.SIGINT)
sys.exit(check.wait())
"""


def say(bed: Bed, *words: str, timeout_seconds: float = 1200.0, **env: str) -> tuple[int, str, str]:
    """Run the command as a person does. Return its exit code, stdout and stderr."""
    done = bed.run(["mpitrain", "check-cluster", *words], timeout_seconds=timeout_seconds, cwd=REPOSITORY, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_only_some_nodes_and_some_checks(bed: Bed) -> None:
    code, document = check(bed, "--hosts", "node1,node3", "--only", "PRB01")
    assert code == 0
    assert list(document["nodes"]) == ["node1", "node3"]
    assert findings(document) == {}
    there = [one for one in document["results"] if one["where"] == ["node3"]]
    assert [one["id"] for one in there] == ["SSH01", "SSH03", "SSH02", "PRB01"]
    assert {one["verdict"] for one in there[1:]} == {"pass"}


def test_one_dead_node(bed: Bed) -> None:
    """The node costs its deadline once and is the only cause. Everything else is checked on the other nodes."""
    bed.kill("node3")
    try:
        code, document = check(bed, "--level", "quick")
        assert code == 1
        assert findings(document) == {"SSH01": ("fail", "node3")}
        elsewhere = [one for one in document["results"] if one["where"] == ["node2"]]
        assert len(elsewhere) > 10
        # SSH01 may report a slow login. SSH10 reports what set-up does not change.
        assert {one["verdict"] for one in elsewhere if one["id"] not in ("SSH01", "SSH10")} <= {"pass", "skip"}
        there = [one for one in document["results"] if one["where"] == ["node3"]]
        # The node was asked once: INV01 and INV02 look only at this machine.
        assert {one["id"] for one in there if one["verdict"] != "blocked"} == {"INV01", "INV02", "SSH01"}
        code, out, _ = say(bed, "--level", "quick", "--nagios")
        assert code == 2
        assert out.startswith("MPITRAIN CRITICAL - SSH01 on node3: ")
        assert len(out.splitlines()) == 1
    finally:
        bed.start("node3")


def interrupt(bed: Bed, sign: Path, begun: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run the check. Send it a Ctrl-C when a command on node1 prints something; `sign` is a file that will appear."""
    assert wait_until(lambda: not bed.node_run("node1", begun).stdout, timeout_seconds=120)  # the file of another check
    with ThreadPoolExecutor(1) as pool:
        command = ["python", "-c", INTERRUPTED, str(sign), *options]
        check_ = pool.submit(bed.run, command, timeout_seconds=600, cwd=REPOSITORY)
        try:
            while not check_.done() and not bed.node_run("node1", begun).stdout:
                time.sleep(0.02)
        finally:
            sign.touch()
        return check_.result()


def test_ctrl_c(bed: Bed, tmp_path: Path) -> None:
    """The check prints the findings that it has, ends with code 130, and leaves nothing on any node."""
    bed.freeze("node4")  # so that the check takes long enough
    try:
        done = interrupt(bed, tmp_path / "now", ["bash", "-c", OURS], "--json")
    finally:
        bed.thaw("node4")
    assert done.returncode == 130, done.stderr
    document = json.loads(done.stdout)
    assert document["interrupted"]
    assert "Traceback" not in done.stderr
    assert_that_nothing_stays(bed, OURS)


@pytest.mark.parametrize(("name", "file", "rate"), [("NFS04", "/token", "64kbit"), ("PRF04", "/large", "20mbit")])
def test_ctrl_c_leaves_nothing_on_the_share(bed: Bed, tmp_path: Path, name: str, file: str, rate: str) -> None:
    """Ctrl-C comes while a file is there. The agents remove the file, because nothing else does after Ctrl-C."""
    limit(bed, "node2", "dport 2049 0xffff", rate, "1600")  # so that the check takes long enough
    try:
        done = interrupt(bed, tmp_path / "now", ["bash", "-c", ON_THE_SHARE.format(file)], "--only", name)
        assert done.returncode == 130, done.stdout
    finally:
        no_limit(bed, "node2")
    assert_that_nothing_stays(bed, ON_THE_SHARE.format(""))


def test_fix(bed: Bed) -> None:
    """The check shows the set-up that repairs the fault, then runs it. The second check has no finding."""
    apply(bed, {"node3": "rm /etc/ssh/mpitrain/authorized_keys"})
    code, out, error = say(bed, "--only", "SSH04", "--fix", "--yes")
    assert code == 0, out + error
    assert "SSH04" in out
    assert "$ ansible-playbook cluster/setup.yml --tags ssh --limit " in error
    assert "0 failed" in out.splitlines()[-1] or "passed" in out.splitlines()[-1]


def test_a_baseline_says_what_has_changed(bed: Bed, tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    code, _, error = say(bed, "--level", "quick", "--save-baseline", str(path))
    assert code == 0, error
    code, document = check(bed, "--only", "DRF01", "--baseline", str(path))
    assert (code, findings(document)) == (0, {})
    bed.mtu("node2", 1400)
    try:
        code, document = check(bed, "--only", "DRF01", "--baseline", str(path))
        assert findings(document)["DRF01"] == ("warn", "node2")
        (drift,) = [one for one in document["findings"] if one["id"] == "DRF01"]
        assert "1400" in drift["found"] and "1500" in drift["allowed"]
        assert check_process(bed, "--only", "DRF01", "--baseline", str(path), "--strict").returncode == 1
    finally:
        bed.heal("node2")


def test_nodes_named_by_their_addresses(bed: Bed) -> None:
    """Nodes may also have names of ssh's configuration. The check does not ask for the names of an inventory."""
    addresses = [bed.address(name) for name in ("node1", "node2")]
    wanted = "SSH01,PRB01,NAM01,NAM02,NAM03,NET01"
    done = check_process(bed, "--hosts", ",".join(addresses), "--only", wanted, env={"ANSIBLE_INVENTORY": ""})
    found = json.loads(done.stdout)
    assert (done.returncode, findings(found)) == (0, {}), found["findings"]
    assert list(found["nodes"]) == addresses


def test_a_locked_key_that_ssh_agent_holds(bed: Bed, tmp_path: Path) -> None:
    inventory = bed.inventory.read_text()
    key = re.findall(r"ansible_ssh_private_key_file=(\S+)", inventory)[0]
    known = re.findall(r"UserKnownHostsFile=(\S+)", inventory)[0]
    locked, path = tmp_path / "key", tmp_path / "hosts"
    shutil.copy(key, locked)
    options = f"-F /dev/null -o IdentitiesOnly=yes -o UserKnownHostsFile={known}"
    lines = re.sub(r" ansible_ssh_\S+=('[^']*'|\S+)", "", inventory)
    path.write_text(
        f"{lines}\n[all:vars]\nansible_ssh_private_key_file={locked}\nansible_ssh_common_args='{options}'\n"
    )
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout is not None
            agent.stdout.readline()
            socket = {"SSH_AUTH_SOCK": str(tmp_path / "agent")}
            subprocess.run(["ssh-add", "-q", locked], env={**os.environ, **socket}, check=True)
            subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", locked], check=True)
            code, document = check(bed, "-i", str(path), "--only", "PRB02", env=socket)
            assert (code, findings(document)) == (0, {}), document["findings"]
        finally:
            agent.terminate()
    code, document = check(bed, "-i", str(path), "--only", "PRB02", env={"SSH_AUTH_SOCK": ""})
    assert findings(document) == {"SSH02": ("fail", "node[1-4]")}
    assert "has a passphrase, and ssh-agent does not hold it" in document["findings"][0]["found"]


def test_a_login_that_is_the_shared_users_own(bed: Bed, tmp_path: Path) -> None:
    """As on a head where nobody may use sudo. Checks that need root are skipped with a reason; nothing fails."""
    allow = "install -d -m 700 -o cluster -g cluster ~cluster/.ssh && install -m 600 -o cluster -g cluster "
    allow += "~admin/.ssh/authorized_keys ~cluster/.ssh/"
    apply(bed, dict.fromkeys(EVERY, allow))
    path = tmp_path / "hosts"
    path.write_text(bed.inventory.read_text().replace("ansible_user=admin", "ansible_user=cluster"))
    try:
        code, document = check(bed, "--level", "full", "-i", str(path))
        assert (code, findings(document)) == (0, {}), document["findings"]
        skipped = [one for one in document["findings"] if one["verdict"] == "skip"]
        assert any("sudo" in one["found"] for one in skipped)
    finally:
        apply(bed, dict.fromkeys(EVERY, "rm -r ~cluster/.ssh"))
