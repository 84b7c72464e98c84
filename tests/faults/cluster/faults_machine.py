"""Faults of the matrix: names, the shared user, clocks, limits, and what dead jobs leave."""

from __future__ import annotations

from faults.cluster.matrix import Fault
from testbed.bed import Bed


def _same_host_key(bed: Bed) -> None:
    """Give two nodes one more host key, the same one. Logins use the first key, so they still work."""
    node1, node2 = bed.names[:2]
    made = bed.node_run(node1, ["bash", "-c", f"{_NO_ECDSA}; ssh-keygen -q -t ecdsa -N '' -f {_ECDSA} && cat {_ECDSA}"])
    assert made.returncode == 0, made.stderr
    script = f"umask 077; cat >{_ECDSA} && ssh-keygen -y -f {_ECDSA} >{_ECDSA}.pub && chmod 644 {_ECDSA}.pub"
    copied = bed.node_run(node2, ["bash", "-c", f"printf %s '{made.stdout}' | ({script})"])
    assert copied.returncode == 0, copied.stderr


_ECDSA = "/etc/ssh/ssh_host_ecdsa_key"
_NO_ECDSA = f"rm -f {_ECDSA} {_ECDSA}.pub"
_LOGIND = "org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager"
_KEEP_HOSTS = "cp -p /etc/hosts /run/hosts.kept"
_PUT_HOSTS_BACK = "cat /run/hosts.kept >/etc/hosts; rm /run/hosts.kept"
_KEEP_ID = "cp -p /etc/machine-id /run/machine-id.kept"
_PUT_ID_BACK = "cat /run/machine-id.kept >/etc/machine-id; rm /run/machine-id.kept"
_JOB = (
    "cd /; runuser -u cluster -- sh -c '/home/cluster/nfs/venv/bin/mpiexec -n 2 sleep 3333 >/dev/null 2>&1 &'; "
    "for i in $(seq 600); do [ $(pgrep -c -u cluster -x sleep) = 2 ] && break; sleep 0.1; done; "
    "pkill -9 -u cluster -x hydra_pmi_proxy; pkill -9 -u cluster mpiexec; sleep 6; pgrep -u cluster -x sleep"
)
# These programs have priority over others of this machine, however busy it is: with a small share they would be no
# finding. The kernel may schedule by sessions, each with a niceness of its own (sched(7), autogroup).
_PID = "$(systemctl show -P MainPID busy$i)"
_COMPUTE = (
    "systemd-run -q -u busy$i -p User=games -p Nice=-10 sh -c 'while :; do :; done'; "
    f"[ ! -e /proc/{_PID}/autogroup ] || echo -10 >/proc/{_PID}/autogroup"
)
# Each has computed for 6 s: field 14 is the time in units of 10 ms.
_HAS_COMPUTED = f"until [ $(cut -d' ' -f14 /proc/{_PID}/stat) -ge 600 ]; do sleep 0.1; done"

