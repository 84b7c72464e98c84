"""The judges of the shared folder."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from check.made_up import seen
from check.made_up_share import AUTOFS, EXPORT, NFS, SERVING, SHARE, USE, VIEW, judged, looked, mount
from jobs import HANG_SECONDS
from mpitrain import facts
from mpitrain.check.check import Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.node import children, share
from mpitrain.check.node import share as node_share
from mpitrain.check.run import judge


def test_a_sound_share_passes_all() -> None:
    for id_ in CHECKS:
        if id_.startswith("NFS"):
            assert not judged(id_, looked()), id_


@pytest.mark.parametrize(
    ("serving", "words"),
    [
        ({"server": "inactive"}, "nfs-server is inactive"),
        ({"is_listening": False}, "nothing listens on port 2049"),
        ({"answers": False}, "nfs-server accepts connections, but answers no call"),
        ({"exports": []}, f"{SHARE} is not exported to node2"),
        ({"exports": [{**EXPORT, "path": "/other"}]}, f"{SHARE} is not exported to node2"),
        ({"exports": [{**EXPORT, "client": "10.9.0.0/24"}]}, f"{SHARE} is not exported to node2"),
    ],
)
def test_a_head_that_does_not_serve(serving: dict[str, Any], words: str) -> None:
    (one,) = judged("NFS09", looked(serving={**SERVING, **serving}))
    assert (one.verdict, one.where, one.observed) == ("fail", ("node1",), words)
    assert one.allowed
    assert one.remedy


@pytest.mark.parametrize("client", ["*", "<world>", "node2", "10.0.0.0/24", "*.example.org", "@netgroup"])
def test_an_export_that_names_the_node_in_another_way(client: str) -> None:
    assert not judged("NFS09", looked(serving={**SERVING, "exports": [{**EXPORT, "client": client}]}))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (mount(), "is a local folder"),
        (mount(kind="missing"), f"there is no {SHARE}"),
        (mount(AUTOFS, why="No such device"), "is not mounted: No such device"),
        (mount(AUTOFS, slow=5.0), "does not end within 5 s"),
        (mount({**NFS, "type": "tmpfs", "source": "tmpfs"}), "is tmpfs from tmpfs"),
        (mount({**NFS, "source": f"10.0.0.9:{SHARE}"}), f"is 10.0.0.9:{SHARE}"),
        (mount({**NFS, "source": "10.0.0.1:/srv"}), "is 10.0.0.1:/srv"),
    ],
)
def test_not_mounted(answer: dict[str, Any], words: str) -> None:
    (one,) = judged("NFS01", looked(mount=answer))
    assert (one.verdict, one.where) == ("fail", ("node2",))
    assert words in one.observed
    assert f"10.0.0.1:{SHARE}" in one.allowed
    assert one.remedy.endswith("--tags nfs --limit {limit}")


def test_a_share_of_another_server() -> None:
    other = {**NFS, "source": "10.0.0.99:/pool"}
    found = looked(mount=mount(other), serving={"error": "not asked"})
    found.nodes["node1"]["mount"] = mount(other)
    assert not judged("NFS01", found)
    assert not judged("NFS09", found)
    found.nodes["node2"]["mount"] = mount(NFS)
    assert judged("NFS01", found)[0].allowed == "10.0.0.99:/pool, as on the head"


def named(found: Seen, **addresses: str) -> Seen:
    """A cluster in which some nodes have another address, on a second network."""
    for name, address in addresses.items():
        found.nodes[name]["names"] = {"links": [{"addresses": ["127.0.0.1", address]}]}
    return found


def test_a_server_under_another_name_or_address_of_the_head() -> None:
    for server, leads_to in (("10.1.0.1", "10.1.0.1"), ("head.example.org", "10.0.0.1"), ("head-storage", "10.1.0.1")):
        other = mount({**NFS, "source": f"{server}:{SHARE}"}, server_addresses=[leads_to])
        assert not judged("NFS01", named(looked(mount=other), node1="10.1.0.1")), server
    other = mount({**NFS, "source": f"nas.example.org:{SHARE}"}, server_addresses=["10.9.9.9"])
    assert judged("NFS01", named(looked(mount=other), node1="10.1.0.1"))[0].verdict == "fail"


@pytest.mark.parametrize(("reply", "answers"), [(b"\x80\0\0\x18", True), (b"", False)])
def test_a_server_is_asked_for_an_answer(reply: bytes, answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a frozen server still accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(node_share, "_NFS_PORT", server.getsockname()[1])
        monkeypatch.setattr(node_share, "_CALL_SECONDS", HANG_SECONDS if answers else 1.0)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(node_share._answers)
            connection, _ = server.accept()
            with connection:
                call = connection.recv(44, socket.MSG_WAITALL)
                assert call[:4] == b"\x80\0\0\x28" and call[8:20] == b"\0\0\0\0\0\0\0\x02\0\x01\x86\xa3"
                connection.sendall(reply)
                assert asked.result(HANG_SECONDS) is answers
    assert node_share._answers() is None  # nothing listens on the port now


def test_a_frozen_server_whose_queue_is_full_is_no_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_share, "_CALL_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as waiting:
        monkeypatch.setattr(node_share, "_NFS_PORT", server.getsockname()[1])
        waiting.enter_context(socket.create_connection(server.getsockname()))
        with pytest.raises(TimeoutError):
            waiting.enter_context(socket.create_connection(server.getsockname(), 1.0))
        assert node_share._answers() is False
        # With an empty queue, only a firewall makes a connection wait.
        monkeypatch.setattr(node_share, "_listeners", lambda: [0])
        assert node_share._answers() is None


def test_an_export_to_other_addresses_of_the_nodes() -> None:
    for client in ("10.1.0.2", "10.1.0.0/24"):
        found = looked(serving={**SERVING, "exports": [{**EXPORT, "client": client}]})
        assert not judged("NFS09", named(found, node2="10.1.0.2")), client
    assert not judged(
        "NFS06", named(looked(serving={**SERVING, "exports": [{**EXPORT, "client": "10.1.0.2"}]}), node2="10.1.0.2")
    )


def test_a_share_that_is_a_folder_of_a_larger_one() -> None:
    """All homes are on one server, mounted as /home."""
    homes = {**NFS, "path": "/home", "source": "nas:/export/home"}
    found = looked(mount=mount(homes), serving={**SERVING, "exports": [], "server": "missing", "enabled": ""})
    found.nodes["node1"]["mount"] = mount(homes)
    for id_ in CHECKS:
        if id_.startswith("NFS"):
            assert not judged(id_, found), id_
    # The node mounts the same folder at a deeper path, from another name of the server.
    deeper = {**NFS, "path": "/home/cluster", "source": "nas.example.org:/export/home/cluster"}
    found.nodes["node2"]["mount"] = mount(deeper, server_addresses=["10.2.0.9"])
    assert judged("NFS01", found)[0].allowed == "nas:/export/home/cluster/nfs, as on the head"
    found.nodes["node1"]["mount"]["server_addresses"] = ["10.2.0.9"]
    assert not judged("NFS01", found)
    # The head itself may export a larger folder.
    assert not judged("NFS01", looked(mount=mount({**homes, "source": "10.0.0.1:/home"})))
    disk = {**NFS, "path": "/home", "type": "ext4", "source": "/dev/sdb1"}
    assert "is a local folder" in judged("NFS01", looked(mount=mount(disk)))[0].observed


def test_the_mount_that_a_folder_lies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "\n".join(
        f"1 1 0:1 / {path} rw - {kind} {source} rw"
        for path, kind, source in (
            ("/", "ext4", "/dev/sda"),
            ("/home", "nfs4", "nas:/home"),
            ("/home/cluster2", "nfs4", "nas:/two"),
            ("/data", "autofs", "systemd-1"),
            ("/data", "nfs4", "nas:/data"),
        )
    )
    monkeypatch.setattr(facts, "text", lambda _path: lines)
    assert [one["path"] for one in facts.mounts("/home/cluster/nfs")] == ["/home"]
    assert [one["type"] for one in facts.mounts("/data/")] == ["autofs", "nfs4"]
    assert [one["path"] for one in facts.mounts("/srv")] == ["/"]


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "fuse.nfs"])
def test_kinds_of_nfs(kind: str) -> None:
    assert not judged("NFS01", looked(mount=mount({**NFS, "type": kind})))


def test_it_does_not_answer() -> None:
    (one,) = judged("NFS02", looked(use={"list": {"slow": 5.0}}))
    assert (one.verdict, one.observed) == ("fail", "listing it does not end within 5 s")
    (one,) = judged("NFS02", looked(use={"list": {"seconds": 1.4, "why": ""}}))
    assert one.verdict == "warn"
    assert one.remedy


@pytest.mark.parametrize(
    ("use", "words", "remedy"),
    [
        ({"list": {"seconds": 0, "why": "Stale file handle", "code": "ESTALE"}}, "listing it as cluster", "--tags nfs"),
        (
            {"write": {"doing": "making a folder", "why": "Read-only file system", "code": "EROFS"}},
            "Read-only",
            "umount",
        ),
        ({"write": {"doing": "writing a file", "why": "Permission denied", "code": "EACCES"}}, "denied", "--tags nfs"),
        ({"write": {"doing": "reading it back", "why": "other content", "code": ""}}, "reading it back", "--tags nfs"),
        ({"write": {"slow": 5.0}}, "does not end within 5 s", "--tags nfs"),
    ],
)
def test_it_cannot_be_written(use: dict[str, Any], words: str, remedy: str) -> None:
    (one,) = judged("NFS03", looked(use={**USE, **use}))
    assert (one.verdict, one.where) == ("fail", ("node2",))
    assert words in one.observed
    assert remedy in one.remedy


@pytest.mark.parametrize(
    ("room", "verdict", "words"),
    [
        ({"free_bytes": 1 << 20}, "fail", "0.0 of 100.0 GiB free"),
        ({"free_bytes": 5 << 30}, "warn", "5.0 of 100.0 GiB free"),
        ({"free_files": 3}, "fail", "space for 3 of 1000 files"),
    ],
)
def test_room(room: dict[str, int], verdict: str, words: str) -> None:
    (one,) = judged("NFS07", looked(use={**USE, "room": {**USE["room"], **room}}))
    assert one.verdict == verdict
    assert words in one.observed
    assert "du -xh" in one.remedy
    assert judged("NFS07", looked(use={**USE, "room": {"slow": 5.0}}))[0].verdict == "unknown"


@pytest.mark.parametrize(
    ("view", "verdict", "words"),
    [
        ({"listed_seconds": None, "is_same": False}, "fail", "not listed within"),
        ({"is_same": False}, "fail", "different content"),
        ({"by_name_seconds": None}, "warn", "not found by its name"),
        ({"listed_seconds": 0.9}, "warn", "listed after 0.9 s"),
        ({"failed": "write", "why": "No space left on device"}, "fail", "No space left"),
    ],
)
def test_visibility(view: dict[str, Any], verdict: str, words: str) -> None:
    one = judged("NFS04", looked(view={**VIEW, **view}))[0]
    assert (one.verdict, one.where) == (verdict, ("node1", "node2"))
    assert words in one.observed
    assert one.remedy


@pytest.mark.parametrize(
    ("options", "verdict", "words"),
    [
        (["rw", "soft"], "fail", "soft"),
        (["rw", "vers=3", "hard"], "warn", "NFS 3"),
        (["rw", "hard", "noac"], "warn", "noac"),
    ],
)
def test_options(options: list[str], verdict: str, words: str) -> None:
    (one,) = judged("NFS05", looked(mount=mount({**NFS, "options": options})))
    assert one.verdict == verdict
    assert words in one.observed
    assert one.remedy.endswith("--limit {limit}")


def test_options_of_a_client_in_user_space_are_the_units() -> None:
    client = {**NFS, "type": "fuse.nfs", "source": NFS["source"], "options": ["rw"]}
    assert not judged("NFS05", looked(mount=mount(client, unit_options=["vers=4.2", "hard"])))
    assert judged("NFS05", looked(mount=mount(client, unit_options=["vers=4.2", "soft"])))[0].verdict == "fail"


@pytest.mark.parametrize(
    ("export", "verdict", "words"),
    [
        ({"options": ["rw", "no_root_squash"]}, "fail", "no_root_squash to 10.0.0.2"),
        ({"client": "*"}, "fail", "exported to *"),
        ({"client": "10.0.0.0/24"}, "warn", "exported to 10.0.0.0/24"),
    ],
)
def test_exports_that_are_not_safe(export: dict[str, Any], verdict: str, words: str) -> None:
    (one,) = judged("NFS06", looked(serving={**SERVING, "exports": [{**EXPORT, **export}]}))
    assert one.verdict == verdict
    assert words in one.observed
    assert "--tags nfs" in one.remedy


def test_what_a_restart_brings() -> None:
    by_hand = {"automount": {}, "mount": {}}
    assert judged("NFS08", looked(mount=mount(NFS, units=by_hand)))[0].verdict == "fail"
    assert judged("NFS08", looked(mount=mount(NFS, units=by_hand, fstab=["hard"])))[0].verdict == "warn"
    assert not judged("NFS08", looked(mount=mount(NFS, units=by_hand, fstab=["hard", "nofail"])))
    (one,) = judged("NFS08", looked(serving={**SERVING, "enabled": "disabled"}))
    assert (one.where, one.observed) == (("node1",), "nfs-server is disabled")


def test_no_share_is_skipped_and_no_answer_is_unknown() -> None:
    found = seen(2, share=None)
    for id_ in ("NFS01", "NFS03", "NFS04", "NFS09"):
        assert {one.verdict for one in judge([CHECKS[id_]], found)} == {"skip"}
    assert {one.verdict for one in judge([CHECKS["NFS01"]], seen(2))} == {"unknown"}


def test_without_sudo_the_exports_are_skipped() -> None:
    unseen = {**SERVING, "exports": None}
    for id_ in ("NFS09", "NFS06"):
        (one,) = judge([CHECKS[id_]], looked(serving=unseen))
        assert one.verdict == "skip"
        assert "sudo" in one.observed
    assert not [one for one in judged("NFS08", looked(serving=unseen)) if one.where == ("node1",)]
    assert judged("NFS09", looked(serving={**unseen, "server": "inactive"}))[0].verdict == "fail"


@pytest.mark.parametrize(("may", "exports"), [((), None), (("true",), [])])
def test_no_sudo_is_not_no_exportfs(may: tuple[str, ...], exports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "as_root", lambda *command: "" if command[0] in may else None)
    assert share.serving({})["exports"] == exports
