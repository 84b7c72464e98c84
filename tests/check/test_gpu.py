"""The judges of NVIDIA cards, on made-up answers in the form of real ones, because no bed has a card.

Where the formats come from: the CSV of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`, its [N/A] and its
hexadecimal reasons are described by `nvidia-smi --help-query-gpu`, the remapped rows by `--help-query-remapped-rows`;
the words of a driver that does not answer were printed by real machines (github.com/intel/llvm, issue 17614;
github.com/NVIDIA/NVSentinel, issue 155); the bits of the reasons are those of nvml.h.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from check.made_up import here, judged, of_each, sound, verdicts
from mpitrain.check.check import Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.doctor import facts
from mpitrain.check.node.gpu import gpu, read, xids
from mpitrain.check.run import judge

HEALTHY = """\
0, GPU-a895322e, NVIDIA H100 80GB HBM3, 550.90.07, 31, Enabled, 0, 0, 0x0000000000000001
1, GPU-455e672a, NVIDIA H100 80GB HBM3, 550.90.07, 33, Enabled, 0, 2, 0x0000000000000001
"""
DESKTOP = "0, GPU-d66f99e9, NVIDIA GeForce RTX 3090, 470.223.02, 45, Enabled, [N/A], [N/A], 0x0000000000000001\n"
ROWS = "GPU-a895322e, No, No\nGPU-455e672a, No, No\n"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch NVML library version: 550.144"
FALLEN = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"
CARD = {"name": "NVIDIA H100", "capability": "9.0", "free_bytes": 79 << 30, "bytes": 80 << 30, "bus": "0000:01:00.0"}
CUPY = {"version": "14.0", "driver": 13000, "runtime": 13020, "cards": [CARD, CARD], "fails": "", "chosen": None}
NOTHING = {"on_bus": 0, "loaded": "", "cards": []}
ALL = [name for name in CHECKS if name.startswith("GPU") and name != "GPU07"]


def answer(out: str = HEALTHY, rows: str = ROWS, log: str = "", **fields: Any) -> dict[str, Any]:
    cards = read(out, rows)
    return {"on_bus": len(cards), "loaded": "550.90.07", "cards": cards, "xids": xids(log), **fields}


def cluster(gpu: Any = None, cupy: Any = CUPY) -> Seen:
    """Three nodes with sound cards, but for the answers of the second one."""
    seen = of_each(3, {"gpu": answer(), "cupy": CUPY})
    seen.nodes["node2"] = {"gpu": gpu or answer(), "cupy": cupy}
    return seen


def only(name: str, seen: Seen, verdict: str, found: str, remedy: str = "") -> None:
    (result,) = judged(name, seen)
    assert (result.verdict, result.where) == (verdict, ("node2",))
    assert found in result.observed and remedy in result.remedy
    assert verdict not in ("warn", "fail") or (result.remedy and "node2" not in result.observed)


@pytest.mark.parametrize("name", ALL)
def test_healthy_cards_no_cards_and_no_answer(name: str) -> None:
    sound(name, cluster())
    assert verdicts(name, of_each(3, {"gpu": NOTHING, "cupy": CUPY})) == {"skip"}
    assert verdicts(name, of_each(3, {"gpu": {"error": "no answer within 25 s"}, "cupy": CUPY})) == {"unknown"}


def test_what_a_card_does_not_have_is_none() -> None:
    (card,) = read(DESKTOP)
    assert card["name"] == "NVIDIA GeForce RTX 3090"
    assert (card["uncorrected"], card["pending"], card["failed"]) == (None, None, None)
    assert (card["celsius"], card["reasons"], card["is_persistent"]) == (45, 1, True)


@pytest.mark.parametrize(
    ("loaded", "problem", "remedy"),
    [
        ("550.120", MISMATCH, "ssh 10.0.0.2 sudo reboot"),
        ("", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "sudo modprobe nvidia"),
        ("550.120", "nvidia-smi: No such file or directory", "install nvidia-smi on node2"),
        ("550.120", "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.", "dmesg"),
    ],
)
def test_a_driver_that_does_not_answer(loaded: str, problem: str, remedy: str) -> None:
    seen = cluster({"on_bus": 2, "loaded": loaded, "cards": [], "xids": {}, "problem": problem})
    only("GPU02", seen, "fail", problem, remedy)
    (blocked,) = (one for one in judge([CHECKS["GPU02"], CHECKS["GPU03"]], seen) if one.verdict == "blocked")
    assert (blocked.check.id, blocked.blocked_by) == ("GPU03", "GPU02")


def with_text(*texts: str, **fields: Any) -> Seen:
    """The cards say another text in place of the first one, at one place."""
    return cluster(answer(HEALTHY.replace(*texts, 1), **fields))


def slowed(reasons: str) -> Seen:
    return with_text("0x0000000000000001", f"0x00000000000000{reasons}" if reasons != "[N/A]" else reasons)


def event(number: int) -> Seen:
    return cluster(answer(log=FALLEN.replace("79", str(number))))


MIXED = with_text("1, GPU-455e672a, NVIDIA H100 80GB HBM3", "1, GPU-455e672a, NVIDIA A100-PCIE-40GB")
OTHER_DRIVER = cluster(answer(HEALTHY.replace("550.90.07", "550.120")))
OLD = cluster(cupy={**CUPY, "driver": 12080})
PROBLEM = "ImportError: libcuda"


@pytest.mark.parametrize(
    ("name", "seen", "verdict", "found", "remedy"),
    [
        ("GPU01", cluster(answer(on_bus=3)), "fail", "3 NVIDIA cards are on the bus, 2 answer", "lspci"),
        ("GPU01", OTHER_DRIVER, "warn", "the driver is 550.120", ""),
        ("GPU01", MIXED, "warn", "1 x NVIDIA A100-PCIE-40GB, 1 x NVIDIA H100 80GB HBM3", ""),
        ("GPU01", cluster(NOTHING), "warn", "there is no NVIDIA card", ""),
        ("GPU03", with_text("Enabled, 0, 2", "Enabled, 3, 2"), "fail", "card 1 has 3 uncorrected mem", "-reset -i 1"),
        ("GPU03", cluster(answer(rows=ROWS.replace("2a, No", "2a, Yes"))), "warn", "card 1 will take a row", ""),
        ("GPU03", cluster(answer(rows=ROWS.replace("2e, No, No", "2e, Yes, Yes"))), "fail", "0 has no spare rows", ""),
        ("GPU03", event(79), "fail", "Xid 79 (the card has fallen off the bus)", "sudo reboot"),
        ("GPU03", event(63), "warn", "Xid 63", ""),
        ("GPU03", cluster(answer(xids=None)), "skip", "may not be read", ""),
        ("GPU04", slowed("04"), "warn", "card 0 is at its power limit", ""),
        ("GPU04", slowed("48"), "fail", "0 is slowed at 31 C: hardware slowdown, hardware thermal slowdown", ""),
        ("GPU04", slowed("20"), "fail", "software thermal slowdown", ""),
        ("GPU04", slowed("80"), "fail", "power brake", ""),
        ("GPU04", slowed("[N/A]"), "skip", "does not say", ""),
        ("GPU04", with_text("Enabled", "Disabled"), "warn", "card 0 has persistence off", "nvidia-persistenced"),
        ("GPU05", cluster(cupy={**CUPY, "cards": []}), "fail", "CuPy sees 0 cards", "CUDA_VISIBLE_DEVICES"),
        ("GPU05", cluster(cupy={**CUPY, "cards": [], "fails": "cudaError"}), "fail", "CuPy 14.0 fails: cudaError", ""),
        ("GPU05", cluster(cupy={"problem": PROBLEM}), "fail", f"CuPy cannot be used: {PROBLEM}", ""),
        ("GPU05", cluster(cupy=None), "skip", "no CuPy", ""),
        ("GPU05", cluster(cupy={"error": "no answer in time"}), "unknown", "no answer in time", ""),
        ("GPU05", cluster(cupy={**CUPY, "cards": [CARD], "chosen": "0"}), "fail", "CuPy sees 1 cards", ""),
        ("GPU06", cluster(cupy=None), "warn", "2 NVIDIA cards, but no CuPy", "-m pip install cupy-cuda13x"),
        ("GPU06", OLD, "warn", "for CUDA 12.8, CuPy for CUDA 13.2", "cupy-cuda12x"),
    ],
)
def test_findings(name: str, seen: Seen, verdict: str, found: str, remedy: str) -> None:
    only(name, seen, verdict, found, remedy)


def test_what_is_no_finding() -> None:
    sound("GPU03", event(13))
    # Cards that somebody chose for this shell.
    (result,) = judged("GPU05", here({"gpu": answer(), "cupy": {**CUPY, "cards": [CARD], "chosen": "0"}}))
    assert (result.verdict, result.observed) == ("skip", "CUDA_VISIBLE_DEVICES limits the cards")


WAYS = {"transports": {"peer": "", "nccl": "ranks 0, 1 share one GPU"}, "choice": "below 512 KiB: peer", "error": ""}


def ways(**fields: Any) -> Seen:
    seen = cluster()
    done = {"code": 0, "seconds": 1.0, "said": {"0": [WAYS], "1": []}, "error_text": ""}
    seen.cluster["gpu ways"] = {"node1": done, "node2": {**done, **fields}, "node3": done}
    return seen


def test_ways_of_two_ranks() -> None:
    sound("GPU07", ways())
    only("GPU07", ways(code=124, seconds=120.0, said={}), "warn", "no end within 120 s", "mpitrain.forecast.on_gpus")
    only("GPU07", ways(said={"0": [{**WAYS, "error": "no way"}]}), "warn", "on a GPU: no way", "-n 2 -m")
    (skipped,) = judged("GPU07", here({"cupy": {**CUPY, "cards": []}}))
    assert skipped.verdict == "skip"


@pytest.mark.parametrize(("code", "names"), [(0, ["NVIDIA GeForce RTX 3090"]), (9, [])])
def test_cards_on_no_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, names: list[str]) -> None:
    """Linux within Windows shows no cards on the bus. nvidia-smi on a machine without a card is no finding."""
    if any(gpu({}).values()):
        pytest.skip("there is a card here")
    (tmp_path / "out").write_text("NVIDIA-SMI has failed" if code else DESKTOP)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat {tmp_path}/out\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    seen = here({"gpu": gpu({}), "cupy": None})
    assert [card["name"] for card in seen.node("node1", "gpu")["cards"]] == names
    assert [result.verdict for result in judged("GPU02", seen)] == ([] if names else ["skip"])
    assert [result.verdict for result in judged("GPU06", seen)] == ["warn" if names else "skip"]


def test_what_is_said_of_cards() -> None:
    seen = here({"gpu": answer(), "cupy": CUPY})
    seen.cluster["gpu ways"] = {"node1": ways().cluster["gpu ways"]["node1"]}
    card = "NVIDIA H100, 79.0 of 80.0 GiB free, compute capability 9.0, PCI 0000:01:00.0"
    assert facts(seen, "node1") == [
        ("CuPy", "14.0, works"),
        ("CUDA", "driver for 13.0, CuPy for 13.2"),
        ("CUDA device 0", card),
        ("CUDA device 1", card),
        ("transport peer", "possible with 2 ranks here"),
        ("transport nccl", "not possible: ranks 0, 1 share one GPU"),
        ("transport auto", "below 512 KiB: peer"),
        ("GPU 0", "NVIDIA H100 80GB HBM3, driver 550.90.07"),
        ("GPU 1", "NVIDIA H100 80GB HBM3, driver 550.90.07"),
    ]
