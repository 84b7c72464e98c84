"""Faults of the matrix: the shared folder, what a job finds in its environment, and MPI."""

from __future__ import annotations

from faults.cluster.matrix import Fault, apply
from testbed.bed import Bed

_SHARE = "/home/cluster/nfs"
_NUMPY = f"{_SHARE}/venv/lib/python3*/site-packages/numpy/__init__.py"
_OLD = "/home/cluster/old"
_UNIT = "home-cluster-nfs"
_AUTOMOUNT = f"/etc/systemd/system/{_UNIT}.automount"
_BINS = "/usr/local/lib/mpitrain/bin"
_WORKERS = ("node2", "node3", "node4")
_ALL = ("node1", *_WORKERS)
_STOP = f"systemctl stop {_UNIT}.automount {_UNIT}.mount"
_MASK = f"{_STOP}; mv {_AUTOMOUNT} /root/kept; ln -s /dev/null {_AUTOMOUNT}; systemctl daemon-reload"
_UNMASK = f"[ ! -e /root/kept ] || mv -fT /root/kept {_AUTOMOUNT}; systemctl daemon-reload"
_REMOUNT = f"umount -l {_SHARE}; systemctl restart {_UNIT}.automount; sudo -u cluster ls {_SHARE}"
# On the shared folder, root of a client is the user nobody. Root must have access to mount something there.
_OPEN, _CLOSE = f"chmod 755 {_SHARE}", f"chmod 750 {_SHARE}"
_BASHRC = "/home/cluster/.bashrc"
# Over ssh, bash reads .bashrc even if it is not interactive.
UNDO_BASHRC = f"[ ! -e {_BASHRC}.kept ] || mv -f {_BASHRC}.kept {_BASHRC}; [ -s {_BASHRC} ] || rm -f {_BASHRC}"


def _let_nfs_in(bed: Bed) -> None:
    """Also wait until the nodes have sent again what was dropped, which may take two minutes."""
    bed.undrop("node1")
    apply(bed, dict.fromkeys(_WORKERS, f"sudo -u cluster ls {_SHARE}"))


def in_bashrc(line: str) -> str:
    return (
        f"touch {_BASHRC}; cp -a {_BASHRC} {_BASHRC}.kept; printf '%s\\n' {line} | cat - {_BASHRC}.kept > {_BASHRC}; "
        f"chown cluster: {_BASHRC}"
    )


def _in_environment(line: str) -> str:
    return f"cp -a /etc/environment /root/environment; echo '{line}' >> /etc/environment"


_UNDO_ENVIRONMENT = "mv -f /root/environment /etc/environment"

# The real mpiexec makes four ranks of one world; this one makes four worlds.
_OTHER_LAUNCHER = f"""
rm {_BINS}/mpiexec
cat > {_BINS}/mpiexec <<'END'
#!/bin/sh
[ "$1" = --version ] && echo "mpiexec (OpenRTE) 4.1.4" && exit
END
chmod 755 {_BINS}/mpiexec
"""
_OWN_LAUNCHER = f"ln -sfT ../launch {_BINS}/mpiexec"


_SMALL = (
    f"mkdir -p /mnt/all && mount --bind {_SHARE} /mnt/all && mount --make-private /mnt/all",
    f"mount -t tmpfs -o size=700m,mode=750,uid=1900,gid=1900 small {_SHARE}",
    f"cp -a /mnt/all/venv {_SHARE}/ && systemctl restart nfs-server",
)
_WHOLE = (f"umount -l {_SHARE}", "umount /mnt/all", "systemctl restart nfs-server")


def _replace_share(bed: Bed, on_head: tuple[str, ...]) -> None:
    """Change the head's folder, and let the other nodes mount it again."""
    for node, script in (("node1", " && ".join(on_head)), *((node, _REMOUNT) for node in _WORKERS)):
        done = bed.node_run(node, ["bash", "-c", script], timeout_seconds=400)
        assert done.returncode == 0, f"{node}: {done.stdout}{done.stderr}"


