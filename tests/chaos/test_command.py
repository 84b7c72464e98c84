"""The options of `scripts/testbed chaos`: what is refused, and what --show prints."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mpitrain.launch.connections import Connection
from mpitrain.launch.jobs import RunningJob
from testbed.chaos import crew
from testbed.command import main

HERE = socket.gethostname()


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with the id 1a2b3c4d, which nothing is done to."""
    running = RunningJob("1a2b3c4d", launcher=f"{HERE} 4711 1")
    elsewhere = RunningJob("3c4d5e6f", launcher="another 4711 1")

    def connect(_: object, host: str, wish: Mapping[str, Any]) -> Connection:
        raise AssertionError("a saboteur is started")

    monkeypatch.setattr(crew, "find_jobs", lambda _: ([running, elsewhere], {}))
    monkeypatch.setattr(crew.RealHosts, "connect", connect)


REFUSED = {
    "1a2b3c4d": f"job 1a2b3c4d runs on real hosts ({HERE}): --show prints what would be done to it, --yes does it",
    "5e6f7a8b --yes": f"there is no job 5e6f7a8b of yours on {HERE}; running: 1a2b3c4d, 3c4d5e6f. `mpitrain ps` lists",
    "3c4d5e6f --yes": f"the launcher of job 3c4d5e6f is on another, and chaos looks on {HERE}: name its host in",
    "1a2b3c4d --faults rank,link --yes": "chaos does not cut the cable of a real host, because nothing is sure to",
    "1a2b3c4d --faults host --yes": "chaos does not switch off a real host, because nothing is sure to bring it",
    "1a2b3c4d --faults disk --yes": "--faults disk and --disk DIR belong together: DIR is the folder of the check",
    "1a2b3c4d --disk /tmp --yes": "--faults disk and --disk DIR belong together",
    "1a2b3c4d --faults cable": "there is no fault 'cable'; known: rank, freeze, link, host, disk",
    "1a2b3c4d --bed nobody": "--bed names the hosts: leave out --hosts and -i",
}


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in REFUSED.items():
        assert main(["chaos", "--hosts", "localhost", *words.split()]) == 2
        assert said in capsys.readouterr().err, words
    for words in ("--every soon", "--every 0s", "--hold -1s", "--count 0", "--seed x"):
        with pytest.raises(SystemExit, match="2"):
            main(["chaos", "1a2b3c4d", *words.split()])
        assert f"argument {words.split()[0]}: " in capsys.readouterr().err
    assert main(["chaos", "1a2b3c4d", "--bed", f"no-bed-{Path(__file__).stem}"]) == 2
    assert "scripts/testbed: " in capsys.readouterr().err


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("1", "1", "2"):
        words = ["chaos", "1a2b3c4d", "--hosts", "localhost", "--show", "--every", "1m", "--count", "4", "--seed", seed]
        assert main(words) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    head, *lines = shown[0].splitlines()
    assert head == f"job 1a2b3c4d on {HERE}; nothing is done now"
    assert len(lines) == 4
    assert sum(line.endswith("rank: kill -9 of one rank") for line in lines) == 2
    assert sum(line.endswith("stopped for 5 s") for line in lines) == 2
    assert main(["chaos", "1a2b3c4d", "--hosts", "localhost", "--show"]) == 0  # it has an end
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[-1]) == (22, "and so on, until the job ends")
