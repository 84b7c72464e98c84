"""Several hosts on this machine, for pictures and measurements of what people look at. Needs root, and Linux.

Each host has a name, a network behind a link of a given rate, and /tmp and /dev/shm of its own; the rest of the disk is
shared, as over NFS, and the processes are in one list. The repository is in /home/ada/mpitrain, and /home/ada/runs is
for records, so that pictures do not show where it really is. A program stands for ssh. The hosts end with the process
that made them.

    10.78.0.1 node1 ─┐
    10.78.0.2 node2 ─┼─ switch
    ...
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_HOLD = """
set -e
if [ $# -gt 1 ]; then
    hostname "$2"
    mount -t tmpfs tmpfs /dev/shm
    mount --bind "$3/hosts" /etc/hosts
    mkdir "$3/tmp-$2"
    mount -t tmpfs tmpfs "$3/tmp-$2"
    mkdir -p "$3/tmp-$2/${3#/tmp/}"
    mount --bind "$3" "$3/tmp-$2/${3#/tmp/}"
    mount --rbind "$3/tmp-$2" /tmp
    mount -t tmpfs tmpfs /home
    mkdir -p /home/ada/mpitrain /home/ada/runs "$3/runs"
    mount --bind "$4" /home/ada/mpitrain
    mount --bind "$3/runs" /home/ada/runs
fi
ip link set lo up
touch "$1"
exec sleep infinity
"""
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount")
_SSH = """#!/bin/sh
while :; do
    case $1 in
    -[BbcDEeFIiJLlmOoPpQRSWw]) [ "$1" != -O ] || exit 1; shift 2 ;;
    -N) exec sleep infinity ;;
    -*) shift ;;
    *) break ;;
    esac
done
host=$1; shift
pid=$(cat '{folder}'/"$host".pid) || exit 255
exec nsenter --target="$pid" --net --uts --ipc --mount --wdns=/ -- sh -c "$*"
"""
_WAIT_SECONDS = 60.0
_REPOSITORY = Path(__file__).resolve().parents[2]
HOME = "/home/ada"


class Hosts:
    """Use this in `with`: inside, the hosts are there."""

    def __init__(self, folder: Path, rates: Mapping[str, str]) -> None:
        """`folder`, below /tmp, is empty, and all hosts have it.

        `rates` has the rate of the link of each host, as tc wants it: "1gbit".
        """
        self._folder, self._rates = folder, rates
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        addresses = {name: f"10.78.0.{number}" for number, name in enumerate(self._rates, start=1)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        ssh = self._folder / "bin/ssh"
        ssh.parent.mkdir()
        ssh.write_text(_SSH.format(folder=self._folder))
        ssh.chmod(0o755)
        try:
            self._hold("switch")
            self._run("switch", "ip link add br0 type bridge")
            self._run("switch", "ip link set br0 up")
            for name, rate in self._rates.items():
                pid = self._hold(name, name, str(self._folder), str(_REPOSITORY))
                self._run("switch", f"ip link add {name} type veth peer name eth0 netns {pid}")
                self._run("switch", f"ip link set {name} master br0 up")
                self._run(name, f"ip address add {addresses[name]}/24 dev eth0")
                self._run(name, "ip link set eth0 up")
                for at, link in ((name, "eth0"), ("switch", name)):
                    self._run(at, f"tc qdisc add dev {link} root tbf rate {rate} burst 256kb latency 50ms")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def on(self, name: str, line: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Start a program on a host, with ssh to the others."""
        environment = os.environ | {
            "PATH": f"{self._folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{HOME}/mpitrain",
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": "tcp,self",  # one kernel, which UCX would take for one machine with shared memory
        }
        pid = (self._folder / f"{name}.pid").read_text()
        enter = ["nsenter", f"--target={pid}", "--net", "--uts", "--ipc", "--mount", f"--wdns={HOME}/mpitrain"]
        return subprocess.Popen([*enter, "--", *line], env=environment, text=True, **options)  # type: ignore[call-overload, no-any-return]

    def _hold(self, name: str, *arguments: str) -> int:
        ready = self._folder / f"{name}.ready"
        line = ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "bash", "-c", _HOLD, "bash", str(ready)]
        holder = subprocess.Popen([*line, *arguments], start_new_session=True)
        self._holders.append(holder)
        deadline = time.monotonic() + _WAIT_SECONDS
        while not ready.exists():
            if holder.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start: this needs root, and namespaces")
            time.sleep(0.02)
        (self._folder / f"{name}.pid").write_text(str(holder.pid))
        return holder.pid

    def _run(self, name: str, line: str) -> None:
        pid = (self._folder / f"{name}.pid").read_text()
        subprocess.run(["nsenter", f"--target={pid}", "--net", *line.split()], check=True, timeout=60)
