"""Faults of the matrix: logins, and what a login needs on a node."""

from __future__ import annotations

import subprocess

from faults.cluster.faults_network import EVERY, in_network
from faults.cluster.matrix import Fault
from testbed.bed import Bed

_OURS = "/etc/ssh/sshd_config.d/10-mpitrain.conf"
_SITE = "/etc/ssh/sshd_config.d/60-site.conf"
# Not `reload`, which returns before sshd listens again. A restart returns when sshd listens.
_READ_ANEW = "systemctl restart ssh"
_PYTHON = "/usr/bin/python3"


def _swap_addresses(bed: Bed) -> None:
    """Swap two addresses. A second call swaps them back."""
    before = {node: _own_address(bed, node) for node in ("node2", "node3")}
    for node in before:
        in_network(bed, node, f"ip addr del {before[node]} dev eth0")
    for node, other in (("node2", "node3"), ("node3", "node2")):
        in_network(bed, node, f"ip addr add {before[other]} dev eth0")
    for namespace in (bed.record.namespace, *map(bed.record.node_namespace, bed.names)):
        subprocess.run(["ip", "-n", namespace, "neigh", "flush", "all"], timeout=60, check=True)


def _own_address(bed: Bed, node: str) -> str:
    done = bed.node_run(node, ["sh", "-c", "ip -o -4 addr show dev eth0 | awk '{print $4; exit}'"])
    return done.stdout.strip()


def _python(text: str) -> str:
    return f"mv {_PYTHON} {_PYTHON}.kept && printf '#!/bin/sh\\n{text}\\n' >{_PYTHON} && chmod 755 {_PYTHON}"


_PYTHON_BACK = f"mv -f {_PYTHON}.kept {_PYTHON}"

