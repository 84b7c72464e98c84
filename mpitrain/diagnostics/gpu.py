"""What CUDA says of the GPUs to CuPy, and by which ways two ranks on this machine can add up arrays on them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from mpitrain.diagnostics.finding import Finding, ask
from mpitrain.diagnostics.mpi import run_two
from mpitrain.errors import LaunchError
from mpitrain.launch.libraries import find_mpiexec

# In a child: a broken CUDA installation may end the process that imports CuPy.
_PROBE = """
import json, sys
try:
    import cupy
except ModuleNotFoundError:
    print("null")
    sys.exit()
runtime = cupy.cuda.runtime
found = {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion(), "devices": [], "error": ""}
try:
    for number in range(runtime.getDeviceCount()):
        its, device = runtime.getDeviceProperties(number), cupy.cuda.Device(number)
        with device:
            free, total = device.mem_info
        capability = f"{its['major']}.{its['minor']}"
        found["devices"].append([its["name"].decode(), capability, free, total, device.pci_bus_id])
except runtime.CUDARuntimeError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""
_PROBE_SECONDS, _TRANSPORTS_SECONDS = 60.0, 120.0
_TRANSPORTS = [sys.executable, "-P", "-m", "mpitrain.bench.transports"]


@dataclass(frozen=True)
class Facts:
    """CUDA and the transports; all empty where CuPy is not installed."""

    driver: int = 0  # the newest CUDA that the driver has, as 13000; 0: no driver
    runtime: int = 0  # CuPy's CUDA
    devices: list[list[Any]] = field(default_factory=list)  # name, capability, free and all bytes, PCI address
    error: str = ""  # why CUDA sees none
    transports: dict[str, str] = field(default_factory=dict)  # why each is not possible; "" where it is
    choice: str = ""  # what `auto` takes, in words
    transports_error: str = ""  # why they could not be tried

    def lines(self) -> list[tuple[str, str]]:
        """For people."""
        if not self.runtime:
            return []
        driver = f"driver for {_version(self.driver)}" if self.driver else "no driver"
        lines = [("CUDA", f"{driver}, CuPy for {_version(self.runtime)}")]
        for number, (name, capability, free, total, bus) in enumerate(self.devices):
            memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
            lines.append((f"CUDA device {number}", f"{name}, {memory}, compute capability {capability}, PCI {bus}"))
        for name, why in self.transports.items():
            lines.append((f"transport {name}", f"not possible: {why}" if why else "possible with 2 ranks here"))
        if self.choice:
            lines.append(("transport auto", self.choice))
        if self.transports_error:
            lines.append(("transports", f"not tried: {self.transports_error}"))
        return lines


def collect() -> Facts:
    """Ask CUDA, and where there is a GPU let two ranks try the transports."""
    output, error = ask([sys.executable, "-c", _PROBE], timeout_seconds=_PROBE_SECONDS)
    if output is None:
        return Facts(error=error)
    found = json.loads(output)
    if found is None:
        return Facts()
    transports: dict[str, str] = {}
    choice = problem = ""
    if found["devices"]:
        try:
            text, problem = run_two(find_mpiexec(), _TRANSPORTS, _TRANSPORTS_SECONDS)
        except LaunchError as error:
            text, problem = None, str(error).splitlines()[0]
        for line in (text or "").splitlines():
            if line.startswith("{"):
                answer = json.loads(line)
                transports, choice, problem = answer["transports"], answer["choice"], answer["error"]
    return Facts(**found, transports=transports, choice=choice, transports_error=problem)


def judge(facts: Facts) -> list[Finding]:
    """What keeps ranks from adding up arrays on GPUs that CUDA sees; python.py says what is wrong with CuPy itself."""
    findings = []
    if facts.driver and facts.driver // 1000 < facts.runtime // 1000:
        findings.append(
            Finding(
                "warn",
                f"the NVIDIA driver is for CUDA {_version(facts.driver)}, CuPy for CUDA {_version(facts.runtime)}",
                "CuPy can use no GPU with an older driver than its own CUDA.",
                f"{sys.executable} -m pip install cupy-cuda{facts.driver // 1000}x",
            )
        )
    if facts.devices and facts.transports_error:
        findings.append(
            Finding(
                "warn",
                f"two ranks could not try the ways to add up arrays on a GPU: {facts.transports_error}",
                "Training with device arrays on several ranks will not start.",
                f"mpitrain run -n 2 -m {_TRANSPORTS[-1]}",
            )
        )
    return findings


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
