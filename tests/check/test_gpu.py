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

from check.made_up import here
from check.made_up import seen as made_up
from mpitrain.check.check import Result, Seen
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
NODES = ("node1", "node2", "node3")
CARD = {"name": "NVIDIA H100", "capability": "9.0", "free_bytes": 79 << 30, "bytes": 80 << 30, "bus": "0000:01:00.0"}
CUPY = {"version": "14.0", "driver": 13000, "runtime": 13020, "cards": [CARD, CARD], "fails": "", "chosen": None}


def answer(out: str = HEALTHY, rows: str = ROWS, log: str = "") -> dict[str, Any]:
    cards = read(out, rows)
    return {"on_bus": len(cards), "loaded": "550.90.07", "cards": cards, "xids": xids(log)}


def cluster(**others: Any) -> Seen:
    seen = made_up(3)
    for name in NODES:
        seen.nodes[name] = {"gpu": others.get(name, answer()), "cupy": CUPY}
    return seen


def judged(name: str, seen: Seen) -> list[Result]:
    return [result for result in judge([CHECKS[name]], seen) if result.verdict != "pass"]


def only(name: str, seen: Seen, verdict: str, found: str, remedy: str = "") -> None:
    (result,) = judged(name, seen)
    assert (result.verdict, result.where) == (verdict, ("node2",))
    assert found in result.observed
    assert remedy in result.remedy
    assert verdict not in ("warn", "fail") or (result.remedy and "node2" not in result.observed)


ALL = [name for name in CHECKS if name.startswith("GPU") and name != "GPU07"]


@pytest.mark.parametrize("name", ALL)
def test_healthy_cards(name: str) -> None:
    assert judged(name, cluster()) == []


@pytest.mark.parametrize("name", ALL)
def test_no_cards(name: str) -> None:
    nothing = {"on_bus": 0, "loaded": "", "cards": []}
    assert {one.verdict for one in judge([CHECKS[name]], cluster(**dict.fromkeys(NODES, nothing)))} == {"skip"}


@pytest.mark.parametrize("name", ALL)
def test_without_an_answer_nothing_is_known(name: str) -> None:
    error = {"error": "no answer within 25 s"}
    assert {one.verdict for one in judge([CHECKS[name]], cluster(**dict.fromkeys(NODES, error)))} == {"unknown"}


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
    one = {"on_bus": 2, "loaded": loaded, "cards": [], "xids": {}, "problem": problem}
    only("GPU02", cluster(node2=one), "fail", problem, remedy)
    results = judge([CHECKS["GPU02"], CHECKS["GPU03"]], cluster(node2=one))
    (blocked,) = (result for result in results if result.verdict == "blocked")
    assert (blocked.check.id, blocked.blocked_by) == ("GPU03", "GPU02")


def test_cards_that_differ() -> None:
    lost = {**answer(), "on_bus": 3}
    only("GPU01", cluster(node2=lost), "fail", "3 NVIDIA cards are on the bus, 2 answer", "lspci")
    other = answer(HEALTHY.replace("550.90.07", "550.120"))
    only("GPU01", cluster(node2=other), "warn", "the driver is 550.120")
    mixed = answer(HEALTHY.replace("1, GPU-455e672a, NVIDIA H100 80GB HBM3", "1, GPU-455e672a, NVIDIA A100-PCIE-40GB"))
    only("GPU01", cluster(node2=mixed), "warn", "1 x NVIDIA A100-PCIE-40GB, 1 x NVIDIA H100 80GB HBM3")
    only("GPU01", cluster(node2={"on_bus": 0, "loaded": "", "cards": []}), "warn", "there is no NVIDIA card")


def test_memory_that_is_not_sound() -> None:
    bad = answer(HEALTHY.replace("Enabled, 0, 2", "Enabled, 3, 2"))
    only("GPU03", cluster(node2=bad), "fail", "card 1 has 3 uncorrected memory errors", "--gpu-reset -i 1")
    only("GPU03", cluster(node2=answer(rows=ROWS.replace("2a, No", "2a, Yes"))), "warn", "card 1 will take a row")
    only(
        "GPU03",
        cluster(node2=answer(rows=ROWS.replace("2e, No, No", "2e, Yes, Yes"))),
        "fail",
        "card 0 has no spare rows",
    )


