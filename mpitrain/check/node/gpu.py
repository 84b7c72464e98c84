"""The answers of NVIDIA's tools about a node's cards. This process does not load their libraries, because they could
hang."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from mpitrain import facts
from mpitrain.check.node import children

_SECONDS = 6.0
# Names of fields differ between drivers: the second is the name before 535. A driver refuses a query with an unknown
# field.
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
# A separate query, which older cards do not answer.
_ROWS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")

# Ask NVIDIA's own library for Python too, if it is installed. Its names are stable, unlike nvidia-smi's.
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
# The cards that jobs see. This runs in a child, because a broken CUDA may end the process that imports CuPy.
_CUPY = """
import json, sys
try:
    import cupy
except ModuleNotFoundError as error:
    if error.name != "cupy":
        raise
    print("null")
    sys.exit()
runtime = cupy.cuda.runtime
answer = {"version": cupy.__version__, "driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion(),
          "cards": [], "fails": ""}
try:
    for number in range(runtime.getDeviceCount()):
        properties, device = runtime.getDeviceProperties(number), cupy.cuda.Device(number)
        with device:
            free, total = device.mem_info
        capability = f"{properties['major']}.{properties['minor']}"
        answer["cards"].append({"name": properties["name"].decode(), "capability": capability, "free_bytes": free,
                                "bytes": total, "bus": device.pci_bus_id})
    if answer["cards"] and cupy.arange(3).sum().item() != 3:
        answer["fails"] = "0 + 1 + 2 is not 3 on card 0"
except Exception as error:
    answer["fails"] = str(error) or type(error).__name__
print(json.dumps(answer))
"""
_CUPY_SECONDS = 40.0


def gpu(_wish: dict[str, Any]) -> dict[str, Any]:
    """Return the cards, from nvidia-ml-py if this Python has it, otherwise from nvidia-smi."""
    nvidia = facts.nvidia()
    seen: dict[str, Any] = {"on_bus": nvidia["cards"], "loaded": nvidia["driver"], "cards": []}
    if not nvidia["cards"] and not nvidia["driver"] and not Path("/dev/nvidiactl").exists():
        # Linux within Windows also has cards, but not on a bus, and without its own driver.
        code, out, _ = _query("gpu", (*_FIELDS, _REASONS[0]))
        return {**seen, "cards": read(out), **_log()} if code == 0 and read(out) else seen
    code, out, _ = children.run([sys.executable, "-I", "-c", _NVML], _SECONDS)
    if code == 0:
        return {**seen, "cards": json.loads(out), **_log()}
    code, out, words = _query("gpu", (*_FIELDS, _REASONS[0]))
    if "not a valid field" in out + words:
        code, out, words = _query("gpu", (*_FIELDS, _REASONS[1]))
    if code != 0:
        said = (out + words).strip().splitlines()
        return {**seen, "problem": " ".join(said[:2]) or f"nvidia-smi ended with code {code}", **_log()}
    rows_code, rows, _ = _query("remapped-rows", _ROWS)
    return {**seen, "cards": read(out, rows if rows_code == 0 else ""), **_log()}


def cupy(wish: dict[str, Any]) -> dict[str, Any] | None:
    """Return CuPy's versions and cards in wish["python"]; a "problem" if its import fails; None without CuPy."""
    code, out, words = children.run([wish["python"], "-c", _CUPY], _CUPY_SECONDS)
    if code != 0:
        return {"problem": " ".join((words or out).strip().splitlines()[-1:]) or f"its import ended with code {code}"}
    answer: dict[str, Any] | None = json.loads(out.strip().splitlines()[-1])
    return None if answer is None else {**answer, "chosen": os.environ.get("CUDA_VISIBLE_DEVICES")}


def _query(query: str, fields: tuple[str, ...]) -> tuple[int, str, str]:
    return children.run(
        ["nvidia-smi", f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits"], _SECONDS
    )


def read(out: str, rows: str = "") -> list[dict[str, Any]]:
    """Parse nvidia-smi's answers into lists of cards. A missing value, [N/A] or [Not Supported], becomes None."""
    remapped = {line.split(",")[0].strip(): line.split(",")[1:] for line in rows.splitlines() if line.count(",") == 2}
    cards = []
    for line in out.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(_FIELDS) + 1:
            continue
        index, uuid, name, driver, celsius, persistent, uncorrected, corrected, reasons = fields
        pending, failed = (_yes(field) for field in remapped.get(uuid, ("", "")))
        cards.append(
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
    return cards


def _number(field: str) -> int | None:
    try:
        return int(field, 0)
    except ValueError:
        return None


def _yes(field: str) -> bool | None:
    return {"Yes": True, "No": False, "1": True, "0": False}.get(field.strip())


def _log() -> dict[str, Any]:
    """Return the Xid events in the kernel's log since its start, the last message by number; None if not readable."""
    log = children.as_root("dmesg", "--notime", seconds=4.0)
    return {"xids": None if log is None else xids(log)}


def xids(log: str) -> dict[str, str]:
    """Return the last line of each Xid in a kernel's log."""
    return {match.group(1): match.group(0)[:160] for match in re.finditer(r"NVRM: Xid \([^)]*\): (\d+).*", log)}


CALLS = {"gpu": gpu, "cupy": cupy}
