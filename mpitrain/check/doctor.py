"""`mpitrain doctor`: this machine alone, examined by the same agent as a node but without ssh; and its facts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from mpitrain.check.agent import BOOT, AgentClient, in_a_word
from mpitrain.check.check import Seen
from mpitrain.check.checks.gpu import cuda_version
from mpitrain.check.jobs import word
from mpitrain.check.report import wrapped
from mpitrain.check.target import Target
from mpitrain.facts import own_user
from mpitrain.launch import processes
from mpitrain.launch.dialects import can_recover
from mpitrain.launch.hostfile import Host
from mpitrain.launch.libraries import VENDOR_NAMES, mpiexec_of_text
from mpitrain.launch.variables import network_variables

_END_SECONDS = 5.0
Facts = list[tuple[str, str]]


def target_here() -> Target:
    """The target with this machine, this user and this Python; no shared folder, no provisioning, no inventory."""
    host = Host(socket.gethostname(), _own_address())
    return Target(
        hosts=(host,),
        user=own_user(),
        share=None,
        venv=sys.prefix,
        settings={},
        set_up="",
        environ=network_variables(os.environ),
        python_here=sys.executable,
    )


def _own_address() -> str:
    """Return this machine's address on the way to others; that of the loopback if it is on no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as question:
        try:
            question.connect(("192.0.2.1", 9))  # chooses a route; nothing is sent
        except OSError:
            return "127.0.0.1"
        address: str = question.getsockname()[0]
        return address


def log_in(host: Host) -> AgentClient:
    """Start the agent of this machine. Closing the agent ends everything that it has started."""
    started = time.monotonic()
    return AgentClient(host, _OverPipes(), time.monotonic() - started)