def test_events_of_the_kernel() -> None:
    only("GPU03", cluster(node2=answer(log=FALLEN)), "fail", "Xid 79 (the card has fallen off the bus)", "sudo reboot")
    only("GPU03", cluster(node2=answer(log=FALLEN.replace("79", "63"))), "warn", "Xid 63")
    assert judged("GPU03", cluster(node2=answer(log=FALLEN.replace("79", "13")))) == []
    only("GPU03", cluster(node2={**answer(), "xids": None}), "skip", "may not be read")


@pytest.mark.parametrize(
    ("reasons", "verdict", "found"),
    [
        ("0x0000000000000004", "warn", "card 0 is at its power limit"),
        ("0x0000000000000048", "fail", "card 0 is slowed at 31 C: hardware slowdown, hardware thermal slowdown"),
        ("0x0000000000000020", "fail", "software thermal slowdown"),
        ("0x0000000000000080", "fail", "power brake"),
        ("[N/A]", "skip", "does not say"),
    ],
)
def test_what_slows_a_card(reasons: str, verdict: str, found: str) -> None:
    only("GPU04", cluster(node2=answer(HEALTHY.replace("0x0000000000000001", reasons, 1))), verdict, found)


def test_persistence() -> None:
    off = answer(HEALTHY.replace("Enabled", "Disabled", 1))
    only("GPU04", cluster(node2=off), "warn", "card 0 has persistence off", "nvidia-persistenced")


def with_cupy(cupy: dict[str, Any] | None) -> Seen:
    seen = cluster()
    seen.nodes["node2"]["cupy"] = cupy
    return seen


def test_what_a_job_sees() -> None:
    only("GPU05", with_cupy({**CUPY, "cards": []}), "fail", "CuPy sees 0 cards", "CUDA_VISIBLE_DEVICES")
    broken = with_cupy({**CUPY, "cards": [], "fails": "cudaErrorInsufficientDriver"})
    only("GPU05", broken, "fail", "CuPy 14.0 fails: cudaErrorInsufficientDriver")
    only("GPU05", with_cupy({"problem": "ImportError: libcuda"}), "fail", "CuPy cannot be used: ImportError: libcuda")
    only("GPU05", with_cupy(None), "skip", "no CuPy")
    only("GPU05", with_cupy({"error": "no answer in time"}), "unknown", "no answer in time")


def test_cards_that_somebody_chose_for_this_shell() -> None:
    chosen = {**CUPY, "cards": [CARD], "chosen": "0"}
    only("GPU05", with_cupy(chosen), "fail", "CuPy sees 1 cards")
    seen = here({"gpu": answer(), "cupy": chosen})
    (result,) = judged("GPU05", seen)
    assert (result.verdict, result.observed) == ("skip", "CUDA_VISIBLE_DEVICES limits the cards")


def test_cards_without_cupy() -> None:
    only("GPU06", with_cupy(None), "warn", "2 NVIDIA cards, but no CuPy", "-m pip install cupy-cuda13x")


def test_a_driver_that_is_too_old() -> None:
    only("GPU06", with_cupy({**CUPY, "driver": 12080}), "warn", "for CUDA 12.8, CuPy for CUDA 13.2", "cupy-cuda12x")


WAYS = {"transports": {"peer": "", "nccl": "ranks 0, 1 share one GPU"}, "choice": "below 512 KiB: peer", "error": ""}


def ways(**fields: Any) -> Seen:
    seen = cluster()
    done = {"code": 0, "seconds": 1.0, "said": {"0": [WAYS], "1": []}, "error_text": ""}
    seen.cluster["gpu ways"] = dict.fromkeys(NODES, done) | {"node2": {**done, **fields}}
    return seen


def test_ways_of_two_ranks() -> None:
    assert judged("GPU07", ways()) == []
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
    assert facts(seen, "node1") == [
        ("CuPy", "14.0, works"),
        ("CUDA", "driver for 13.0, CuPy for 13.2"),
        ("CUDA device 0", "NVIDIA H100, 79.0 of 80.0 GiB free, compute capability 9.0, PCI 0000:01:00.0"),
        ("CUDA device 1", "NVIDIA H100, 79.0 of 80.0 GiB free, compute capability 9.0, PCI 0000:01:00.0"),
        ("transport peer", "possible with 2 ranks here"),
        ("transport nccl", "not possible: ranks 0, 1 share one GPU"),
        ("transport auto", "below 512 KiB: peer"),
        ("GPU 0", "NVIDIA H100 80GB HBM3, driver 550.90.07"),
        ("GPU 1", "NVIDIA H100 80GB HBM3, driver 550.90.07"),
    ]
