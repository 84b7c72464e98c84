"""Slurm on the nodes of a bed: a slurmd on each, slurmctld on the first, from this machine's own packages.

The nodes have no way to Debian's mirror. So the files of the packages, and the libraries that they need, are copied.
They are of the same Debian.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from jobs import until
from mpitrain.testbed import Bed

_PACKAGES = ("munge", "slurm-client", "slurm-wlm-basic-plugins", "slurmctld", "slurmd")
# Debian's alternatives, which are in no package.
_LINKS = ("/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/sbin/slurmstepd")
_CONFIGURATION = """\
ClusterName=bed
SlurmctldHost=node1
AuthType=auth/munge
AuthInfo=socket=/run/munge/socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP MaxTime=INFINITE PriorityTier=2
"""


def set_up(bed: Bed) -> None:
    """Start Slurm on all nodes, and wait until they are idle."""
    paths = _files()
    key = "head -c 1024 /dev/urandom"
    made = subprocess.run(["bash", "-c", f"{key} | base64 -w 0"], capture_output=True, text=True, check=True).stdout
    nodes = "\n".join(f"NodeName={name} CPUs=4 RealMemory=100 Gres=gpu:2" for name in bed.names)
    configuration = _CONFIGURATION.format(nodes=nodes)
    for name in bed.names:
        copy = f"tar -C / -c -h -T - | ssh {name} 'sudo tar -C / -x --keep-directory-symlink'"
        done = bed.run(["bash", "-o", "pipefail", "-c", copy], input="\n".join(paths), timeout_seconds=300)
        assert done.returncode == 0, done.stderr
        # The nodes have different GPUs, so that what is given to a job differs from node to node.
        files = "/dev/null,/dev/zero" if name == "node1" else "/dev/zero,/dev/full"
        _on(
            bed,
            name,
            f"""
            mkdir -p -m 700 /run/munge /etc/munge /var/spool/slurmctld /var/spool/slurmd; mkdir -p /etc/slurm
            chmod 755 /run/munge
            echo {made} | base64 -d > /etc/munge/key && chmod 400 /etc/munge/key
            printf %s {shlex.quote(configuration)} > /etc/slurm/slurm.conf
            echo CgroupPlugin=cgroup/v1 > /etc/slurm/cgroup.conf  # nothing of it is used, and a node's are mixed
            echo 'Name=gpu File={files}' > /etc/slurm/gres.conf
            munged --force --key-file=/etc/munge/key --socket=/run/munge/socket --pid-file=/run/munge/pid \\
                --log-file=/run/munge/log --seed-file=/run/munge/seed
            ldconfig
            """,
        )
    _on(bed, "node1", "slurmctld")
    for name in bed.names:
        _on(bed, name, "slurmd")
    idle = ["idle"] * len(bed.names)
    until(lambda: _on(bed, "node1", "sinfo -h -N -p all -o %t").split() == idle, "the nodes are not idle")


def _on(bed: Bed, node: str, script: str) -> str:
    done = bed.node_run(node, ["bash", "-c", script])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _files() -> list[str]:
    """The paths of the packages' files, and of the libraries that they load, without the leading /."""
    listed = subprocess.run(["dpkg", "-L", *_PACKAGES], capture_output=True, text=True, check=True).stdout.split("\n")
    unwanted = ("/usr/share/", "/etc/", "/lib/systemd/", "/usr/lib/systemd/", "/var/")
    paths = {path for path in [*listed, *_LINKS] if Path(path).is_file() and not path.startswith(unwanted)}
    programs = [path for path in paths if "/bin/" in path or "/sbin/" in path or ".so" in path]
    linked = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    # What is there already is of the same package, and is left alone: the C library among it.
    ours = ("libmunge", "libhwloc", "libjson-c", "libjwt", "liblz4", "libfreeipmi", "libnuma", "liblua")
    for line in linked.splitlines():
        words = line.split()
        if len(words) > 2 and words[1] == "=>" and words[0].startswith(ours):
            paths.add(words[2])
    return sorted(path.lstrip("/") for path in paths)