FAULTS: dict[str, Fault] = {
    "a folder for results, on the machine that checks, in which no file can be made": Fault(
        {},
        {},
        {"INV02": ("warn", "")},
        env={"XDG_STATE_HOME": "/proc"},
        shows=["no result is kept for `mpitrain dashboard`: /proc/mpitrain cannot be written"],
    ),
    "127.0.1.1 and its own name in /etc/hosts of node3": Fault(
        {"node3": "sed -i '1i 127.0.1.1 node3' /etc/hosts"},
        {"node3": "sed -i '/^127.0.1.1 node3$/d' /etc/hosts"},
        {"NAM02": ("fail", "node3")},
        repair="hosts",
        shows=["its own name leads to 127.0.1.1"],
    ),
    "node2 renamed to localhost2": Fault(
        {"node2": "hostnamectl set-hostname localhost2"},
        {"node2": "hostnamectl set-hostname node2"},
        {"NAM01": ("fail", "node2")},
        repair="hosts",
        shows=["it calls itself localhost2"],
    ),
    "another address for node2 in /etc/hosts of node4, above the lines of set-up": Fault(
        {"node4": f"{_KEEP_HOSTS}; sed -i '1i 10.9.9.9 node2' /etc/hosts"},
        {"node4": _PUT_HOSTS_BACK},
        {"NAM03": ("fail", "node4")},
        shows=["the name node2 leads to ", "10.9.9.9", "# the line: 10.9.9.9 node2"],
    ),
    "another address for node3 within the lines of set-up in /etc/hosts of node1": Fault(
        {"node1": f"{_KEEP_HOSTS}; sed -i 's/^.* node3$/10.9.9.9 node3/' /etc/hosts"},
        {"node1": _PUT_HOSTS_BACK},
        {"NAM04": ("fail", "node1")},
        repair="hosts",
        shows=["'10.9.9.9 node3' for node3"],
    ),
    "the lines of set-up taken out of /etc/hosts of node2": Fault(
        {"node2": f"{_KEEP_HOSTS}; sed -i '/^# BEGIN mpitrain/,/^# END mpitrain/d' /etc/hosts"},
        {"node2": _PUT_HOSTS_BACK},
        {"NAM04": ("fail", "node2")},
        repair="hosts",
        shows=["lacks the lines of set-up"],
    ),
    "manage_etc_hosts: true in cloud-init's settings on node3": Fault(
        {"node3": "cd /etc; rm -rf cloud; mkdir -p cloud/cloud.cfg.d; echo 'manage_etc_hosts: true' >cloud/cloud.cfg"},
        {"node3": "rm -r /etc/cloud"},
        {"NAM05": ("warn", "node3")},
        repair="hosts",
    ),
    "the same /etc/machine-id on node2 and node4": Fault(
        dict.fromkeys(("node2", "node4"), f"{_KEEP_ID}; echo 0123456789abcdef0123456789abcdef >/etc/machine-id"),
        dict.fromkeys(("node2", "node4"), _PUT_ID_BACK),
        {"NAM07": ("warn", "node[2,4]")},
    ),
    "the same ecdsa host key on node1 and node2": Fault(
        _same_host_key,
        dict.fromkeys(("node1", "node2"), _NO_ECDSA),
        {"NAM07": ("fail", "node[1-2]")},
    ),
    "the shared user of node3 has uid 1950": Fault(
        {"node3": "sed -i 's/^cluster:x:1900:/cluster:x:1950:/' /etc/passwd"},
        {"node3": "sed -i 's/^cluster:x:1950:/cluster:x:1900:/' /etc/passwd"},
        {"USR01": ("fail", "node3")},
        shows=["user cluster has uid 1950 and gid 1900"],
    ),
    "the shell of the shared user of node2 is /usr/sbin/nologin": Fault(
        {"node2": "usermod -s /usr/sbin/nologin cluster"},
        {"node2": "usermod -s /bin/bash cluster"},
        {"USR02": ("fail", "node2")},
        shows=["/usr/sbin/nologin, refuses logins"],
    ),
    "the home of the shared user of node4 is a folder that is not there": Fault(
        {"node4": "usermod -d /home/gone cluster"},
        {"node4": "usermod -d /home/cluster cluster"},
        {"USR02": ("fail", "node4")},
        shows=["/home/gone, does not exist"],
    ),
    "the account of the shared user of node3 has expired": Fault(
        {"node3": "chage -E 2020-01-01 cluster"},
        {"node3": "chage -E -1 cluster"},
        {"USR02": ("fail", "node3")},
        shows=["has expired"],
    ),
    "the clock of node2 is 5 minutes ahead": Fault(
        lambda bed: bed.clock("node2", 300),
        lambda bed: bed.heal("node2"),
        # The bed sets the clock through a library that every login loads.
        {"CLK01": ("fail", "node2"), "ENV06": ("warn", "node2")},
        shows=["its clock is 300 s ahead of the others"],
    ),
    "nofile 64 for the shared user of node3": Fault(
        {"node3": "sed -i 's/nofile .*/nofile 64/' /etc/security/limits.d/90-mpitrain.conf"},
        {"node3": "sed -i 's/nofile .*/nofile 65536/' /etc/security/limits.d/90-mpitrain.conf"},
        {"LIM01": ("fail", "node3")},
        repair="limits",
        shows=["a job may have 64 files open"],
    ),
    "/dev/shm of 64 MiB on node2, as Docker gives it": Fault(
        {"node2": "mount -o remount,size=64m /dev/shm"},
        {"node2": "mount -o remount,size=10% /dev/shm"},
        {"CON01": ("fail", "node2")},
        shows=["/dev/shm has 64 MiB"],
    ),
    "RemoveIPC=yes on node3": Fault(
        {
            "node3": "rm /etc/systemd/logind.conf.d/90-mpitrain.conf; systemctl kill -s HUP systemd-logind; "
            f"for i in $(seq 600); do busctl get-property {_LOGIND} RemoveIPC | grep -q true && exit 0; sleep 0.1; "
            "done; exit 1"
        },
        {
            "node3": "printf '[Login]\\nRemoveIPC=no\\n' >/etc/systemd/logind.conf.d/90-mpitrain.conf;"
            "systemctl kill -s HUP systemd-logind"
        },
        {"LIM05": ("warn", "node3")},
        repair="limits",
    ),
    "/tmp full on node4": Fault(
        {"node4": "mount -o remount,size=80m /tmp && fallocate -l 70m /tmp/full"},
        {"node4": "rm /tmp/full; mount -o remount,size=10% /tmp"},
        {"LIM07": ("fail", "node4")},
        shows=["/tmp has"],
    ),
    "mpiexec and its daemon killed on node2, its two ranks left": Fault(
        {"node2": _JOB},
        {"node2": "pkill -9 -u cluster -x sleep"},
        {"LEF01": ("warn", "node2")},
        shows=["2 processes of a dead job", "sudo kill -9"],
    ),
    "a file of a dead job of MPICH in /dev/shm of node3": Fault(
        {
            "node3": "fallocate -l 8m /dev/shm/mpich_shm_0badc0de; chown cluster: /dev/shm/mpich_shm_0badc0de; "
            "touch -d '-10 minutes' /dev/shm/mpich_shm_0badc0de"
        },
        {"node3": "rm /dev/shm/mpich_shm_0badc0de"},
        {"LEF02": ("warn", "node3")},
        shows=["1 file of dead jobs in /dev/shm, 8 MiB", "sudo rm -rf /dev/shm/mpich_shm_0badc0de"],
    ),
    "sshd of node2, and all that logs in, bound to one processor": Fault(
        {"node2": "taskset -pc 0 $(systemctl show -P MainPID ssh)"},
        {"node2": "taskset -p ffffffff $(systemctl show -P MainPID ssh)"},
        {"LIM04": ("fail", "node2")},
        shows=["a login may use 1 of"],
    ),
    "two processes of somebody else compute on node4": Fault(
        {"node4": f"for i in 1 2; do {_COMPUTE}; done; for i in 1 2; do {_HAS_COMPUTED}; done"},
        {"node4": "systemctl stop busy1 busy2"},
        {"LIM04": ("warn", "node4")},
        shows=["other processes compute"],
    ),
}
