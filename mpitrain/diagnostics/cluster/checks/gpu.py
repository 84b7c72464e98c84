"""NVIDIA cards: are all there, does the driver answer, are they well, and does a job see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from mpitrain.diagnostics.cluster.check import Ask, Check, Finding, NotHereError, NotSeenError, Seen
from mpitrain.diagnostics.cluster.collect import ClusterStep, PairStep

# Bits of the reasons why a card's clocks are low, as in nvml.h.
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the power supply",
}
_POWER_CAP = 0x04
# Events after which a card needs a reset or a repair, by NVIDIA's table of Xids.
_GRAVE_XIDS = {
    "48": "double-bit ECC error",
    "63": "a row is to be remapped",
    "64": "a row could not be remapped",
    "74": "NVLink error",
    "79": "the card has fallen off the bus",
    "94": "contained ECC error",
    "95": "uncontained ECC error",
    "119": "the card's firmware does not answer",
}
_RESET_XIDS = ("63", "94")  # done with after the next reset


def _gpu(seen: Seen, node: str) -> dict[str, Any]:
    found: dict[str, Any] = seen.node(node, "gpu")
    if not found["on_bus"] and not found["loaded"] and not found["cards"]:
        raise NotHereError("there is no NVIDIA card")
    return found


def _driver(seen: Seen, node: str) -> Iterator[Finding]:
    found = _gpu(seen, node)
    if "problem" not in found:
        return
    problem = found["problem"]
    if "version mismatch" in problem:
        remedy = "ssh {login} sudo reboot  # then keep updates away: sudo apt-mark hold the packages of the driver"
    elif not found["loaded"]:
        remedy = "ssh {login} 'sudo modprobe nvidia; sudo dmesg | grep -i -e nvidia -e nvrm | tail'"
    elif "nvidia-smi: No such file" in problem:
        remedy = "install nvidia-smi on {node}: it is in the package nvidia-utils (or nvidia-smi) of the driver"
    else:
        remedy = "ssh {login} 'sudo dmesg | grep -i nvrm | tail'  # a card that is lost comes back by a restart"
    yield Finding("fail", (node,), f"the driver does not answer: {problem}", "an answer of nvidia-smi", remedy=remedy)


def _inventory(seen: Seen, nodes: Sequence[str]) -> Iterator[Finding]:
    cards: dict[str, tuple[str, ...]] = {}
    drivers: dict[str, str] = {}
    without = []
    for node in nodes:
        try:
            found = _gpu(seen, node)
        except NotHereError:
            without.append(node)
            continue
        cards[node] = tuple(sorted(card["name"] for card in found["cards"]))
        drivers[node] = next((card["driver"] for card in found["cards"]), "")
        if found["on_bus"] > len(cards[node]):
            yield Finding(
                "fail",
                (node,),
                f"{found['on_bus']} NVIDIA cards are on the bus, {len(cards[node])} answer",
                "all",
                remedy="ssh {login} 'lspci -d 10de:; nvidia-smi -L; sudo dmesg | grep -i nvrm | tail'",
            )
    if not cards:
        raise NotHereError("no node has an NVIDIA card")
    for node in without:
        yield Finding("warn", (node,), "there is no NVIDIA card", "cards on all nodes or on none", remedy=_COMPARE)
    common = Counter(cards.values()).most_common(1)[0][0]
    driver = Counter(drivers.values()).most_common(1)[0][0]
    for node, own in cards.items():
        if own != common:
            found_text = f"the cards are {_list(own)}"
            yield Finding("warn", (node,), found_text, f"{_list(common)}, as on the others", remedy=_COMPARE)
        if drivers[node] != driver:
            allowed = f"{driver}, as on the others"
            yield Finding("warn", (node,), f"the driver is {drivers[node]}", allowed, remedy=_UPDATE)


_COMPARE = "ssh {login} nvidia-smi -L  # every rank gets the same work: the smallest card sets the pace"
_UPDATE = "ssh {login} nvidia-smi  # install the same driver on all nodes, then restart those that changed"


def _list(cards: Sequence[str]) -> str:
    return ", ".join(f"{number} x {name}" for name, number in Counter(cards).items()) or "none"


def _health(seen: Seen, node: str) -> Iterator[Finding]:
    found = _gpu(seen, node)
    for card in found["cards"]:
        name = f"card {card['index']}"
        if card["uncorrected"]:
            said = f"{name} has {card['uncorrected']} uncorrected memory errors since its driver was loaded"
            yield Finding("fail", (node,), said, "none", remedy=_reset(card))
        if card["failed"]:
            remedy = "ssh {login} nvidia-smi -q -d ROW_REMAPPER  # have the card replaced"
            yield Finding("fail", (node,), f"{name} has no spare rows of memory left", "a sound card", remedy=remedy)
        elif card["pending"]:
            said = f"{name} will take a row of memory out of use at its next reset"
            yield Finding("warn", (node,), said, "none waiting", remedy=_reset(card))
    for number, line in (found["xids"] or {}).items():
        if number in _GRAVE_XIDS:
            verdict = "warn" if number in _RESET_XIDS else "fail"
            said = f"the kernel's log has Xid {number} ({_GRAVE_XIDS[number]}): {line}"
            yield Finding(
                "warn" if verdict == "warn" else "fail", (node,), said, "none since its start", remedy=_RESTART
            )
    if found["xids"] is None:
        yield Finding("skip", (node,), "the kernel's log may not be read, so Xid events were not looked for")


_RESTART = "ssh {login} sudo reboot  # when no job runs; if it comes back: https://docs.nvidia.com/deploy/xid-errors/"


def _reset(card: dict[str, Any]) -> str:
    return f"ssh {{login}} sudo nvidia-smi --gpu-reset -i {card['index']}  # when no job runs"


def _throttle(seen: Seen, node: str) -> Iterator[Finding]:
    for card in _gpu(seen, node)["cards"]:
        reasons = card["reasons"]
        if reasons is None:
            yield Finding("skip", (node,), f"card {card['index']} does not say what slows it")
            continue
        slow = [text for bit, text in _SLOWDOWNS.items() if reasons & bit]
        degrees = "" if card["celsius"] is None else f" at {card['celsius']} C"
        if slow:
            said = f"card {card['index']} is slowed{degrees}: {', '.join(slow)}"
            remedy = "ssh {login} nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER  # fans, air, power cables"
            yield Finding("fail", (node,), said, "none of these", remedy=remedy)
        elif reasons & _POWER_CAP:
            said = f"card {card['index']} is at its power limit"
            remedy = "ssh {login} nvidia-smi -q -d POWER  # is a job running, or is the limit set low?"
            yield Finding("warn", (node,), said, "not while it is idle", remedy=remedy)
        if card["is_persistent"] is False:
            remedy = "ssh {login} sudo systemctl enable --now nvidia-persistenced"
            said = f"card {card['index']} has persistence off: its driver is loaded anew for every job"
            yield Finding("warn", (node,), said, "on", remedy=remedy)


def _counts(seen: Seen, node: str) -> Iterator[Finding]:
    cards = len(_gpu(seen, node)["cards"])
    found = seen.node(node, "gpu_counts")
    if "problem" in found:
        raise NotSeenError(f"the Python of jobs could not be asked: {found['problem']}")
    if not found["counts"]:
        raise NotHereError("the Python of jobs has no CuPy")
    for name, number in found["counts"].items():
        if number != cards:
            said = f"{name} sees {number} cards" if isinstance(number, int) else f"{name} fails: {number}"
            yield Finding("fail", (node,), said, f"{cards}, as nvidia-smi")


_SSH = ("SSH01", "SSH03", "SSH02", "PRB01")

ASKS = (
    Ask("gpu", "gpu", "login", seconds=25.0),
    Ask("gpu_counts", "gpu_counts", "job", lambda target, _host: {"python": f"{target.venv}/bin/python"}, seconds=18.0),
)
PAIRS: dict[str, PairStep] = {}
CLUSTER: dict[str, ClusterStep] = {}
CHECKS = (
    Check(
        "GPU02",
        "the NVIDIA driver answers",
        "quick",
        "node",
        _driver,
        uses=("gpu",),
        looks="nvidia-ml-py where the node's Python has it, else nvidia-smi.",
        why="After an update the library is newer than the running driver, and no job can use a card until a restart.",
        remedy="ssh {login} nvidia-smi",
        needs=_SSH,
    ),
    Check(
        "GPU01",
        "all nodes have the same NVIDIA cards and driver",
        "quick",
        "cluster",
        _inventory,
        uses=("gpu",),
        looks="Cards on the PCI bus (vendor 10de), cards that answer, their names, the driver's version.",
        why="A card that is missing makes a rank fail or take its neighbour's; a smaller one slows all ranks.",
        remedy="ssh {login} nvidia-smi -q",
        needs=(*_SSH, "GPU02"),
    ),
    Check(
        "GPU03",
        "the cards' memory is sound",
        "quick",
        "node",
        _health,
        uses=("gpu",),
        looks="Uncorrected ECC errors, remapped rows, and Xid events in the kernel's log.",
        why="A card with such errors ends jobs, or computes what is wrong.",
        remedy="ssh {login} nvidia-smi -q",
        needs=(*_SSH, "GPU02"),
    ),
    Check(
        "GPU04",
        "nothing slows the cards",
        "full",
        "node",
        _throttle,
        uses=("gpu",),
        looks="The reasons for low clocks, by bits; temperature; persistence mode.",
        why="Every rank waits for the slowest card.",
        remedy="ssh {login} nvidia-smi -q",
        needs=(*_SSH, "GPU02"),
    ),
    Check(
        "GPU05",
        "the Python of jobs sees every card",
        "full",
        "node",
        _counts,
        uses=("gpu", "gpu_counts"),
        looks="The number of cards that CuPy of the jobs' environment sees, against that of nvidia-smi.",
        why="A library that was built for another CUDA sees none, and training goes on without, or not at all.",
        remedy="ssh {login} 'env | grep CUDA_VISIBLE_DEVICES; nvidia-smi'  "
        "# is it built for another CUDA than this driver has?",
        needs=(*_SSH, "PRB02", "USR01", "GPU02"),
    ),
)
