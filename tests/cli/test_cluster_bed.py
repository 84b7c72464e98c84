"""`mpitrain cluster` with real machines: sshd, keys, and small playbooks on a test bed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_operator import Operator

from testbed import Bed, up

QUESTION = "[yes/no/fingerprint]"

pytestmark = pytest.mark.timeout(1500)  # some tests wait for a dead node


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """Three bare machines."""
    if not Path(sys.executable).with_name("ansible-playbook").exists():
        pytest.skip("Ansible is not installed: pip install 'mpitrain[cluster]'")
    with up(3, name=f"cluster{os.getpid()}") as made:
        yield made


@pytest.fixture
def operator(bed: Bed, tmp_path: Path) -> Iterator[Operator]:
    yield Operator(bed, tmp_path)
    for name in bed.names:
        bed.heal(name)
        bed.node_run(name, ["rm", "-f", "/etc/nodes", "/etc/refuse", "/etc/break"])


def test_trust_asks_and_adds(operator: Operator) -> None:
    """The commands use only the file that the ssh configuration of the project names, not the operator's own."""
    home = Path("~/.ssh/known_hosts").expanduser()
    of_home = home.read_bytes() if home.exists() else None
    operator.init()
    answers = [(operator.fingerprint("node1"), ""), (QUESTION, "what\n"), ("Please answer", ""), (QUESTION, "yes\n")]
    done = operator("trust", typing=[*answers, (QUESTION, f"{operator.fingerprint('node2')}\n")])
    assert done.returncode == 0, done
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in done.stdout
    assert f"added to {operator.known_hosts}; the login works" in done.stdout
    assert operator.knows("node1") and operator.knows("node2") and not operator.knows("node3")
    assert operator.known_hosts.stat().st_mode & 0o777 == 0o600
    assert (
        operator.bed.address("node1") not in operator.known_hosts.read_text()
    )  # the names are hashed, as the ssh configuration asks
    before = operator.known_hosts.read_text()
    again = operator("trust")
    assert (again.returncode, again.stdout.count("already known")) == (0, 2), again
    assert operator.known_hosts.read_text() == before
    assert (home.read_bytes() if home.exists() else None) == of_home


def test_a_refusal_adds_nothing(operator: Operator) -> None:
    operator.init()
    done = operator("trust", "node2")  # without a terminal
    assert done.returncode == 1, done
    assert f"--fingerprints node2={operator.fingerprint('node2')}" in done.stdout
    assert not operator.known_hosts.exists()
    other = "SHA256:" + 43 * "x"
    done = operator("trust", typing=[(QUESTION, "no\n"), (QUESTION, f"{other}\n")])
    assert done.returncode == 1, done
    assert done.stdout.count("not added") == 2
    assert "That is another fingerprint" in done.stdout
    done = operator("trust", typing=[(QUESTION, "yes\n"), (QUESTION, "\x03")])
    assert (done.returncode, "stopped at a question" in done.stdout) == (1, True), done
    assert operator.knows("node1") and not operator.knows("node2")


def test_fingerprints_from_options_and_a_file(operator: Operator) -> None:
    operator.init()
    wrong = "SHA256:" + 43 * "x"
    operator.known_hosts.write_text("# no end of line")
    done = operator(
        "trust", "--fingerprints", f"node1={operator.fingerprint('node1')}", "--fingerprints", f"node2={wrong}"
    )
    assert done.returncode == 1, done
    assert f"WRONG KEY. It shows ssh-ed25519 {operator.fingerprint('node2')}" in done.stdout
    assert operator.knows("node1") and not operator.knows("node2")
    (operator.folder / "keys").write_text(
        f"{operator.bed.address('node2')} {operator.fingerprint('node2')} # by phone\n"
    )
    done = operator("trust", "--fingerprints", "keys")
    assert done.returncode == 0, done
    assert operator.knows("node2")
    done = operator("trust", "--fingerprints", f"node2={wrong}")  # node2 is known, but the option names another key
    assert (done.returncode, "WRONG KEY" in done.stdout) == (1, True), done


@pytest.mark.nightly
def test_a_changed_key_is_refused(operator: Operator) -> None:
    operator.init()
    operator.trust_all()
    before, old = operator.known_hosts.read_text(), operator.fingerprint("node2")
    folder = "/etc/ssh"
    keep = f"mkdir /root/keys && mv {folder}/ssh_host_* /root/keys && ssh-keygen -A && systemctl restart ssh"
    back = f"rm {folder}/ssh_host_* && mv /root/keys/* {folder} && rmdir /root/keys && systemctl restart ssh"
    assert operator.bed.node_run("node2", ["sh", "-ec", keep]).returncode == 0
    try:
        new = operator.fingerprint("node2")
        done = operator("trust", "--fingerprints", f"node2={new}")
        assert done.returncode == 1, done
        assert "THE KEY HAS CHANGED" in done.stdout
        assert f"known is {old}\n    it shows {new}" in done.stdout
        assert operator.known_hosts.read_text() == before
        run = operator("setup")
        assert (run.returncode, "-> look at its key: mpitrain cluster trust node2" in run.stderr) == (1, True), run
        forget = next(line for line in done.stdout.splitlines() if "ssh-keygen -R" in line)
        subprocess.run(forget, shell=True, check=True, capture_output=True)
        done = operator("trust", "--fingerprints", f"node2={new}")
        assert (done.returncode, operator.knows("node2")) == (0, True), done
    finally:
        assert operator.bed.node_run("node2", ["sh", "-ec", back]).returncode == 0


