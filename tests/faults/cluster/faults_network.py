"""Faults of the matrix: logins, network, speed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from faults.cluster.matrix import Fault
from mpitrain.testbed.bed import Bed

_OURS = "/etc/ssh/sshd_config.d/10-mpitrain.conf"
_SITE = "/etc/ssh/sshd_config.d/60-site.conf"
# Not `reload`, which ends before sshd listens again. A restart ends when sshd listens.
_READ_ANEW = "systemctl restart ssh"
_PYTHON = "/usr/bin/python3"
_HIGH = "tcp flags & (syn | ack) == syn tcp dport 32768-65535"
# A limit on what eth0 sends to one address or port. All other traffic is as fast as before.
_LIMIT = (
    "tc qdisc add dev eth0 root handle 1: htb default 2 && "
    "tc class add dev eth0 parent 1: classid 1:2 htb rate 20gbit quantum 60000 && "
    "tc class add dev eth0 parent 1: classid 1:1 htb rate {rate} burst {burst} cburst {burst} && "
    "tc filter add dev eth0 parent 1: protocol ip u32 match ip {what} flowid 1:1"
)
_NO_LIMIT = "tc qdisc del dev eth0 root"


def in_network(bed: Bed, node: str, line: str) -> None:
    """Run a line of shell in the node's network, with the programs of this machine."""
    command = ["ip", "netns", "exec", bed.record.node_namespace(node), "sh", "-c", line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def _rules(node: str, rule: str) -> Callable[[Bed], None]:
    def do(bed: Bed) -> None:
        text = rule.format(**{name: bed.address(name) for name in bed.names})
        table = f"table inet fault {{ chain input {{ type filter hook input priority 0; {text}; }}; }}"
        in_network(bed, node, f"nft '{table}'")

    return do


def _no_rules(node: str) -> Callable[[Bed], None]:
    return lambda bed: in_network(bed, node, "nft delete table inet fault")


def limit(bed: Bed, node: str, what: str, rate: str, burst: str = "256kb") -> None:
    """Slow down what a node sends to an address or a port, given in the words of tc's u32."""
    where = what.format(**{name: bed.address(name) for name in bed.names})
    in_network(bed, node, _LIMIT.format(rate=rate, burst=burst, what=where))


def no_limit(bed: Bed, node: str) -> None:
    """Remove the limit."""
    in_network(bed, node, _NO_LIMIT)


def _limit(*words: str) -> Callable[[Bed], None]:
    return lambda bed: limit(bed, *words)


def _no_limit(node: str) -> Callable[[Bed], None]:
    return lambda bed: no_limit(bed, node)


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


def _mtu(bytes_: int, *nodes: str) -> Callable[[Bed], None]:
    def do(bed: Bed) -> None:
        for node in nodes:
            bed.mtu(node, bytes_)

    return do


def _healed(*nodes: str) -> Callable[[Bed], None]:
    def do(bed: Bed) -> None:
        for node in nodes:
            bed.heal(node)

    return do


def _python(text: str) -> str:
    return f"mv {_PYTHON} {_PYTHON}.kept && printf '#!/bin/sh\\n{text}\\n' >{_PYTHON} && chmod 755 {_PYTHON}"


_PYTHON_BACK = f"mv -f {_PYTHON}.kept {_PYTHON}"
_AFFINITY = "/etc/systemd/system/ssh.service.d/fault.conf"
_ONE_PROCESSOR = (
    f"mkdir -p $(dirname {_AFFINITY}) && printf '[Service]\\nCPUAffinity=0\\n' >{_AFFINITY} && "
    "systemctl daemon-reload && systemctl restart ssh && for number in $(seq 30); do systemd-run --unit fault-$number "
    "-p CPUAffinity=0 sh -c 'while :; do :; done'; done"
)
_ALL_PROCESSORS = (
    f"systemctl stop 'fault-*'; rm -r $(dirname {_AFFINITY}); systemctl daemon-reload; systemctl restart ssh"
)
_BRIDGE = "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
_EVERY = ("node1", "node2", "node3", "node4")

FAULTS: dict[str, Fault] = {
    "sshd stopped": Fault(
        "sshd stopped on node3",
        {"node3": "systemctl stop ssh"},
        {"node3": "systemctl start ssh"},
        {"SSH01": ("fail", "node3")},
        shows=["Connection refused", "systemctl start ssh"],
    ),
    "port 22 dropped": Fault(
        "port 22 of node2 dropped by a firewall",
        lambda bed: bed.drop("node2", 22),
        lambda bed: bed.undrop("node2"),
        {"SSH01": ("fail", "node2")},
        shows=["no answer within"],
        is_slow=True,
    ),
    "node off": Fault(
        "node4 switched off",
        lambda bed: bed.kill("node4"),
        lambda bed: bed.start("node4"),
        {"SSH01": ("fail", "node4")},
        is_slow=True,
    ),
    "host key changed": Fault(
        "node3 has made a new host key",
        {
            "node3": "cd /etc/ssh && mkdir kept && mv ssh_host_* kept && "
            "ssh-keygen -q -t ed25519 -N '' -f ssh_host_ed25519_key && systemctl restart ssh"
        },
        {"node3": "cd /etc/ssh && mv kept/* . && rmdir kept && systemctl restart ssh"},
        {"SSH03": ("fail", "node3")},
        shows=["its host key is"],
    ),
    "addresses swapped": Fault(
        "node2 and node3 have each other's address",
        _swap_addresses,
        _swap_addresses,
        {"SSH03": ("fail", "node2; node3")},
        shows=["that is the key of node2", "that is the key of node3"],
        is_slow=True,
    ),
    "login key refused": Fault(
        "admin's authorized_keys emptied on node3",
        {"node3": "cd /home/admin/.ssh && cp -p authorized_keys kept && : >authorized_keys"},
        {"node3": "cd /home/admin/.ssh && cp -p kept authorized_keys && rm kept"},
        {"SSH02": ("fail", "node3")},
    ),
    "sudo hangs": Fault(
        "sudo of node2 waits for something that does not come",
        {
            "node2": "cd /usr/bin && mv sudo sudo.kept && printf '#!/bin/sh\\nsleep 90\\n' >sudo && chmod 755 sudo",
        },
        {"node2": "mv -f /usr/bin/sudo.kept /usr/bin/sudo"},
        {"PRB02": ("fail", "node2")},
        shows=["sudo, run by admin, hangs"],
        is_slow=True,
    ),
    "python missing": Fault(
        "no /usr/bin/python3 on node2",
        {"node2": f"mv {_PYTHON} {_PYTHON}.kept"},
        {"node2": _PYTHON_BACK},
        {"PRB01": ("fail", "node2")},
        shows=["No such file"],
    ),
    "python too old": Fault(
        "Python 3.6 on node2",
        {
            "node2": _python('echo \'{"old": "3.6.8"}\'').replace(
                '\'{"old": "3.6.8"}\'', '"{\\\\"old\\\\": \\\\"3.6.8\\\\"}"'
            )
        },
        {"node2": _PYTHON_BACK},
        {"PRB01": ("fail", "node2")},
        shows=["version 3.6.8"],
        is_slow=True,
    ),
    "python garbage": Fault(
        "/usr/bin/python3 of node2 prints something else",
        {"node2": _python("yes garbage | head -c 100000")},
        {"node2": _PYTHON_BACK},
        {"PRB01": ("fail", "node2")},
        shows=["garbage"],
        is_slow=True,
    ),
    "echo in .bashrc": Fault(
        "an echo at the top of admin's .bashrc on node2",
        {"node2": "sed -i '1i echo Welcome to node2' /home/admin/.bashrc"},
        {"node2": "sed -i 1d /home/admin/.bashrc"},
        {"SSH05": ("fail", "node2")},
        shows=["Welcome"],
    ),
    "echo in the shared user's .bashrc": Fault(
        "an echo at the top of the shared user's .bashrc on node4",
        {"node4": "sed -i '1i echo Welcome' /home/cluster/.bashrc"},
        {"node4": "sed -i 1d /home/cluster/.bashrc"},
        {"SSH05": ("fail", "node4")},
        shows=["a login of cluster that runs one command prints 'Welcome'"],
        is_slow=True,
    ),
    "a node's own key gone": Fault(
        "node4's own key taken out of its own authorized_keys",
        {"node4": "sed -i '/@node4$/d' /etc/ssh/mpitrain/authorized_keys"},
        {},
        {"SSH09": ("fail", "node4")},
        repair="ssh",
        shows=["Permission denied"],
        is_slow=True,
    ),
    "MaxStartups 1": Fault(
        "MaxStartups 1 in our file on node3",
        {"node3": f"sed -i 's/^MaxStartups.*/MaxStartups 1/' {_OURS} && {_READ_ANEW}"},
        {},
        {"SSH06": ("fail", "node3")},
        repair="ssh",
        shows=["MaxStartups 1"],
        is_slow=True,
    ),
    "passwords on": Fault(
        "PasswordAuthentication yes in our file on node2",
        {"node2": f"sed -i 's/PasswordAuthentication no/PasswordAuthentication yes/' {_OURS} && {_READ_ANEW}"},
        {},
        {"SSH07": ("warn", "node2")},
        repair="ssh",
        is_slow=True,
    ),
    "passwords on before us": Fault(
        "PasswordAuthentication yes for the shared user in a file that sshd reads before ours, on node2",
        {
            "node2": "printf 'Match User cluster\\n PasswordAuthentication yes\\n' >/etc/ssh/sshd_config.d/05-site.conf"
            f" && {_READ_ANEW}"
        },
        {"node2": f"rm /etc/ssh/sshd_config.d/05-site.conf && {_READ_ANEW}"},
        {"SSH07": ("warn", "node2")},
        shows=["by /etc/ssh/sshd_config.d/05-site.conf"],
        is_slow=True,
    ),
    "passwords left on": Fault(
        "set-up with its default, which leaves the passwords of other users on",
        dict.fromkeys(_EVERY, f"sed -i '/^PasswordAuthentication no/d' {_OURS} && {_READ_ANEW}"),
        {},
        {"SSH10": ("warn", "node[1-4]")},
        repair="ssh",
        shows=["sshd offers passwords to admin, root, others (passwordauthentication yes)"],
        is_slow=True,
    ),
    "passwords on for one user": Fault(
        "passwords off on all nodes, but for admin on node3",
        {
            **dict.fromkeys(_EVERY, f"sed -i '1i PasswordAuthentication no' {_OURS} && {_READ_ANEW}"),
            "node3": f"sed -i '1i PasswordAuthentication no' {_OURS} && printf 'Match User admin\n"
            f"PasswordAuthentication yes\n' >{_SITE} && {_READ_ANEW}",
        },
        dict.fromkeys(_EVERY, f"rm -f {_SITE}; sed -i 1d {_OURS}; {_READ_ANEW}"),
        {"SSH10": ("warn", "node3")},
        shows=[f"sshd offers passwords to admin (passwordauthentication yes, by {_SITE})"],
        is_slow=True,
    ),
    "key readable by all": Fault(
        "the shared user's key has mode 0644 on node2",
        {"node2": "chmod 644 /etc/ssh/mpitrain/id_ed25519"},
        {},
        {"SSH08": ("fail", "node2")},
        level="full",
        repair="ssh",
        shows=["0644"],
        is_slow=True,
    ),
    "key removed on one node": Fault(
        "node2's key taken out of authorized_keys on node3",
        {"node3": "sed -i /@node2$/d /etc/ssh/mpitrain/authorized_keys"},
        {},
        {"SSH04": ("fail", "node2 -> node3")},
        level="full",
        repair="ssh",
        shows=["Permission denied"],
        is_slow=True,
    ),
    "the head's key removed on one node": Fault(
        "the head's key taken out of authorized_keys on node3",
        {"node3": "sed -i /@node1$/d /etc/ssh/mpitrain/authorized_keys"},
        {},
        {"SSH11": ("fail", "node1 -> node3")},
        repair="ssh",
        shows=["Permission denied"],
        is_slow=True,
    ),
    "keys that all may replace": Fault(
        "/etc/ssh/mpitrain writable by all on node2",
        {"node2": "chmod 777 /etc/ssh/mpitrain"},
        {},
        {"SSH08": ("fail", "node2")},
        repair="ssh",
        shows=["other users than root may write to /etc/ssh/mpitrain"],
        is_slow=True,
    ),
    "host key unknown to one node": Fault(
        "node4 taken out of known_hosts on node2",
        {"node2": "sed -i /node4/d /etc/ssh/mpitrain/known_hosts"},
        {},
        {"SSH04": ("fail", "node2 -> node4")},
        level="full",
        repair="ssh",
        shows=["verification failed"],
        is_slow=True,
    ),
    "docker0 on all": Fault(
        "a bridge docker0 with the same address on all nodes, up",
        dict.fromkeys(_EVERY, _BRIDGE),
        dict.fromkeys(_EVERY, "ip link del docker0"),
        {"NET02": ("warn", "node[1-4]")},
        shows=["172.17.0.1", "--write-env"],
        is_slow=True,
    ),
    "route by docker0": Fault(
        "node2's route to node3 leaves by docker0",
        lambda bed: in_network(
            bed,
            "node2",
            f"{_BRIDGE} && ip route add {bed.address('node3')} dev docker0",
        ),
        {"node2": "ip link del docker0"},
        {"NET01": ("fail", "node2")},
        level="full",
        shows=["docker0"],
        is_slow=True,
    ),
    "wrong interface variable": Fault(
        "UCX_NET_DEVICES names an interface that no node has",
        {},
        {},
        {"NET07": ("fail", "node[1-4]")},
        shows=["UCX_NET_DEVICES names eth7"],
        env={"UCX_NET_DEVICES": "eth7"},
    ),
    "port taken": Fault(
        "a program listens on node3 on the only port that MPIEXEC_PORT_RANGE allows",
        {
            "node3": "systemd-run --unit fault-port python3 -m http.server 50200 && "
            "for i in $(seq 600); do (exec 3<>/dev/tcp/127.0.0.1/50200) && exit 0; sleep 0.1; done; exit 1"
        },
        {"node3": "systemctl stop fault-port"},
        {"NET08": ("fail", "node3")},
        shows=["python3", "50200"],
        env={"MPIEXEC_PORT_RANGE": "50200:50200"},
        is_slow=True,
    ),
    "high ports dropped": Fault(
        "new connections to high ports of node3 dropped",
        _rules("node3", f"{_HIGH} drop"),
        _no_rules("node3"),
        {"NET04": ("fail", "every other -> node3")},
        level="full",
        shows=["DROP"],
        is_slow=True,
    ),
    "high ports rejected": Fault(
        "new connections to high ports of node2 rejected",
        _rules("node2", f"{_HIGH} reject"),
        _no_rules("node2"),
        {"NET04": ("fail", "every other -> node2")},
        level="full",
        shows=["REJECT"],
        is_slow=True,
    ),
    "one way dropped": Fault(
        "new connections from node2 dropped on node3",
        _rules("node3", "ip saddr {node2} tcp flags & (syn | ack) == syn drop"),
        _no_rules("node3"),
        {"NET09": ("fail", "node2 -> node3")},
        level="full",
        shows=["pings get through"],
        is_slow=True,
    ),
    "all from one node dropped": Fault(
        "all that comes from node2 dropped on node3, its answers too",
        _rules("node3", "ip saddr {node2} drop"),
        _no_rules("node3"),
        {"NET09": ("fail", "node2 <-> node3")},
        level="full",
        shows=["pings do not get through"],
        is_slow=True,
    ),
    "packets lost one way": Fault(
        "20 % of what node2 sends to node3 lost",
        _rules("node3", "ip saddr {node2} numgen random mod 100 < 20 drop"),
        _no_rules("node3"),
        {"NET11": ("fail", "node2 -> node3")},
        level="full",
        shows=["of the packets are lost on this way"],
        is_slow=True,
    ),
    "MTU 9000 on two nodes": Fault(
        "MTU 9000 on node2 and node3, 1500 on the network",
        _mtu(9000, "node2", "node3"),
        _healed("node2", "node3"),
        {"NET03": ("fail", "node2 <-> node3")},
        level="full",
        shows=["9000", "stalls"],
        is_slow=True,
    ),
    "MTU 9000 on one node": Fault(
        "MTU 9000 on node4, 1500 on the network",
        _mtu(9000, "node4"),
        _healed("node4"),
        {"NET03": ("warn", "node4 -> every other")},
        level="full",
        shows=["TCP agrees on smaller ones"],
        is_slow=True,
    ),
    "slow link": Fault(
        "what node2 sends to node3 limited to 10 Mbit/s",
        _limit("node2", "dst {node3}", "10mbit"),
        _no_limit("node2"),
        {"PRF01": ("fail", "node2 -> node3")},
        level="bench",
        options=["--only", "PRF01"],  # a job's allreduce is slow as well
        shows=["the link"],
        is_slow=True,  # and whatever else keeps the cores busy makes links look slow
    ),
    "slow node": Fault(
        "node3's cable limited to 100 Mbit/s",
        lambda bed: bed.shape("node3", "100mbit"),
        _healed("node3"),
        {"PRF01": ("fail", "node3")},
        level="bench",
        options=["--only", "PRF01"],
        shows=["the node: it sends and receives slowly"],
        is_slow=True,
    ),
    "slow processor": Fault(
        "node4's logins on one processor, beside 30 programs of somebody else",
        {"node4": _ONE_PROCESSOR},
        {"node4": _ALL_PROCESSORS},
        {"PRF03": ("fail", "node4")},
        level="bench",
        options=["--only", "PRF03"],  # other checks say that there is only one processor
        is_slow=True,
    ),
    "slow share": Fault(
        "what node2 sends to the NFS port limited to 50 Mbit/s",
        _limit("node2", "dport 2049 0xffff", "50mbit"),
        _no_limit("node2"),
        {"PRF04": ("warn", "node2")},
        level="bench",
        options=["--only", "PRF04"],
        is_slow=True,
    ),
    "long round trips": Fault(
        "128 kbit/s from node2 to node4",
        _limit("node2", "dst {node4}", "128kbit", "100"),
        _no_limit("node2"),
        {"NET06": ("warn", "node2 <-> node4")},
        level="full",
        options=["--only", "NET06"],  # everything else is slow too
        is_slow=True,
    ),
}