FAULTS: dict[str, Fault] = {
    "the automount stopped and masked on one node, its folder removed": Fault(
        {"node2": f"{_MASK}; rmdir {_SHARE}"},
        {"node2": f"{_UNMASK}; mkdir -p {_SHARE}; systemctl start {_UNIT}.automount"},
        {"NFS01": ("fail", "node2")},
        repair="nfs",
        shows=(f"there is no {_SHARE}",),
    ),
    "a local folder of the same name, not empty, on one node": Fault(
        {"node3": f"{_STOP}; mkdir -p {_SHARE}/results; chown -R cluster: {_SHARE}"},
        {"node3": f"rmdir {_SHARE}/results; systemctl start {_UNIT}.automount"},
        {"NFS01": ("fail", "node3")},
        shows=("is a local folder",),
    ),
    "the head does not export the shared folder any more": Fault(
        {"node1": "mv /etc/exports.d/mpitrain.exports /root/; exportfs -ra"},
        {"node1": "mv /root/mpitrain.exports /etc/exports.d/; exportfs -ra"},
        {"NFS09": ("fail", "node1")},
        repair="nfs",
        shows=("is not exported to node2, node3, node4",),
    ),
    "nfs-server stopped on the head": Fault(
        {"node1": "systemctl stop nfs-server"},
        {"node1": "systemctl start nfs-server"},
        {"NFS09": ("fail", "node1")},
        repair="nfs",
        shows=("nfs-server is inactive",),
    ),
    "a firewall on the head that drops port 2049": Fault(
        lambda bed: bed.drop("node1", 2049),
        _let_nfs_in,
        {"NFS02": ("fail", "node[2-4]")},
        shows=("does not end within",),
    ),
    "the head's folder made anew under a running server: the others hold the one that is gone": Fault(
        {
            "node1": f"mv {_SHARE} {_OLD} && install -d -o cluster -g cluster -m 750 {_SHARE} && "
            f"cp -a {_OLD}/venv {_SHARE}/ && rm -rf {_OLD} && exportfs -ra && systemctl restart nfs-server && sleep 2"
        },
        dict.fromkeys(_WORKERS, _REMOUNT),
        {"NFS03": ("fail", "node[2-4]")},
        repair="nfs",
        shows=("Stale file handle",),
    ),
    "the shared folder mounted again read-only on one node": Fault(
        {"node2": f"mount -o remount,ro {_SHARE}"},
        {"node2": f"mount -o remount,rw {_SHARE}"},
        {"NFS03": ("fail", "node2")},
        repair="nfs",
        shows=("Read-only file system",),
    ),
    "the shared folder belongs to root": Fault(
        {"node1": f"chown root: {_SHARE}; chmod 755 {_SHARE}"},
        {"node1": f"chown cluster: {_SHARE}; {_CLOSE}"},
        {"NFS03": ("fail", "node[1-4]")},
        repair="nfs",
        shows=("Permission denied",),
    ),
    "the shared folder on a small file system with hardly any room": Fault(
        lambda bed: _replace_share(bed, _SMALL),
        lambda bed: _replace_share(bed, _WHOLE),
        {"NFS07": ("fail", "node[1-4]")},
        shows=("GiB free",),
    ),
    "the shared folder exported with no_root_squash": Fault(
        {"node1": "sed -i s/root_squash/no_root_squash/g /etc/exports.d/mpitrain.exports; exportfs -ra"},
        {"node1": "sed -i s/no_root_squash/root_squash/g /etc/exports.d/mpitrain.exports; exportfs -ra"},
        {"NFS06": ("fail", "node1")},
        repair="nfs",
        shows=("no_root_squash to 10.77.",),
    ),
    "the shared folder exported to all the world, in another file": Fault(
        {"node1": f"echo '{_SHARE} *(rw,no_subtree_check)' > /etc/exports.d/other.exports; exportfs -ra"},
        {"node1": "rm /etc/exports.d/other.exports; exportfs -ra"},
        {"NFS06": ("fail", "node1")},
        shows=(f"{_SHARE} is exported to ",),
    ),
    "the shared folder mounted soft on one node": Fault(
        {"node2": f"sed -i s/hard/soft/ /etc/systemd/system/{_UNIT}.mount; systemctl daemon-reload; {_REMOUNT}"},
        {"node2": f"sed -i s/soft/hard/ /etc/systemd/system/{_UNIT}.mount; systemctl daemon-reload; {_REMOUNT}"},
        {"NFS05": ("fail", "node2")},
        repair="nfs",
        shows=("soft",),
    ),
    "the automount disabled on one node, nfs-server on the head": Fault(
        {"node3": f"systemctl disable {_UNIT}.automount", "node1": "systemctl disable nfs-server"},
        {"node3": f"systemctl enable {_UNIT}.automount", "node1": "systemctl enable nfs-server"},
        {"NFS08": ("fail", "node1; node3")},
        level="full",
        repair="nfs",
    ),
    "the same path of the same name from another folder of the head, on one node": Fault(
        {
            "node1": f"mkdir -p /srv{_SHARE} && chown cluster: /srv{_SHARE} && "
            f"echo '/srv{_SHARE} 10.77.0.0/16(rw,no_subtree_check)' > /etc/exports.d/other.exports && exportfs -ra",
            "node4": f"{_STOP}; mount -t nfs $(getent hosts node1 | cut -d' ' -f1):/srv{_SHARE} {_SHARE}",
        },
        {
            "node4": f"umount -l {_SHARE}; systemctl start {_UNIT}.automount",
            "node1": "rm /etc/exports.d/other.exports; exportfs -ra",
        },
        {"NFS01": ("fail", "node4")},
        shows=(f"/srv{_SHARE}",),
    ),
    "another environment mounted over the shared one on one node, with another mpi4py": Fault(
        {
            "node1": _OPEN,
            "node3": f"cp -a {_SHARE}/venv /opt/venv && cd /opt/venv/lib/python3*/site-packages && "
            f"mv mpi4py-*.dist-info mpi4py-3.1.6.dist-info && mount --bind /opt/venv {_SHARE}/venv",
        },
        {"node3": f"umount -l {_SHARE}/venv; rm -rf /opt/venv", "node1": _CLOSE},
        {"ENV02": ("fail", "node3")},
        shows=("mpi4py 3.1.6", "mpi4py 4."),
    ),
    "the environment's programs hidden on one node": Fault(
        {"node1": _OPEN, "node4": f"mkdir -p /opt/empty && mount --bind /opt/empty {_SHARE}/venv/bin"},
        {"node4": f"umount -l {_SHARE}/venv/bin", "node1": _CLOSE},
        {"ENV01": ("fail", "node4")},
        shows=("does not run",),
    ),
    "the environment's Python removed": Fault(
        {"node1": f"rm {_SHARE}/venv/bin/python"},
        {"node1": f"sudo -u cluster ln -sf python3 {_SHARE}/venv/bin/python"},
        {"ENV01": ("fail", "node[1-4]")},
        repair="runtime",
    ),
    "another mpiexec first in PATH on one node, by its .bashrc": Fault(
        {
            "node2": f"mkdir -p /opt/other; cp {_BINS}/../launch /opt/other/mpiexec; "
            + in_bashrc("'PATH=/opt/other:$PATH'")
        },
        {"node2": f"{UNDO_BASHRC}; rm -rf /opt/other"},
        {"ENV03": ("fail", "node2")},
        shows=("mpiexec is /opt/other/mpiexec",),
    ),
    "the program of --script is another one on one node": Fault(
        {node: f"echo 'print({2 if node == 'node3' else 1})' > /opt/train.py" for node in _ALL},
        dict.fromkeys(_ALL, "rm /opt/train.py"),
        {"ENV04": ("fail", "node3")},
        options=("--script", "/opt/train.py"),
        shows=("train.py",),
    ),
    "there is no such program on one node": Fault(
        {node: "echo 'print(1)' > /opt/train.py" for node in _ALL if node != "node2"},
        {node: "rm /opt/train.py" for node in _ALL if node != "node2"},
        {"ENV04": ("fail", "node2")},
        options=("--script", "/opt/train.py"),
        shows=("there is no /opt/train.py",),
    ),
    "a proxy set on one node, and the nodes not in no_proxy": Fault(
        {"node2": _in_environment("http_proxy=http://proxy.example:3128")},
        {"node2": _UNDO_ENVIRONMENT},
        {"ENV05": ("warn", "node2")},
        shows=("no_proxy does not have the nodes",),
    ),
    "UCX_TLS set on one node": Fault(
        {"node4": _in_environment("UCX_TLS=self,tcp")},
        {"node4": _UNDO_ENVIRONMENT},
        {"ENV06": ("warn", "node4")},
        shows=("UCX_TLS=self,tcp",),
    ),
    "OMPI_MCA_btl set by .bashrc on one node": Fault(
        {"node3": in_bashrc("'export OMPI_MCA_btl=self,tcp'")},
        {"node3": UNDO_BASHRC},
        {"ENV06": ("warn", "node3")},
        shows=("OMPI_MCA_btl=self,tcp",),
    ),
    "an empty file mounted over one of NumPy's on node2": Fault(
        {"node1": _OPEN, "node2": f": >/run/empty.py; mount --bind /run/empty.py {_NUMPY}"},
        {"node2": f"umount -l {_NUMPY}; rm /run/empty.py", "node1": _CLOSE},
        {"ENV07": ("fail", "node2")},
        shows=("NumPy cannot be used: AttributeError",),
    ),
    "FI_PROVIDER and UCX_TLS of no kind that is there, on one node": Fault(
        {"node3": _in_environment("FI_PROVIDER=none-such\nUCX_TLS=none-such")},
        {"node3": _UNDO_ENVIRONMENT},
        {"ENV06": ("warn", "node3; node3"), "MPI05": ("fail", "node3")},
        level="full",
        shows=("do not make one job",),
    ),
    "the nodes' mpiexec replaced by one of Open MPI, while mpi4py loads MPICH": Fault(
        dict.fromkeys(_ALL, _OTHER_LAUNCHER),
        dict.fromkeys(_ALL, _OWN_LAUNCHER),
        {"MPI01": ("fail", "node[1-4]")},
        shows=("belongs to Open MPI 4.1.4, mpi4py loads MPICH",),
    ),
    "a shell that holds up mpiexec's helper on one node, and nothing else": Fault(
        # A busy machine gives the job over a minute.
        {"node3": in_bashrc("'[[ $BASH_EXECUTION_STRING != *hydra_pmi_proxy* ]] || exec sleep 600'")},
        {"node3": f"{UNDO_BASHRC}; pkill -u cluster -x sleep; true"},
        {"MPI02": ("fail", "node3")},
        level="full",
        shows=("no rank began",),
    ),
}