FAULTS: dict[str, Fault] = {
    "sshd stopped on node3": Fault(
        {"node3": "systemctl stop ssh"},
        {"node3": "systemctl start ssh"},
        {"SSH01": ("fail", "node3")},
        shows=["Connection refused", "systemctl start ssh"],
    ),
    "port 22 of node2 dropped by a firewall": Fault(
        lambda bed: bed.drop("node2", 22),
        lambda bed: bed.undrop("node2"),
        {"SSH01": ("fail", "node2")},
        shows=["no answer within"],
    ),
    "node4 switched off": Fault(
        lambda bed: bed.kill("node4"),
        lambda bed: bed.start("node4"),
        {"SSH01": ("fail", "node4")},
    ),
    "node3 has made a new host key": Fault(
        {
            "node3": "cd /etc/ssh && mkdir kept && mv ssh_host_* kept && "
            "ssh-keygen -q -t ed25519 -N '' -f ssh_host_ed25519_key && systemctl restart ssh"
        },
        {"node3": "cd /etc/ssh && mv kept/* . && rmdir kept && systemctl restart ssh"},
        {"SSH03": ("fail", "node3")},
        shows=["its host key is"],
    ),
    "node2 and node3 have each other's address": Fault(
        _swap_addresses,
        _swap_addresses,
        {"SSH03": ("fail", "node2; node3")},
        shows=["that is the key of node2", "that is the key of node3"],
    ),
    "admin's authorized_keys emptied on node3": Fault(
        {"node3": "cd /home/admin/.ssh && cp -p authorized_keys kept && : >authorized_keys"},
        {"node3": "cd /home/admin/.ssh && cp -p kept authorized_keys && rm kept"},
        {"SSH02": ("fail", "node3")},
    ),
    "sudo of node2 waits for something that does not come": Fault(
        {
            "node2": "cd /usr/bin && mv sudo sudo.kept && printf '#!/bin/sh\\nsleep 90\\n' >sudo && chmod 755 sudo",
        },
        {"node2": "mv -f /usr/bin/sudo.kept /usr/bin/sudo"},
        {"PRB02": ("fail", "node2")},
        shows=["sudo, run by admin, hangs"],
    ),
    "no /usr/bin/python3 on node2": Fault(
        {"node2": f"mv {_PYTHON} {_PYTHON}.kept"},
        {"node2": _PYTHON_BACK},
        {"PRB01": ("fail", "node2")},
        shows=["No such file"],
    ),
    "Python 3.6 on node2": Fault(
        {
            "node2": _python('echo \'{"old": "3.6.8"}\'').replace(
                '\'{"old": "3.6.8"}\'', '"{\\\\"old\\\\": \\\\"3.6.8\\\\"}"'
            )
        },
        {"node2": _PYTHON_BACK},
        {"PRB01": ("fail", "node2")},
        shows=["version 3.6.8"],
    ),
    "/usr/bin/python3 of node2 prints something else": Fault(
        {"node2": _python("yes garbage | head -c 100000")},
        {"node2": _PYTHON_BACK},
        {"PRB01": ("fail", "node2")},
        shows=["garbage"],
    ),
    "an echo at the top of admin's .bashrc on node2": Fault(
        {"node2": "sed -i '1i echo Welcome to node2' /home/admin/.bashrc"},
        {"node2": "sed -i 1d /home/admin/.bashrc"},
        {"SSH05": ("fail", "node2")},
        shows=["Welcome"],
    ),
    "an echo at the top of the shared user's .bashrc on node4": Fault(
        {"node4": "sed -i '1i echo Welcome' /home/cluster/.bashrc"},
        {"node4": "sed -i 1d /home/cluster/.bashrc"},
        {"SSH05": ("fail", "node4")},
        shows=["a login of cluster that runs one command prints 'Welcome'"],
    ),
    "node4's own key taken out of its own authorized_keys": Fault(
        {"node4": "sed -i '/@node4$/d' /etc/ssh/mpitrain/authorized_keys"},
        {},
        {"SSH09": ("fail", "node4")},
        repair="ssh",
        shows=["Permission denied"],
    ),
    "MaxStartups 1 in our file on node3": Fault(
        {"node3": f"sed -i 's/^MaxStartups.*/MaxStartups 1/' {_OURS} && {_READ_ANEW}"},
        {},
        {"SSH06": ("fail", "node3")},
        repair="ssh",
        shows=["MaxStartups 1"],
    ),
    # Debian 12's sshd takes the last value of MaxStartups, so its command line does not change that of a file.
    "sshd of node4 has read MaxStartups 2, which its files no longer say": Fault(
        {
            "node4": f"cp -p {_OURS} /root/ours && sed -i 's/^MaxStartups.*/MaxStartups 2/' {_OURS} && {_READ_ANEW} && "
            f"mv /root/ours {_OURS}"
        },
        {"node4": _READ_ANEW},
        {"SSH06": ("fail", "node4")},
        shows=["MaxStartups 2 of the sshd that runs; its files say 100:30:400"],
    ),
    "PasswordAuthentication yes in our file on node2": Fault(
        {"node2": f"sed -i 's/PasswordAuthentication no/PasswordAuthentication yes/' {_OURS} && {_READ_ANEW}"},
        {},
        {"SSH07": ("warn", "node2")},
        repair="ssh",
    ),
    "PasswordAuthentication yes for the shared user in a file that sshd reads before ours, on node2": Fault(
        {
            "node2": "printf 'Match User cluster\\n PasswordAuthentication yes\\n' >/etc/ssh/sshd_config.d/05-site.conf"
            f" && {_READ_ANEW}"
        },
        {"node2": f"rm /etc/ssh/sshd_config.d/05-site.conf && {_READ_ANEW}"},
        {"SSH07": ("warn", "node2")},
        shows=["by /etc/ssh/sshd_config.d/05-site.conf"],
    ),
    "set-up with its default, which leaves the passwords of other users on": Fault(
        dict.fromkeys(EVERY, f"sed -i '/^PasswordAuthentication no/d' {_OURS} && {_READ_ANEW}"),
        {},
        {"SSH10": ("warn", "node[1-4]")},
        repair="ssh",
        shows=["sshd offers passwords to admin, root, others (passwordauthentication yes)"],
    ),
    "passwords off on all nodes, but for admin on node3": Fault(
        {
            **dict.fromkeys(EVERY, f"sed -i '1i PasswordAuthentication no' {_OURS} && {_READ_ANEW}"),
            "node3": f"sed -i '1i PasswordAuthentication no' {_OURS} && printf 'Match User admin\n"
            f"PasswordAuthentication yes\n' >{_SITE} && {_READ_ANEW}",
        },
        dict.fromkeys(EVERY, f"rm -f {_SITE}; sed -i 1d {_OURS}; {_READ_ANEW}"),
        {"SSH10": ("warn", "node3")},
        shows=[f"sshd offers passwords to admin (passwordauthentication yes, by {_SITE})"],
    ),
    "the shared user's key has mode 0644 on node2": Fault(
        {"node2": "chmod 644 /etc/ssh/mpitrain/id_ed25519"},
        {},
        {"SSH08": ("fail", "node2")},
        level="full",
        repair="ssh",
        shows=["0644"],
    ),
    "node2's key taken out of authorized_keys on node3": Fault(
        {"node3": "sed -i /@node2$/d /etc/ssh/mpitrain/authorized_keys"},
        {},
        {"SSH04": ("fail", "node2 -> node3")},
        level="full",
        repair="ssh",
        shows=["Permission denied"],
    ),
    "the head's key taken out of authorized_keys on node3": Fault(
        {"node3": "sed -i /@node1$/d /etc/ssh/mpitrain/authorized_keys"},
        {},
        {"SSH11": ("fail", "node1 -> node3")},
        repair="ssh",
        shows=["Permission denied"],
    ),
    "/etc/ssh/mpitrain writable by all on node2": Fault(
        {"node2": "chmod 777 /etc/ssh/mpitrain"},
        {},
        {"SSH08": ("fail", "node2")},
        repair="ssh",
        shows=["other users than root may write to /etc/ssh/mpitrain"],
    ),
    "node4 taken out of known_hosts on node2": Fault(
        {"node2": "sed -i /node4/d /etc/ssh/mpitrain/known_hosts"},
        {},
        {"SSH04": ("fail", "node2 -> node4")},
        level="full",
        repair="ssh",
        shows=["verification failed"],
    ),
}
