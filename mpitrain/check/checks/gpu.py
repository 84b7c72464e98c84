"""NVIDIA cards: are all present, does the driver answer, are they healthy, and does a job see them?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from mpitrain.check.check import BY_SSH, Ask, Check, Finding, NotHereError, Seen, Verdict, as_user, usual

# The bits for the reasons why a card's clocks are low, as in nvml.h.
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the power supply",
}
_POWER_CAP = 0x04
# The events after which a card needs a reset or a repair, from NVIDIA's table of Xids.
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
_RESET_XIDS = ("63", "94")  # the next reset clears these


def _gpu(seen: Seen, node: str) -> dict[str, Any]:
    answer: dict[str, Any] = seen.node(node, "gpu")
    if not answer["on_bus"] and not answer["loaded"] and not answer["cards"]:
        raise NotHereError("there is no NVIDIA card")
    return answer


def _driver(seen: Seen, node: str) -> Iterator[Finding]:
    gpu = _gpu(seen, node)
    if "problem" not in gpu:
        return
    problem = gpu["problem"]
    if "version mismatch" in problem:
        remedy = "ssh {login} sudo reboot  # then prevent updates: sudo apt-mark hold the packages of the driver"
    elif not gpu["loaded"]:
        remedy = "ssh {login} 'sudo modprobe nvidia; sudo dmesg | grep -i -e nvidia -e nvrm | tail'"
    elif "nvidia-smi: No such file" in problem:
        remedy = "install nvidia-smi on {node}: it is in the package nvidia-utils (or nvidia-smi) of the driver"
    else:
        remedy = "ssh {login} 'sudo dmesg | grep -i nvrm | tail'  # a lost card comes back after a restart"
    yield Finding("fail", f"the driver does not answer: {problem}", "an answer of nvidia-smi", remedy=remedy)


def _inventory(seen: Seen, nodes: Sequence[str]) -> Iterator[Finding]:
    cards: dict[str, tuple[str, ...]] = {}
    drivers: dict[str, str] = {}
    without = []
    for node in nodes:
        try:
            gpu = _gpu(seen, node)
        except NotHereError:
            without.append(node)
            continue
        cards[node] = tuple(sorted(card["name"] for card in gpu["cards"]))
        drivers[node] = next((card["driver"] for card in gpu["cards"]), "")
        if gpu["on_bus"] > len(cards[node]):
            yield Finding(
                "fail",
                f"{gpu['on_bus']} NVIDIA cards are on the bus, {len(cards[node])} answer",
                "all",
                remedy="ssh {login} 'lspci -d 10de:; nvidia-smi -L; sudo dmesg | grep -i nvrm | tail'",
                where=(node,),
            )
    if not cards:
        raise NotHereError("no node has an NVIDIA card")
    for node in without:
        yield Finding(
            "warn", "there is no NVIDIA card", "cards on all nodes or on none", remedy=_COMPARE, where=(node,)
        )
    common, driver = (usual(values, seen.target.head) for values in (cards, drivers))
    for node, own in cards.items():
        if own != common:
            found_text = f"the cards are {_list(own)}"
            yield Finding("warn", found_text, f"{_list(common)}, as on the others", remedy=_COMPARE, where=(node,))
        if drivers[node] != driver:
            allowed = f"{driver}, as on the others"
            yield Finding("warn", f"the driver is {drivers[node]}", allowed, remedy=_UPDATE, where=(node,))


_COMPARE = "ssh {login} nvidia-smi -L  # every rank gets the same work: the smallest card sets the pace"
_UPDATE = "ssh {login} nvidia-smi  # install the same driver on all nodes, then restart those that changed"


def _list(cards: Sequence[str]) -> str:
    return ", ".join(f"{number} x {name}" for name, number in Counter(cards).items()) or "none"


def _health(seen: Seen, node: str) -> Iterator[Finding]:
    gpu = _gpu(seen, node)
    for card in gpu["cards"]:
        name = f"card {card['index']}"
        if card["uncorrected"]:
            said = f"{name} has {card['uncorrected']} uncorrected memory errors since its driver was loaded"
            yield Finding("fail", said, "none", remedy=_reset(card))
        if card["failed"]:
            remedy = "ssh {login} nvidia-smi -q -d ROW_REMAPPER  # have the card replaced"
            yield Finding("fail", f"{name} has no spare rows of memory left", "a sound card", remedy=remedy)
        elif card["pending"]:
            said = f"{name} will take a row of memory out of use at its next reset"
            yield Finding("warn", said, "none waiting", remedy=_reset(card))
    for number, line in (gpu["xids"] or {}).items():
        if number in _GRAVE_XIDS:
            verdict: Verdict = "warn" if number in _RESET_XIDS else "fail"
            said = f"the kernel's log has Xid {number} ({_GRAVE_XIDS[number]}): {line}"
            yield Finding(verdict, said, "none since its start", remedy=_RESTART)
    if gpu["xids"] is None:
        yield Finding("skip", "the kernel's log may not be read, so Xid events cannot be found")


_RESTART = "ssh {login} sudo reboot  # when no job runs; if it comes back: https://docs.nvidia.com/deploy/xid-errors/"


def _reset(card: dict[str, Any]) -> str:
    return f"ssh {{login}} sudo nvidia-smi --gpu-reset -i {card['index']}  # when no job runs"


def _throttle(seen: Seen, node: str) -> Iterator[Finding]:
    for card in _gpu(seen, node)["cards"]:
        reasons = card["reasons"]
        if reasons is None:
            yield Finding("skip", f"card {card['index']} does not say what slows it")
            continue
        slow = [text for bit, text in _SLOWDOWNS.items() if reasons & bit]
        degrees = "" if card["celsius"] is None else f" at {card['celsius']} C"
        if slow:
            said = f"card {card['index']} is slowed{degrees}: {', '.join(slow)}"
            remedy = "ssh {login} nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER  # fans, air, power cables"
            yield Finding("fail", said, "none of these", remedy=remedy)
        elif reasons & _POWER_CAP:
            said = f"card {card['index']} is at its power limit"
            remedy = "ssh {login} nvidia-smi -q -d POWER  # is a job running, or is the limit set low?"
            yield Finding("warn", said, "not while it is idle", remedy=remedy)
        if card["is_persistent"] is False:
            remedy = "ssh {login} sudo systemctl enable --now nvidia-persistenced"
            said = f"card {card['index']} has persistence off: its driver is loaded again for every job"
            yield Finding("warn", said, "on", remedy=remedy)


def _cupy(seen: Seen, node: str) -> Iterator[Finding]:
    cards, cupy = len(_gpu(seen, node)["cards"]), seen.node(node, "cupy")
    if cupy is None:
        raise NotHereError("the Python of jobs has no CuPy")
    if "problem" in cupy:
        yield Finding("fail", f"CuPy cannot be used: {cupy['problem']}", f"{cards} cards, as nvidia-smi")
    elif cupy["fails"]:
        yield Finding("fail", f"CuPy {cupy['version']} fails: {cupy['fails']}", f"{cards}, as nvidia-smi")
    elif cupy["chosen"] is not None and seen.target.is_here:
        raise NotHereError("CUDA_VISIBLE_DEVICES limits the cards")
    elif len(cupy["cards"]) != cards:
        yield Finding("fail", f"CuPy sees {len(cupy['cards'])} cards", f"{cards}, as nvidia-smi")


def _has_cupy(seen: Seen, node: str) -> Iterator[Finding]:
    cards, cupy = len(_gpu(seen, node)["cards"]), seen.node(node, "cupy")
    if cards and cupy is None:
        remedy = as_user(seen, seen.target.python, "-m", "pip", "install", "cupy-cuda13x")
        observed = f"{cards} NVIDIA cards, but no CuPy in the Python of jobs"
        yield Finding("warn", observed, "CuPy, for models that use its arrays", f"{remedy}  # for CUDA 13")
    if cupy is None or "problem" in cupy:
        return
    driver, runtime = cupy["driver"], cupy["runtime"]
    if driver and driver // 1000 < runtime // 1000:
        observed = f"the NVIDIA driver is for CUDA {cuda_version(driver)}, CuPy for CUDA {cuda_version(runtime)}"
        remedy = as_user(seen, seen.target.python, "-m", "pip", "install", f"cupy-cuda{driver // 1000}x")
        yield Finding("warn", observed, "a driver that is as new as CuPy's CUDA", remedy)


def cuda_version(number: int) -> str:
    """Format 13020 as "13.2"."""
    return f"{number // 1000}.{number % 1000 // 10}"


ASKS = (
    Ask("gpu", "gpu", "login", seconds=25.0),
    Ask("cupy", "cupy", "job", lambda target, _host: {"python": target.python}, seconds=42.0),
)
CHECKS = (
    Check(
        "GPU02",
        "the NVIDIA driver answers",
        _driver,
        uses=("gpu",),
        alone=True,
        looks="nvidia-ml-py if the node's Python has it, or else nvidia-smi.",
        why="After an update the library is newer than the running driver, and no job can use a card until a restart.",
        remedy="ssh {login} nvidia-smi",
        needs=BY_SSH,
    ),
    Check(
        "GPU01",
        "all nodes have the same NVIDIA cards and driver",
        _inventory,
        scope="cluster",
        uses=("gpu",),
        looks="Cards on the PCI bus (vendor 10de), cards that answer, their names, the driver's version.",
        why="With a missing card, a rank fails or takes another rank's; a smaller card slows all ranks.",
        remedy="ssh {login} nvidia-smi -q",
        needs=(*BY_SSH, "GPU02"),
    ),
    Check(
        "GPU03",
        "the cards' memory is sound",
        _health,
        uses=("gpu",),
        alone=True,
        looks="Uncorrected ECC errors, remapped rows, and Xid events in the kernel's log.",
        why="A card with such errors ends jobs, or computes wrong results.",
        remedy="ssh {login} nvidia-smi -q",
        needs=(*BY_SSH, "GPU02"),
    ),
    Check(
        "GPU04",
        "nothing slows the cards",
        _throttle,
        level="full",
        uses=("gpu",),
        alone=True,
        looks="The bits for the reasons of low clocks; temperature; persistence mode.",
        why="Every rank waits for the slowest card.",
        remedy="ssh {login} nvidia-smi -q",
        needs=(*BY_SSH, "GPU02"),
    ),
    Check(
        "GPU05",
        "the Python of jobs sees every card",
        _cupy,
        level="full",
        uses=("gpu", "cupy"),
        alone=True,
        looks="In a child, with CuPy of the jobs' environment: the cards that it sees, against those of nvidia-smi, "
        "and a sum on the first.",
        why="A library that was built for another CUDA sees no cards. Training then runs without them, or not at all.",
        remedy="ssh {login} 'env | grep CUDA_VISIBLE_DEVICES; nvidia-smi'  "
        "# is it built for another CUDA than this driver has?",
        needs=(*BY_SSH, "PRB02", "USR01", "GPU02"),
    ),
    Check(
        "GPU06",
        "jobs have a CuPy, and the driver is new enough for it",
        _has_cupy,
        level="full",
        uses=("gpu", "cupy"),
        alone=True,
        looks="Whether the jobs' environment has CuPy if there are NVIDIA cards; the CUDA versions of the driver and "
        "of CuPy.",
        why="Without CuPy, models that use its arrays run only on the processor. With an older driver it can use no "
        "card.",
        needs=(*BY_SSH, "PRB02", "USR01", "GPU02"),
        fault="none on a test bed, which has no GPU: judged on made-up answers",
    ),
)
