"""The nodes of a fast bed are like machines from a cloud, and commands run in their network."""

from __future__ import annotations

import pytest

from mpitrain.errors import ConfigError, LaunchError
from testbed import Bed

from .beds import cli


def output(bed: Bed, node: str, line: str) -> str:
    done = bed.ssh(node, line)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nodes_are_bare_machines_of_their_own(bed: Bed) -> None:
    for question in ("hostname", "cat /etc/machine-id", "cat /proc/sys/kernel/random/boot_id", "cat /etc/ssh/*.pub"):
        answers = [output(bed, node, question) for node in bed.names]
        assert all(answers), question
        assert len(set(answers)) == len(answers), question
    assert output(bed, "node2", "hostname") == "node2"
    assert output(bed, "node2", "cat /proc/1/comm") == "systemd"
    assert "\n127.0.1.1\tnode2\n" in output(bed, "node2", "cat /etc/hosts")
    assert output(bed, "node2", "sudo id --user") == "0"
    assert output(bed, "node2", "systemctl is-system-running --wait") == "running"
    assert "ii " not in output(bed, "node2", "dpkg-query --list nfs-common nfs-kernel-server python3-venv || true")
    assert bed.ssh("node2", "getent passwd cluster").returncode != 0
    assert bed.ssh("node1", "sudo date --set=@0").returncode != 0
    # There is no way out.
    assert output(bed, "node1", "ip route") == f"{bed.record.subnet}.0/24 dev eth0 proto kernel scope link src " + (
        bed.address("node1")
    )


def test_what_takes_too_long_on_a_node_is_ended(bed: Bed) -> None:
    with pytest.raises(LaunchError, match=r"node1: did not end within 0\.5 s"):
        bed.node_run("node1", ["sleep", "4321"], timeout_seconds=0.5)
    assert (
        bed.node_run("node1", ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]).stdout.count("sleep 4321") == 0
    )


@pytest.mark.nightly
def test_nodes_meet_over_their_cables(bed: Bed) -> None:
    before = bed.link_bytes("node1")
    serve = "timeout 100 python3 -m http.server 8099 --directory /usr/lib/x86_64-linux-gnu >/dev/null 2>&1 & "
    assert bed.ssh("node1", f"{serve} echo").returncode == 0
    fetch = "import time, urllib.request as u\nfor _ in range(600):\n  try: print(len(u.urlopen('{}').read())); break\n"
    fetch += "  except OSError: time.sleep(0.1)"
    url = f"http://{bed.address('node1')}:8099/libc.so.6"
    done = bed.node_run("node2", ["python3", "-c", fetch.format(url)], timeout_seconds=120)
    assert int(done.stdout) > 1_000_000, done
    assert bed.link_bytes("node1") - before > int(done.stdout)


@pytest.mark.nightly
def test_packages_and_wheels_come_from_the_controller(bed: Bed) -> None:
    assert "tree" in output(bed, "node1", "sudo apt-get -q update && sudo apt-get -qy install tree && command -v tree")
    fetch = "import os, urllib.request as u; print(u.urlopen(os.environ['PIP_FIND_LINKS']).read())"
    listing = bed.run(["python3", "-c", fetch]).stdout
    for wheel in ("mpich-", "mpi4py-", "numpy-", "ml_dtypes-", "threadpoolctl-"):
        assert wheel in listing


def test_host_keys_are_checked_from_the_first_contact(bed: Bed) -> None:
    known_hosts = bed.record.folder / "known_hosts"
    right = known_hosts.read_text()
    assert bed.ssh("node2", "true").returncode == 0
    try:
        known_hosts.write_text(right.splitlines()[0].replace("node1,", "node2,") + "\n")  # another node's key
        done = bed.ssh("node2", "true")
        assert done.returncode == 255
        assert "Host key verification failed" in done.stderr
    finally:
        known_hosts.write_text(right)


@pytest.mark.nightly
def test_ansible_finds_the_nodes_and_the_checkouts_variables(bed: Bed, tmp_path) -> None:
    pytest.importorskip("ansible")
    (tmp_path / "cluster/group_vars").mkdir(parents=True)
    (tmp_path / "cluster/playbooks").mkdir()
    (tmp_path / "cluster/group_vars/all.yml").write_text("colour: green\n")
    (tmp_path / "cluster/setup.yml").write_text("- import_playbook: playbooks/show.yml\n")
    (tmp_path / "cluster/playbooks/show.yml").write_text(
        "- hosts: cluster\n  gather_facts: false\n  become: true\n  tasks:\n"
        "    - command: id --user\n      register: id\n"
        "    - debug:\n        msg: '{{ inventory_hostname }} {{ colour }} {{ id.stdout }}'\n"
    )
    done = bed.run(["ansible-playbook", "cluster/setup.yml"], cwd=tmp_path, timeout_seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for node in bed.names:
        assert f"{node} green 0" in done.stdout


def test_a_command_that_does_not_end_is_ended_with_all_it_started(bed: Bed) -> None:
    with pytest.raises(LaunchError, match=r"did not end within 10 s.*sleep 4711") as raised:
        bed.run(["sh", "-c", "sleep 4711 & echo started; wait"], timeout_seconds=10)
    assert "started" in str(raised.value)
    assert bed.run(["pgrep", "--full", "^sleep 4711"]).returncode == 1


def test_the_command_line(bed: Bed) -> None:
    name = bed.name
    status = cli("status", "--name", name)
    assert status.stdout.startswith(f"{name}: 2 nodes (containers)"), status
    assert f"  node2  {bed.address('node2'):<15}  up\n" in status.stdout
    assert cli("ssh", "--name", name, "node2", "hostname; exit 7").returncode == 7
    done = cli("run", "--name", name, "ssh", "node1", "hostname")
    assert (done.stdout, done.returncode) == ("node1\n", 0), done.stderr
    assert cli("run", "--name", name, "--", "getent", "hosts", "node2").stdout.split() == [
        bed.address("node2"),
        "node2",
    ]
    shown = cli("break", "shape", "node2", "--name", name, "--rate", "1gbit").stdout
    assert "up; broken: shape 1gbit" in shown
    assert bed.faults("node2") == {"shape": "1gbit"}
    assert "broken" not in cli("heal", "all", "--name", name).stdout
    assert bed.faults("node2") == {}


def test_what_does_not_exist(bed: Bed) -> None:
    with pytest.raises(ConfigError, match=r"has no 'node3'; its nodes are node1, node2"):
        bed.kill("node3")
    done = cli("break", "cut", "node9", "--name", bed.name)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no 'node9'" in done.stderr
    for words, message in [
        (["break", "shape", "node1"], "shape needs --rate"),
        (["break", "cut", "node1", "--rate", "1gbit"], "cut takes no --rate"),
        (["break", "shape", "node1", "--rate", "fast"], "'fast' is not a rate"),
        (["break", "drop", "node1", "--ports", "0"], "'0' is not a list of ports"),
        (["break", "mtu", "node1", "--mtu-bytes", "10"], "must be 576 to 9000"),
        (["break", "delay", "node1", "--delay-microseconds", "10"], "scripts/testbed up N --delay-microseconds"),
        (["run"], "name a command, for example"),
    ]:
        done = cli(*words[:1], "--name", bed.name, *words[1:])
        assert done.returncode == 2, done
        assert message in done.stderr
    assert bed.faults("node1") == {}
