"""Where a job runs: from the options, the inventory, this machine's own addresses, and files of other launchers."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.launch.hosts import listed_hosts, place_ranks, placed_again, read_hostfile, widened
from mpitrain.launch.placement import Place, Placement

OTHERS = "[workers]\nb ansible_host=198.51.100.2\nc ansible_host=198.51.100.3\n\n[cluster:children]\nhead\nworkers\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without an inventory, on a machine that was not set up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mpitrain.launch.hostfile.NODE_INVENTORY", tmp_path / "none")
    return tmp_path


def inventory(folder: Path, head: str) -> Path:
    path = folder / "cluster/hosts"
    path.parent.mkdir()
    path.write_text(f"[head]\na ansible_host={head}\n\n{OTHERS}")
    return path


def ranks(placement: Placement) -> dict[str, int]:
    return {place.host: place.num_ranks for place in placement.places}


def test_on_a_node_it_runs_on_all_nodes(folder: Path) -> None:
    placement = place_ranks(None, None, 3, None)  # without anything it runs here
    assert (ranks(placement), placement.addresses, placement.note) == ({socket.gethostname(): 3}, {}, "")
    inventory(folder, "127.0.0.2")  # every address of 127/8 is this machine's
    placement = place_ranks(None, None, 6, None)
    assert ranks(placement) == {"a": 2, "b": 2, "c": 2}
    assert (placement.own, placement.addresses["c"]) == ("a", "198.51.100.3")
    assert ranks(place_ranks(None, None, None, 2)) == {"a": 2, "b": 2, "c": 2}
    assert ranks(place_ranks(None, None, 2, None)) == {"a": 1, "b": 1}
    assert ranks(place_ranks(None, None, 3, 2)) == {"a": 2, "b": 1}


def test_hosts_that_are_named_have_one_rank_each(folder: Path) -> None:
    inventory(folder, "127.0.0.2")
    placement = place_ranks("a,b", None, None, None)
    assert ranks(placement) == {"a": 1, "b": 1}
    assert placement.note == "one rank on each of the hosts a,b; --ppn N makes N"
    for hosts, num_ranks, each in (("a:2,b", None, None), ("a,b", 3, None), ("a/cpux2,b/cpu", None, None)):
        placement = place_ranks(hosts, None, num_ranks, each)
        assert (ranks(placement), placement.note) == ({"a": 2, "b": 1}, "")


def test_elsewhere_it_runs_here_and_says_so(folder: Path) -> None:
    path = inventory(folder, "198.51.100.1")
    placement = place_ranks(None, None, 2, None)
    assert (ranks(placement), placement.addresses) == ({socket.gethostname(): 2}, {})
    assert placement.note == (
        "this machine is not a node of cluster/hosts, so the job runs here alone; "
        "start it on a to use the cluster, or name --hosts"
    )
    # An inventory that is named counts.
    assert ranks(place_ranks(None, path, 3, None)) == {"a": 1, "b": 1, "c": 1}


def test_from_beside_its_hosts_and_on_some_of_them(folder: Path) -> None:
    inventory(folder, "127.0.0.2")
    placement = place_ranks("b,c", None, None, 1)
    assert (ranks(placement), placement.own) == ({"b": 1, "c": 1}, "a")
    assert set(placement.addresses) == {"a", "b", "c"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:  # b and c cannot reach 127.0.0.2
        way.connect(("198.51.100.2", 1))
        assert placement.addresses["a"] == way.getsockname()[0]
    placement = place_ranks("a:2,b:2,c:2", None, 3, None)  # hosts that need not be filled are left out
    assert (ranks(placement), set(placement.addresses)) == ({"a": 2, "b": 1}, {"a", "b"})
    assert place_ranks("a:2,no-such-host.invalid:2", None, 2, None).is_here


def test_another_machine_with_this_one_s_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = inventory(folder, "198.51.100.1")
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    try:
        placement = place_ranks("b,c", path, None, 1)
    except ConfigError as error:
        pytest.skip(str(error))  # this machine has no route to another machine
    assert placement.own == "b (this machine)"
    assert placement.addresses["b"] == "198.51.100.2"
    assert set(placement.addresses) == {"b", "c", placement.own}


def test_one_host_that_is_this_machine_needs_no_connection(folder: Path) -> None:
    path = inventory(folder, "127.0.0.2")
    assert place_ranks("a", None, 2, None).addresses == {}
    placement = place_ranks("localhost/cpux2", None, None, None)
    assert (placement.addresses, placement.places[0].devices) == ({}, ("cpu", "cpu"))
    path.write_text(path.read_text().replace("127.0.0.2", "nonsense"))
    assert place_ranks("localhost", None, 2, None).addresses == {}  # also with a broken inventory
    with pytest.raises(ConfigError, match="is not an IP address"):
        place_ranks(None, None, 2, None)


def test_a_host_joins_although_the_name_of_another_one_is_unknown_by_now(folder: Path) -> None:
    """The other host is set aside, and has been removed from the inventory. c has had another address since then."""
    inventory(folder, "127.0.0.2")
    places = (Place("a", 0, 1), Place("no-such-host", 1, 1), Place("c", 2, 1))
    addresses = {"a": "127.0.0.2", "no-such-host": "198.51.100.9", "c": "198.51.100.8"}
    wider = widened(Placement(places, addresses, "a"), "b", None)
    others = {host: address for host, address in wider.addresses.items() if host != "a"}
    assert others == {"no-such-host": "198.51.100.9", "c": "198.51.100.3", "b": "198.51.100.2"}
    assert wider.hosts == ("a", "no-such-host", "c", "b")
    with pytest.raises(ConfigError, match="there is no host 'another-host"):
        widened(wider, "another-host.invalid", None)


def test_what_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="localhost is another machine on every host; write its name"):
        place_ranks("localhost,b", None, 2, None)
    with pytest.raises(ConfigError, match=r"there is no host 'no-such-host\.invalid'; `getent hosts no-such-host"):
        place_ranks("127.0.0.3,no-such-host.invalid", None, 2, None)
    inventory(folder, "127.0.0.2")
    with pytest.raises(ConfigError, match=r"a and 127\.0\.0\.2 are one host"):
        place_ranks("a,127.0.0.2", None, 2, None)
    with pytest.raises(ConfigError, match="there is no such file"):
        place_ranks(None, folder / "nowhere", 2, None)


def test_the_hosts_that_an_elastic_job_may_take_in(folder: Path) -> None:
    path = inventory(folder, "127.0.0.2")
    assert listed_hosts("b,c", None)() is None
    for named in (None, path):
        listed = listed_hosts(None, named)
        assert listed() == ["a", "b", "c"]
        path.write_text(path.read_text().replace("c ansible_host=198.51.100.3\n", ""))
        assert listed() == ["a", "b"]
        path.write_text(path.read_text().replace("\n\n[cluster", "\nc ansible_host=198.51.100.3\n\n[cluster"))
        assert listed() == ["a", "b", "c"]
    listed = listed_hosts(None, None)
    assert listed() == ["a", "b", "c"]
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="others than this user may write there"):
        listed()


def test_what_cannot_be_elastic(folder: Path) -> None:
    alone = "this job runs on this machine alone; name hosts with --hosts A,B, or an inventory with -i PATH"
    for hosts in (None, "localhost", "localhost/cpux2"):
        with pytest.raises(ConfigError, match=alone):
            listed_hosts(hosts, None)
    path = inventory(folder, "198.51.100.1")  # without this machine
    with pytest.raises(ConfigError, match=alone):
        listed_hosts(None, None)
    assert listed_hosts(None, path)() == ["a", "b", "c"]


def test_without_some_hosts_the_others_keep_their_ranks() -> None:
    places = (Place("a", 0, 2, ("cuda:0", "cuda:1")), Place("b", 2, 1, ("cpu",)), Place("c", 3, 2, ("cpu", "cpu")))
    placement = Placement(places, {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}, "a", "a note")
    assert placement.without(set()) == placement
    less = placement.without({"a"})
    assert less.places == (Place("b", 0, 1, ("cpu",)), Place("c", 1, 2, ("cpu", "cpu")))
    assert less.addresses == placement.addresses  # this machine still starts the job
    assert placement.without({"b"}).addresses == {"a": "10.0.0.1", "c": "10.0.0.3"}
    assert placement.without({"b", "c"}) == Placement(places[:1], {}, "a")
    assert [placement.first(most) for most in (None, 4, 3)] == [placement] * 3
    assert placement.first(2) == placement.without({"c"})
    assert placement.without({"a", "b"}).addresses == {"a": "10.0.0.1", "c": "10.0.0.3"}


def test_the_hosts_of_a_job_that_has_run() -> None:
    here = socket.gethostname()
    alone = placed_again([(here, 2, [])], None, is_here=True)
    assert (alone.is_here, alone.own, alone.places) == (True, here, (Place(here, 0, 2),))
    gone = ("no-such-host", 1, [])
    with pytest.raises(ConfigError, match="there is no host 'no-such-host'"):
        placed_again([gone], None, is_here=False)
    # One was removed while the job had set it aside. The job continues on the others.
    placement = placed_again([("127.0.0.2", 2, []), gone, ("127.0.0.3", 1, ["cpu"])], None, is_here=False)
    assert placement.places == (Place("127.0.0.2", 0, 2), Place("127.0.0.3", 2, 1, ("cpu",)))
    assert placement.machines == ("127.0.0.2", "127.0.0.3")
    assert placement.note.startswith("the job continues without no-such-host: there is no host 'no-such-host'")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb\n", "a,b"),
        ("# head\n\na slots=4\nb  slots = 2 # slow\n", "a:4,b:2"),
        ("a:4\nb:2\n", "a:4,b:2"),
        ("a:4\nb\n", "a:4,b:1"),
        ("a\nb\na\na\n", "a:3,b:1"),  # PBS_NODEFILE
        ("a:2\na slots=3", "a:5"),
        ("10.0.0.1:2\nnode-2.lab\n", "10.0.0.1:2,node-2.lab:1"),
    ],
)
def test_files_of_other_launchers(text: str, hosts: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    assert read_hostfile(tmp_path / "hosts") == hosts


FORMS = "HOST, HOST:N and HOST slots=N"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        ("# nothing\n", "names no host"),
        ("a\nb:x\n", f"line 2: 'b:x' is none of {FORMS}"),
        ("a b\n", "line 1: 'a b' is none of"),
        ("a\nb slots=0\n", f"line 2: 'b slots=0' is none of {FORMS}, with N above 0"),
        ("a:00\n", "line 1: 'a:00' is none of"),
        ("a.\n", "line 1: 'a.' is none of"),
        ("a max_slots=2\n", "line 1: 'a max_slots=2' is none of"),
        ("[head]\na\n", f"line 1: '[head]' is none of {FORMS}; an Ansible inventory is given by -i"),
        (b"\xff\xfe", "cannot be read: it is not text in UTF-8"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_files_of_other_launchers_that_are_refused(text: str | bytes | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "hosts").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_hostfile(tmp_path / "hosts")
    assert said in str(caught.value)
