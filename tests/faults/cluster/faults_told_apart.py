"""Faults of the matrix that look like other faults. The finding names the true cause and its repair."""

from __future__ import annotations

import ipaddress

from faults.cluster.faults_network import in_network
from faults.cluster.faults_share import UNDO_BASHRC, in_bashrc
from faults.cluster.matrix import Fault
from testbed.bed import Bed

_ALL = ("node1", "node2", "node3", "node4")
_SITE = "/etc/ssh/sshd_config.d/05-site.conf"
_NPROC = "/etc/security/limits.d/site.conf"
_MPI = "/home/cluster/nfs/venv/lib/python3*/site-packages/mpi4py/MPI*.so"
_STOP, _CONTINUE = (f"systemctl kill -s {signal} nfs-server" for signal in ("STOP", "CONT"))


def _addresses(bed: Bed) -> tuple[ipaddress.IPv4Interface, ipaddress.IPv4Interface]:
    """node2's own address, and an unused address next to it."""
    script = "ip -o -4 addr show dev eth0 | awk '{print $4}'"
    lines = bed.node_run("node2", ["sh", "-c", script]).stdout.split()
    own = next(one for one in map(ipaddress.IPv4Interface, lines) if str(one.ip) == bed.address("node2"))
    return own, ipaddress.IPv4Interface(f"{own.ip + 100}/{own.network.prefixlen}")


def _another_first(bed: Bed) -> None:
    own, other = _addresses(bed)
    in_network(bed, "node2", f"ip addr del {own} dev eth0; ip addr add {other} dev eth0; ip addr add {own} dev eth0")


def _own_first(bed: Bed) -> None:
    own, other = _addresses(bed)
    in_network(bed, "node2", f"ip addr del {other} dev eth0; ip addr replace {own} dev eth0")


FAULTS: dict[str, Fault] = {
    "AllowUsers admin in a file of sshd on node2": Fault(
        {"node2": f"echo AllowUsers admin >{_SITE} && systemctl restart ssh"},
        {"node2": f"rm {_SITE} && systemctl restart ssh"},
        {"SSH07": ("fail", "node2")},
        has_line=True,
        shows=[f"sshd does not let cluster in (AllowUsers admin, by {_SITE})"],
    ),
    "chage -d 0 for the shared user of node3": Fault(
        {"node3": "chage -d 0 cluster"},
        {"node3": "chage -d $(date +%F) cluster"},
        {"USR02": ("fail", "node3")},
        has_line=True,
        shows=["cluster must choose another password"],
    ),
    "exec zsh at the top of the shared user's .bashrc on node4, which has no zsh": Fault(
        {"node4": in_bashrc("'exec zsh'")},
        {"node4": UNDO_BASHRC},
        {"SSH09": ("fail", "node4")},
        has_line=True,
        shows=["runs no command", "because of ~cluster/.bashrc"],
    ),
    "read answer at the top of the shared user's .bashrc on node2": Fault(
        {"node2": in_bashrc("'read answer'")},
        {"node2": UNDO_BASHRC},
        {"SSH05": ("fail", "node2")},
        has_line=True,
        shows=["does not get what is sent to it: ~cluster/.bashrc takes it"],
    ),
    "read answer at the top of admin's .bashrc on node2": Fault(
        {"node2": "sed -i '1i read answer' /home/admin/.bashrc"},
        {"node2": "sed -i '/^read answer$/d; /^\\[ -t 0 \\] || return$/d' /home/admin/.bashrc"},
        {"SSH05": ("fail", "node2")},
        has_line=True,
        shows=["does not get what is sent to it: ~admin/.bashrc takes it"],
    ),
    "sleep 60 at the top of the shared user's .bashrc on node3": Fault(
        {"node3": in_bashrc("'sleep 60'")},
        {"node3": UNDO_BASHRC},
        {"SSH09": ("fail", "node3")},
        has_line=True,
        shows=["s, because of ~cluster/.bashrc"],
    ),
    "another address of the same network comes first on node2, for which the nodes' keys do not hold": Fault(
        _another_first,
        _own_first,
        {"NET01": ("fail", "node2")},
        has_line=True,
        shows=["which is not its address in the inventory"],
    ),
    "/dev/shm of mode 0755 on node3": Fault(
        {"node3": "chmod 755 /dev/shm"},
        {"node3": "chmod 1777 /dev/shm"},
        {"CON01": ("fail", "node3")},
        level="full",
        has_line=True,
        shows=["/dev/shm has mode 0755"],
    ),
    "UCX_NET_DEVICES=lo in /etc/environment of node4": Fault(
        {"node4": "cp -a /etc/environment /root/environment; echo UCX_NET_DEVICES=lo >>/etc/environment"},
        {"node4": "mv -f /root/environment /etc/environment"},
        {"NET07": ("fail", "node4")},
        level="full",
        has_line=True,
        shows=["UCX_NET_DEVICES names lo, which leads to no other node"],
    ),
    "nfs-server on the head frozen (SIGSTOP)": Fault(
        {"node1": _STOP},
        {"node1": _CONTINUE},
        {"NFS09": ("fail", "node1")},
        has_line=True,
        shows=["accepts connections, but answers no call"],
    ),
    "the program of --script has mode 0600 and belongs to root on node3": Fault(
        {node: "echo 'print(1)' >/opt/train.py" + "; chmod 600 /opt/train.py" * (node == "node3") for node in _ALL},
        dict.fromkeys(_ALL, "rm /opt/train.py"),
        {"ENV04": ("fail", "node3")},
        options=("--script", "/opt/train.py"),
        has_line=True,
        shows=["cluster cannot read /opt/train.py: Permission denied"],
    ),
    "/etc/nologin on node3": Fault(
        {"node3": "echo 'Back at noon' >/etc/nologin"},
        {"node3": "rm -f /etc/nologin"},
        {"SSH02": ("fail", "node3")},
        has_line=True,
        console="node3",
        shows=["Back at noon"],
    ),
    "nproc 5 for the shared user of node2": Fault(
        {"node2": f"echo 'cluster - nproc 5' >{_NPROC}"},
        {"node2": f"rm -f {_NPROC} /etc/security/limits.d/zz-mpitrain-nproc.conf"},
        {"PRB02": ("fail", "node2")},
        has_line=True,
        shows=["cluster may not have enough processes"],
    ),
    "/dev/null of mode 0600 on node4": Fault(
        {"node4": "chmod 600 /dev/null"},
        {"node4": "chmod 666 /dev/null"},
        {"PRB01": ("fail", "node4")},
        has_line=True,
        shows=["/dev/null is not open to all: it has mode 0600"],
    ),
    "mpi4py's library in the shared environment cut off after 100 KB": Fault(
        {"node1": f"truncate -s 100000 {_MPI}"},
        {},
        {"MPI01": ("fail", "node[1-4]")},
        repair="runtime",
        shows=["mpi4py cannot load an MPI library"],
    ),
}
