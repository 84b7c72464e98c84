"""The installation of a machine: system, kernel, processor, packages."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from typing import Any

from mpitrain.diagnostics.node import children


def system(_wish: dict[str, Any]) -> dict[str, Any]:
    """Return system, kernel, processors, memory; and the packages as a number and a hash, which shows changes."""
    release = re.search(r'^PRETTY_NAME="?([^"\n]*)', children.text("/etc/os-release"), re.M)
    packages = children.output("dpkg-query", "-W") or children.output("rpm", "-qa")
    lines = sorted(packages.splitlines())
    memory = re.search(r"^MemTotal:\s+(\d+) kB", children.text("/proc/meminfo"), re.M)
    return {
        "system": release[1] if release else "",
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_mib": int(memory[1]) // 1024 if memory else None,
        "packages": f"{len(lines)} packages, {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:12]}",
    }


CALLS = {"system": system}
