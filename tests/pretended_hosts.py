"""Three hosts on this machine for the tests: each has a name, a network, processes, and /tmp and /dev/shm of its own.

    n1 10.77.0.1 ─┐
    n2 10.77.0.2 ─┼─ switch      namespaces, held by one process each; all else of the disk is shared, as over NFS
    n3 10.77.0.3 ─┘

The addresses and the switch exist in these namespaces only. The kernel ends everything with the process that made it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from jobs import until

NAMES = ("n1", "n2", "n3")
# Bash, because process 1 must collect processes that have lost their parent.
_HOLD = """
set -e
if [ $# -gt 1 ]; then
    hostname "$2"
    mount -t tmpfs tmpfs /dev/shm
    mount --bind "$3/hosts" /etc/hosts
    mkdir "$3/tmp-$2"
    mount -t tmpfs tmpfs "$3/tmp-$2"
    for shared in "${@:3}"; do
        mkdir -p "$3/tmp-$2/${shared#/tmp/}"
        mount --bind "$shared" "$3/tmp-$2/${shared#/tmp/}"
    done
    mount --rbind "$3/tmp-$2" /tmp
fi
ip link set lo up
touch "$1"
sleep infinity &
wait
"""
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")


class Hosts:
    """Use this in `with`: inside, the hosts are there."""

    def __init__(self, folder: Path, shared: Sequence[Path]) -> None:
        """`folder` and `shared`, below /tmp, are the folders there that all hosts have."""
        self._folder, self._shared = folder, shared
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._first: dict[str, int] = {}  # process 1 of each host

    def __enter__(self) -> Hosts:
        lines = ["127.0.0.1 localhost", *(f"{address(name)} {name}" for name in NAMES)]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        try:
            self._hold("switch")
            self._ip("switch", "link add br0 type bridge")
            self._ip("switch", "link set br0 up")
            for name in NAMES:
                self._hold(name, name, str(self._folder), *map(str, self._shared))
                self._ip("switch", f"link add {name} type veth peer name eth0 netns {self._first[name]}")
                self._ip("switch", f"link set {name} master br0 up")
                self._ip(name, f"address add {address(name)}/24 dev eth0")
                self._ip(name, "link set eth0 up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders.values():
            holder.kill()
        for holder in self._holders.values():
            holder.wait()

    def enter(self, name: str, cwd: Path) -> list[str]:
        """The words that run a program on a host, in this folder there."""
        kinds = ("--net", "--uts", "--ipc", "--mount", "--pid")
        return ["nsenter", f"--target={self._first[name]}", *kinds, f"--wdns={cwd}", "--"]

    def _hold(self, name: str, *arguments: str) -> None:
        ready = self._folder / f"{name}.ready"
        line = ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "bash", "-c", _HOLD, "bash", str(ready)]
        holder = self._holders[name] = subprocess.Popen([*line, *arguments], start_new_session=True)

        def is_ready() -> bool:
            assert holder.poll() is None, f"{name} ended"
            return ready.exists()

        until(is_ready, f"no {name}")
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        self._first[name] = int(children.read_text().split()[0])

    def _ip(self, name: str, words: str) -> None:
        line = ["nsenter", f"--target={self._first[name]}", "--net", "ip", *words.split()]
        subprocess.run(line, check=True, timeout=60)


def address(name: str) -> str:
    """The address of a host."""
    return f"10.77.0.{NAMES.index(name) + 1}"
