"""An elastic job takes hosts in by itself. A program stands for ssh."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from programs import program
from test_supervisor import DONE, Job, left

from jobs import until
from mpitrain.launch.ending import Ended
from mpitrain.launch.events import Limits
from mpitrain.launch.hosts import listed_hosts
from mpitrain.launch.intake import that_let_in
from mpitrain.launch.keepers import Keepers
from mpitrain.launch.kept import LEAVES
from mpitrain.launch.processes import alive_below

# The host is the second-to-last word. A host is up if a file has its name. `slow` connects, and then says nothing.
SSH = """
for word; do host=$before; before=$word; done
echo "$host" >> {folder}/asked
case $host in slow*) exec sleep 1000 ;; esac
[ -e {folder}/up/$host ] && exit 0
echo "No route to host" >&2
exit 255
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an ssh that knows which hosts are up."""
    (tmp_path / "up").mkdir()
    program(tmp_path / "bin/ssh", SSH.format(folder=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def asked(site: Path) -> list[str]:
    path = site / "asked"
    return path.read_text().split() if path.exists() else []


def inventory(site: Path, hosts: str) -> None:
    head, *workers = [f"{host} ansible_host=127.0.0.{ord(host)}" for host in hosts]
    (site / "new").write_text(
        "\n".join(["[head]", head, "[workers]", *workers, "[cluster:children]", "head", "workers"])
    )
    (site / "new").replace(site / "hosts")


def test_a_host_that_comes_into_the_inventory_and_goes(
    site: Path, keepers: Keepers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpitrain.launch.intake._LOOK_SECONDS", 0.1)
    (site / "up/d").touch()
    inventory(site, "abc")

    def leave(job: Job) -> Ended:
        job.looks(lambda: keepers.wish == LEAVES)
        return left(7)

    def come(job: Job) -> Ended:
        inventory(site, "abcd")
        job.train()
        return leave(job)

    def go(job: Job) -> Ended:
        (site / "hosts").unlink()  # while it cannot be read, nothing changes
        job.train()
        until(lambda: job.supervisor.state.outside.fault)
        inventory(site, "acd")
        return leave(job)

    job = Job(keepers, Limits(5, 2, 4), come, go, DONE, listed=listed_hosts(None, site / "hosts"))
    job._prepare = lambda where, cause: None  # type: ignore[method-assign]
    job.supervisor._prepare = job._prepare
    assert job.to_end() == 0
    assert [where for where, _ in job.ran] == ["abc", "abcd", "acd"]
    assert asked(site) == ["d"]
    said = capsys.readouterr().err
    assert "d answers; d joins after the next copy of the state, and then it continues on a, b, c, d\n" in said
    assert "b leaves (not in the inventory any more); after the next copy of the state" in said
    assert said.count("the hosts of the job stay as they are, because the inventory cannot be read: ") == 1


def test_hosts_that_let_this_machine_log_in(
    site: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are asked at once. The question is no process of the job: one that ends meanwhile would kill it, and fail."""
    for host in "bd":
        (site / "up" / host).touch()
    assert that_let_in(["b", "c", "d"], threading.Event()) == {"b", "d"}
    assert sorted(asked(site)) == ["b", "c", "d"]
    assert capfd.readouterr() == ("", "")
    stop, results, before = threading.Event(), list[set[str]](), alive_below(set())
    asking = threading.Thread(target=lambda: results.append(that_let_in(["slow1", "slow2"], stop)))
    asking.start()
    until(lambda: len(asked(site)) == 5)
    assert alive_below(set()) == before
    stop.set()
    asking.join()
    monkeypatch.setattr("mpitrain.launch.intake._LOGIN_SECONDS", 0.0)  # one that never answers is not waited for
    results.append(that_let_in(["slow"], threading.Event()))
    assert results == [set(), set()]
    assert alive_below(set()) == before
