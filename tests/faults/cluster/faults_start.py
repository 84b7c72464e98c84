"""Faults of the matrix: a node has no other fault, but `mpitrain run` cannot start a job on it."""

from __future__ import annotations

from faults.cluster.matrix import Fault

_SHARE = "/home/cluster/nfs"
_CONDA = "/opt/conda/bin"
_PROFILE = "/home/cluster/.profile"
_SCRIPT = f"{_SHARE}/project/train.py"
_AS_USER = "runuser -u cluster --"

FAULTS: dict[str, Fault] = {
    "/tmp of mode 0700 on node3": Fault(
        {"node3": "chmod 0700 /tmp"},
        {"node3": "chmod 1777 /tmp"},
        {"RUN01": ("fail", "node3")},
        has_line=True,
        shows=["cannot make a file in /tmp, of root, mode 0700: Permission denied"],
    ),
    "/tmp of mode 0755 on node2": Fault(
        {"node2": "chmod 0755 /tmp"},
        {"node2": "chmod 1777 /tmp"},
        {"RUN01": ("fail", "node2")},
        has_line=True,
        shows=["mode 0755: Permission denied"],
    ),
    "/tmp of the head mounted noexec": Fault(
        {"node1": "mount -o remount,noexec /tmp"},
        {"node1": "mount -o remount,exec /tmp"},
        {"RUN01": ("fail", "node1")},
        has_line=True,
        shows=["programs in /tmp cannot be run: it is mounted noexec"],
    ),
    "the head's .profile puts conda first into PATH": Fault(
        {
            "node1": f"mkdir -p {_CONDA} && ln -s /usr/bin/python3 {_CONDA}/python && cp /bin/true {_CONDA}/mpiexec && "
            f"cp -p {_PROFILE} {_PROFILE}.kept && echo 'PATH={_CONDA}:$PATH' >>{_PROFILE}"
        },
        {"node1": f"rm -r /opt/conda; mv -f {_PROFILE}.kept {_PROFILE}"},
        {"RUN02": ("fail", "node1")},
        has_line=True,
        shows=[f"in a login shell of cluster, python is {_CONDA}/python and mpiexec is {_CONDA}/mpiexec"],
    ),
    "/etc/profile.d/mpitrain.sh removed on node3": Fault(
        {"node3": "rm /etc/profile.d/mpitrain.sh"},
        {},
        {"RUN02": ("fail", "node3")},
        repair="runtime",
        shows=["there is no mpitrain"],
    ),
    "/etc/mpitrain/hosts of the head writable by all": Fault(
        {"node1": "chmod 666 /etc/mpitrain/hosts"},
        {},
        {"RUN03": ("fail", "node1")},
        repair="hosts",
        shows=["because others than this user may write there", "mode 0666"],
    ),
    "a numpy.py beside the program, on the shared folder": Fault(
        {
            "node1": f"{_AS_USER} mkdir -p {_SHARE}/project && {_AS_USER} touch {_SCRIPT} {_SHARE}/project/numpy.py "
            f"{_SHARE}/project/helpers.py"
        },
        {"node1": f"rm -r {_SHARE}/project"},
        {"RUN04": ("fail", "node[1-4]")},
        options=["--script", _SCRIPT],
        has_line=True,
        shows=[f"Python takes {_SHARE}/project/numpy.py, beside the script, for the library numpy"],
    ),
}