class _OverPipes:
    """An `AgentConnection` to a process of this one."""

    python = sys.executable
    host_key = ""

    def open(self) -> None:
        # A process that a job of the agent has left behind becomes a child of this process.
        processes.adopt_orphans()
        self._before = processes.children()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (until close)
        self._process = subprocess.Popen(
            [self.python, "-I", "-u", "-c", in_a_word(BOOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the agent
        )

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def readline(self, most: int) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline(most)

    def last_words(self) -> str:
        code = self._process.wait()
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"ended with code {code}"

    def cut(self) -> None:
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        processes.kill_all(lambda: processes.alive_below(self._before))
        self._process.wait()
        self._words.close()


def facts(seen: Seen, name: str) -> Facts:
    """The facts of node `name`, without those that were not observed."""
    sections = {section: answer for section, answer in seen.nodes.get(name, {}).items() if not _failed(answer)}
    two = seen.cluster.get("two ranks", {}).get(name)
    ways = seen.cluster.get("gpu ways", {}).get(name)
    return [
        *(_mpi(sections["programs"], sections.get("shell"), two) if "programs" in sections else ()),
        *(_python(sections["programs"]["python"], sections.get("numpy")) if "programs" in sections else ()),
        *_cupy(sections.get("cupy"), ways),
        *(_cards(sections["gpu"]) if "gpu" in sections else ()),
        *_network(sections.get("names", {}), sections.get("network", {})),
        *_limits(sections.get("processors"), sections.get("shell"), sections.get("resources")),
    ]


def aligned(lines: Facts, width: int) -> str:
    """The lines as a table, wrapped to `width`."""
    margin = max((len(name) for name, _ in lines), default=0) + 2
    return "\n".join(part for name, value in lines for part in wrapped(name.ljust(margin), value, width))


def _failed(answer: Any) -> bool:
    return isinstance(answer, dict) and bool({"error", "refused"} & answer.keys())


def _mpi(
    programs: Mapping[str, Any], shell: Mapping[str, Any] | None, two: Mapping[str, Any] | None
) -> Iterator[tuple[str, str]]:
    library, mpiexec = programs["mpi"], programs["mpiexec"]
    if "why" in library:
        yield "MPI library", library["why"]
    else:
        version = re.sub(r" Version\s*:\s*", " ", re.split(r", package:|\n", library["library"])[0])
        yield "MPI library", f"{version}, {library['path'] or 'linked in statically'}"
        yield "mpi4py", f"{library['mpi4py']}, {library['module']}"
    yield "mpiexec", _mpiexec(mpiexec)
    if mpiexec["path"] and not mpiexec.get("why"):
        goes_on = can_recover(mpiexec_of_text(mpiexec["path"], mpiexec["text"]))
        yield "a lost rank", "ends the job" if not goes_on else "ends the job, unless mpitrain run has --recover"
    if programs["on_path"]:
        yield "mpiexec on PATH", _mpiexec(programs["on_path"])
    elif shell and not shell["programs"]["mpiexec"]:
        yield "mpiexec on PATH", "none"
    if two and "said" in two:
        sizes = [size for rank in range(2) if (size := word(two, rank, "size")) is not None]
        yield "2 processes say", ", ".join(f"I am one of {size}" for size in sizes) or "nothing"


def _mpiexec(program: Mapping[str, Any]) -> str:
    if not program["path"]:
        return "none"
    if program.get("why"):
        return f"{program['path']} does not run: {program['why']}"
    mpiexec = mpiexec_of_text(program["path"], program["text"])
    return f"{VENDOR_NAMES[mpiexec.vendor]} {mpiexec.version}, {mpiexec.path}"


def _python(python: Mapping[str, Any], numpy: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    yield "Python", python["why"] if "why" in python else f"{python['python']}, {python['path']}"
    if numpy:
        blas = ", ".join(f"{name} {version} ({threads} threads)" for name, version, threads in numpy.get("blas", ()))
        yield "NumPy", numpy["why"] if "why" in numpy else f"{numpy['version']}, {blas or 'BLAS unknown'}"


def _cupy(cupy: Mapping[str, Any] | None, ways: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if cupy is None:
        yield "CuPy", "not installed"
        return
    if "problem" in cupy:
        yield "CuPy", f"cannot be used: {cupy['problem']}"
        return
    works = "works" if cupy["cards"] and not cupy["fails"] else cupy["fails"] or "no usable GPU"
    yield "CuPy", f"{cupy['version']}, {works}"
    driver = f"driver for {cuda_version(cupy['driver'])}" if cupy["driver"] else "no driver"
    yield "CUDA", f"{driver}, CuPy for {cuda_version(cupy['runtime'])}"
    for number, card in enumerate(cupy["cards"]):
        memory = f"{card['free_bytes'] / 2**30:.1f} of {card['bytes'] / 2**30:.1f} GiB free"
        words = f"{card['name']}, {memory}, compute capability {card['capability']}, PCI {card['bus']}"
        yield f"CUDA device {number}", words
    if ways and "said" in ways:
        for way, why in (word(ways, 0, "transports") or {}).items():
            yield f"transport {way}", f"not possible: {why}" if why else "possible with 2 ranks here"
        if choice := word(ways, 0, "choice"):
            yield "transport auto", choice


def _cards(gpu: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for card in gpu["cards"]:
        yield f"GPU {card['index']}", f"{card['name']}, driver {card['driver']}"
    if not gpu["cards"]:
        yield "GPUs", gpu.get("problem") or "none"


def _network(names: Mapping[str, Any], network: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if names:
        addresses = names["resolved"].get(names["hostname"]) or ()
        yield "Host name", f"{names['hostname']}, which is {', '.join(addresses) or 'not known here'}"
    for interface, link in network.get("interfaces", {}).items():
        if interface != "lo":
            words = [*link["addresses"]] or ["no address"]
            words += ["up" if link["is_up"] else "down", "virtual" if link["is_virtual"] else "a card"]
            words += [f"{link['speed_mbit']} Mbit/s"] if link["speed_mbit"] else []
            yield f"Network {interface}", ", ".join(words)


def _limits(
    processors: Mapping[str, Any] | None, shell: Mapping[str, Any] | None, resources: Mapping[str, Any] | None
) -> Iterator[tuple[str, str]]:
    if processors:
        quota = f", processor time for {processors['quota']:g}" if processors["quota"] else ""
        yield "Cores", f"{processors['usable']} usable of {processors['machine']}{quota}"
    if shell:
        files, locked = shell["limits"]["nofile"], shell["limits"]["memlock_bytes"]
        yield "Open files", f"at most {'unlimited' if files is None else files}"
        yield "Locked memory", f"at most {'unlimited' if locked is None else _mib(locked)}"
    if resources:
        room = resources["places"]["/dev/shm"]
        yield "/dev/shm", f"{_mib(room['free_bytes'])} free of {_mib(room['size_bytes'])}" if room else "not there"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
