"""What NVIDIA's tools say of the cards of a node. Nothing of theirs is loaded into this process: it could hang."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mpitrain.diagnostics.cluster.node import children

_SECONDS = 6.0
# Names of fields differ between drivers: the second is what it was before 535. A driver refuses a query with one
# field that it does not know.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "temperature.gpu",
    "persistence_mode",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.corrected.volatile.total",
)
# Another query of the tool, which older cards do not answer.
_ROWS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")

# The same by NVIDIA's own library for Python, where a Python has it; its names are stable where nvidia-smi's are not.
_NVML = """
import json
import pynvml as nvml
nvml.nvmlInit()
def ask(call, *arguments):
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None
def text(value):
    return value.decode() if isinstance(value, bytes) else value
cards = []
for index in range(nvml.nvmlDeviceGetCount()):
    card = nvml.nvmlDeviceGetHandleByIndex(index)
    rows = ask(nvml.nvmlDeviceGetRemappedRows, card)
    cards.append({
        "index": index,
        "name": text(nvml.nvmlDeviceGetName(card)),
        "driver": text(nvml.nvmlSystemGetDriverVersion()),
        "celsius": ask(nvml.nvmlDeviceGetTemperature, card, nvml.NVML_TEMPERATURE_GPU),
        "is_persistent": None if (mode := ask(nvml.nvmlDeviceGetPersistenceMode, card)) is None else bool(mode),
        "uncorrected": ask(nvml.nvmlDeviceGetTotalEccErrors, card, 1, 0),
        "corrected": ask(nvml.nvmlDeviceGetTotalEccErrors, card, 0, 0),
        "reasons": ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, card),
        "pending": None if rows is None else bool(rows[2]),
        "failed": None if rows is None else bool(rows[3]),
    })
print(json.dumps(cards))
"""
# What jobs see: the number of cards of each framework that this Python has.
_COUNT = """
import json
counts = {}
try:
    import cupy
    counts["CuPy"] = cupy.cuda.runtime.getDeviceCount()
except ImportError:
    pass
except Exception as error:
    counts["CuPy"] = str(error)
print(json.dumps(counts))
"""


def gpu(_wish: dict[str, Any]) -> dict[str, Any]:
    """The cards, by nvidia-ml-py where this Python has it, else by nvidia-smi."""
    cards = [
        path
        for path in Path("/sys/bus/pci/devices").glob("*")
        if children.text(f"{path}/vendor").strip() == "0x10de" and children.text(f"{path}/class").startswith("0x03")
    ]
    driver = re.search(r"Module\s+(?:for \S+\s+)?(\d+\.[\d.]+)", children.text("/proc/driver/nvidia/version"))
    found: dict[str, Any] = {
        "on_bus": len(cards),
        "loaded": driver.group(1) if driver else "",
        "cards": [],
    }
    if not cards and not driver and not Path("/dev/nvidiactl").exists():
        return found
    code, out, _ = children.run([sys.executable, "-I", "-c", _NVML], _SECONDS)
    if code == 0:
        return {**found, "cards": json.loads(out), **_log()}
    code, out, words = _query("gpu", (*_FIELDS, _REASONS[0]))
    if "not a valid field" in out + words:
        code, out, words = _query("gpu", (*_FIELDS, _REASONS[1]))
    if code != 0:
        said = (out + words).strip().splitlines()
        return {**found, "problem": " ".join(said[:2]) or f"nvidia-smi ended with code {code}", **_log()}
    rows_code, rows, _ = _query("remapped-rows", _ROWS)
    return {**found, "cards": read(out, rows if rows_code == 0 else ""), **_log()}


def counts(wish: dict[str, Any]) -> dict[str, Any]:
    """Framework -> how many cards it sees, or what it fails with. wish: python."""
    if not Path("/dev/nvidiactl").exists():
        return {"counts": {}}
    code, out, words = children.run([wish["python"], "-c", _COUNT], 15.0)
    if code != 0:
        return {"problem": " ".join((words or out).strip().splitlines()[-1:]) or f"code {code}"}
    return {"counts": json.loads(out.strip().splitlines()[-1])}


def _query(what: str, fields: tuple[str, ...]) -> tuple[int, str, str]:
    return children.run(["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"], _SECONDS)


def read(out: str, rows: str = "") -> list[dict[str, Any]]:
    """The answers of nvidia-smi, as lists of cards; what a card does not have, [N/A] or [Not Supported], is None."""
    remapped = {line.split(",")[0].strip(): line.split(",")[1:] for line in rows.splitlines() if line.count(",") == 2}
    found = []
    for line in out.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(_FIELDS) + 1:
            continue
        index, uuid, name, driver, celsius, persistent, uncorrected, corrected, reasons = fields
        pending, failed = (_yes(field) for field in remapped.get(uuid, ("", "")))
        found.append(
            {
                "index": int(index),
                "name": name,
                "driver": driver,
                "celsius": _number(celsius),
                "is_persistent": {"Enabled": True, "Disabled": False}.get(persistent),
                "uncorrected": _number(uncorrected),
                "corrected": _number(corrected),
                "reasons": _number(reasons),
                "pending": pending,
                "failed": failed,
            }
        )
    return found


def _number(field: str) -> int | None:
    try:
        return int(field, 0)
    except ValueError:
        return None


def _yes(field: str) -> bool | None:
    return {"Yes": True, "No": False, "1": True, "0": False}.get(field.strip())


def _log() -> dict[str, Any]:
    """Xid events of the kernel's log since its start: number -> the last message. None where we may not read it."""
    log = children.as_root("dmesg", "--notime", seconds=4.0)
    return {"xids": None if log is None else xids(log)}


def xids(log: str) -> dict[str, str]:
    """Xid -> its last line in a kernel's log."""
    return {match.group(1): match.group(0)[:160] for match in re.finditer(r"NVRM: Xid \([^)]*\): (\d+).*", log)}


CALLS = {"gpu": gpu, "gpu_counts": counts}