@pytest.mark.nightly
def test_trust_of_a_node_that_is_down_and_of_one_that_refuses_the_login(operator: Operator) -> None:
    operator.init()
    hosts = operator.folder / "cluster/hosts"
    hosts.write_text(hosts.read_text().replace("ansible_user=admin", "ansible_user=nobody", 1))
    operator.bed.cut("node2")
    done = operator("trust", "--fingerprints", f"node1={operator.fingerprint('node1')}")
    assert done.returncode == 1, done
    assert f"node2 ({operator.bed.address('node2')}): no key, because ssh got no answer: ssh: connect to" in done.stdout
    assert "The login with a key does not work yet: nobody@" in done.stdout
    assert len(operator.known_hosts.read_text().splitlines()) == 1


def test_set_up_add_remove_and_teardown(operator: Operator) -> None:
    operator.init()
    operator.trust_all()
    done = operator("setup")
    assert (done.returncode, "2 nodes, 2 changes" in done.stdout) == (0, True), done
    done = operator("setup")
    assert (done.returncode, "2 nodes, 0 changes" in done.stdout) == (0, True), done

    third = f"node3={operator.bed.address('node3')}"
    done = operator("add", third, "--user", "admin", "--fingerprints", f"node3={operator.fingerprint('node3')}")
    assert done.returncode == 0, done
    assert operator.nodes_of("node1") == operator.nodes_of("node3") == "node1 node2 node3"

    done = operator("remove", "node2", "--dry-run")
    assert (done.returncode, operator.names) == (0, ["node1", "node2", "node3"]), done
    done = operator("remove", "node2", typing=[("Take node2 out", "yes\n")])
    assert done.returncode == 0, done
    assert "$ ansible-playbook cluster/teardown.yml --limit node2 -e confirm=yes" in done.stdout
    assert "$ ansible-playbook cluster/setup.yml --tags hosts,ssh,firewall,nfs,wireguard" in done.stdout
    assert operator.nodes_of("node1") == operator.nodes_of("node3") == "node1 node3"
    assert operator.nodes_of("node2") is None
    assert operator.names == ["node1", "node3"]

    operator.bed.kill("node3")
    done = operator("remove", "node3", "--yes")
    assert done.returncode == 1, done
    assert "-> check that node3 is on" in done.stderr
    assert "mpitrain cluster remove node3 --offline" in done.stderr
    assert operator.names == ["node1", "node3"]
    done = operator("remove", "node3", "--yes", "--offline")
    operator.bed.start("node3")
    assert done.returncode == 0, done
    assert "teardown.yml" not in done.stdout
    assert operator.nodes_of("node1") == "node1"

    done = operator("teardown", "--yes")
    assert (done.returncode, operator.nodes_of("node1")) == (0, None), done
    assert "cluster/hosts stays, and ssh still knows the nodes" in done.stdout
    assert operator.names == ["node1"]


@pytest.mark.nightly
def test_an_addition_that_changed_nothing_is_taken_back(operator: Operator) -> None:
    operator.init()
    operator.trust_all()
    before = (operator.folder / "cluster/hosts").read_text()
    third = ("add", f"node3={operator.bed.address('node3')}", "--user", "admin")

    done = operator(*third)  # nobody says whether the key of node3 is right
    assert (done.returncode, "not every new node is trusted" in done.stderr) == (1, True), done
    assert (operator.folder / "cluster/hosts").read_text() == before

    operator.bed.node_run("node3", ["touch", "/etc/refuse"])
    trusted = (*third, "--fingerprints", f"node3={operator.fingerprint('node3')}")
    done = operator(*trusted)
    assert done.returncode == 1, done
    assert "node3: Refuse what does not fit\n    node3: /etc/refuse is there; remove it" in done.stderr
    assert "is as it was before; no machine was changed" in done.stderr
    assert (operator.folder / "cluster/hosts").read_text() == before
    assert operator.nodes_of("node1") is None

    operator.bed.node_run("node3", ["sh", "-c", "rm /etc/refuse; touch /etc/break"])
    done = operator(*trusted, "--dry-run")
    assert (operator.folder / "cluster/hosts").read_text() == before
    done = operator(*trusted)
    assert done.returncode == 1, done
    assert "node3 stays in" in done.stderr
    assert operator.names == ["node1", "node2", "node3"]
    operator.bed.node_run("node3", ["rm", "/etc/break"])
    done = operator("setup")  # the next run repairs node3
    assert done.returncode == 0, done


@pytest.mark.nightly
def test_sudo_wants_a_password(operator: Operator) -> None:
    """The operator gives no password, a wrong one and the right one. The first two runs change no other node."""
    operator.init()
    operator.trust_all()
    protect = (
        "echo admin:secret | chpasswd; cp /etc/sudoers.d/* /root/; rm /etc/sudoers.d/*; echo 'admin ALL=(ALL) ALL' > "
    )
    assert operator.bed.node_run("node2", ["sh", "-ec", f"{protect}/etc/sudoers.d/asks"]).returncode == 0
    try:
        done = operator("setup")
        assert (done.returncode, "-> sudo on node2 asks for a password: add --ask-become-pass" in done.stderr) == (
            1,
            True,
        ), done
        done = operator("setup", "--ask-become-pass", typing=[("BECOME password: ", "wrong\n")])
        assert (done.returncode, "-> enter the right password" in done.stdout) == (1, True), done
        done = operator("setup", "--ask-become-pass", typing=[("BECOME password: ", "secret\n")])
        assert done.returncode == 0, done
        assert operator.nodes_of("node2") == "node1 node2"
    finally:
        back = (
            "rm /etc/sudoers.d/asks; cd /root; for f in *; do [ -f $f ] && mv $f /etc/sudoers.d/; done; passwd -d admin"
        )
        operator.bed.node_run("node2", ["sh", "-c", back])
