"""facts.py: what the launcher's agent, that of check-cluster and the job's own Python find, written once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpitrain import facts
from mpitrain.check.node import network
from mpitrain.launch import facts as of_launch

LINKS = [
    {"ifname": "lo", "addr_info": [{"local": "127.0.0.1", "prefixlen": 8}]},
    {"ifname": "eth0", "addr_info": [{"local": "10.0.0.1", "prefixlen": 24}, {"peer": "no address"}]},
]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], {}),
        (
            [{"dst": "10.0.0.2", "dev": "eth0", "prefsrc": "10.0.0.1"}],
            {"interface": "eth0", "source": "10.0.0.1", "gateway": "", "network": "10.0.0.0/24"},
        ),
        (
            [{"dst": "10.9.0.2", "gateway": "10.0.0.254", "dev": "eth0", "prefsrc": "10.8.0.1"}],
            {"interface": "eth0", "source": "10.8.0.1", "gateway": "10.0.0.254"},
        ),
        ([{"dst": "10.9.0.2", "type": "blackhole"}], {"interface": "", "source": "", "gateway": ""}),
    ],
)
def test_routes(answer: list[dict[str, str]], expected: dict[str, str]) -> None:
    """No route; one in the own network; one from an address of another interface; one that drops."""
    assert facts.routes({"peer": answer}, LINKS) == {"peer": expected}


def test_both_agents_say_the_same() -> None:
    peers = {"itself": "127.0.0.1", "elsewhere": "192.0.2.1"}
    seen = network.network({"peers": peers})
    assert of_launch.routes(peers) == {name: route for name, route in seen["routes"].items() if route}
    assert of_launch.devices().keys() == {*seen["interfaces"], *seen["rdma"]}


@pytest.mark.parametrize(
    ("version", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024", "550.90.07"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
            "580.65.06",
        ),
        ("", ""),
    ],
)
def test_the_nvidia_driver(monkeypatch: pytest.MonkeyPatch, version: str, driver: str) -> None:
    """Its own kernel module, the open one, none. Set-up once took the open one for none."""
    monkeypatch.setattr(facts, "text", lambda _path: version)
    assert facts.nvidia()["driver"] == driver


@pytest.mark.parametrize(
    ("release", "family"),
    [
        ("ID=debian\n", "Debian"),
        ('NAME="Linux Mint"\nID=linuxmint\nID_LIKE="ubuntu debian"\n', "Debian"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\nPRETTY_NAME="Rocky Linux 9.4"\n', "RedHat"),
        ("ID=arch\n", ""),
        ("", ""),
    ],
)
def test_the_family_of_a_system(monkeypatch: pytest.MonkeyPatch, release: str, family: str) -> None:
    monkeypatch.setattr(facts, "text", lambda _path: release)
    assert facts.family() == family


def test_the_addresses_of_an_interface() -> None:
    links: list[dict[str, Any]] = [
        *LINKS,
        {"ifname": "mpitrain", "addr_info": [{"family": "inet6", "local": "fe80::1"}, {"local": "10.213.0.1"}]},
        {},
    ]
    assert facts.local_addresses(links) == ["127.0.0.1", "10.0.0.1", "fe80::1", "10.213.0.1"]
    assert facts.local_addresses(links, "mpitrain") == ["10.213.0.1"]


def test_what_sshd_says() -> None:
    """A word with several lines has all values."""
    assert facts.sshd_settings("port 22\nport 2222\nallowusers ada\n")["port"] == "22 2222"


@pytest.mark.parametrize("name", ["socket", "uuid", "grp"])
def test_a_file_beside_the_script_with_the_name_of_a_library(tmp_path: Path, name: str) -> None:
    """Python finds it first. What only the agents need must not keep a job from being looked at."""
    (tmp_path / f"{name}.py").write_text("raise SystemExit('taken')")
    script = tmp_path / "train.py"
    script.touch()
    command = [sys.executable, "-c", Path(facts.__file__).read_text(), str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    said = json.loads(done.stdout.splitlines()[0]) if done.stdout else {}
    assert {f"{name}.py", "train.py"} == said.get("files", {}).keys(), done.stderr
