"""The judges of the shared folder."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from check.made_up import judged as all_judged
from check.made_up import seen, verdicts
from jobs import HANG_SECONDS
from mpitrain import facts
from mpitrain.check.check import Result, Seen
from mpitrain.check.checks import CHECKS
from mpitrain.check.node import children
from mpitrain.check.node import share as node_share
from mpitrain.check.run import judge

SHARE = "/home/cluster/nfs"
NFS = {"path": SHARE, "type": "nfs4", "source": f"10.0.0.1:{SHARE}", "options": ["rw", "vers=4.2", "hard"]}
AUTOFS = {"path": SHARE, "type": "autofs", "source": "systemd-1", "options": ["rw"]}
STATES = {"automount": {"UnitFileState": "enabled"}, "mount": {"UnitFileState": "static"}}
EXPORT = {"path": SHARE, "client": "10.0.0.2", "options": ["rw", "root_squash"]}
SERVING = {"exports": [EXPORT], "server": "active", "enabled": "enabled", "is_listening": True, "answers": True}
ROOM = {"bytes": 100 << 30, "free_bytes": 50 << 30, "files": 1000, "free_files": 900}
USE = {"list": {"seconds": 0.0, "why": ""}, "room": ROOM, "write": {"doing": "removing it", "why": "", "code": ""}}
VIEW = {"by_name_seconds": 0.0, "listed_seconds": 0.0, "is_same": True}
ALL = [id_ for id_ in CHECKS if id_.startswith("NFS")]
TO_SET_UP = "--tags nfs --limit {limit}"
MEND = "--tags nfs"


def mount(*mounts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    usual = {"kind": "folder", "why": "", "server_addresses": [], "units": STATES, "unit_options": [], "fstab": []}
    return {**usual, "mounts": list(mounts), **fields}


def looked(head: dict[str, Any] | None = None, **of_node2: Any) -> Seen:
    """Two nodes in good order, except for the given values of the second. `serving` is the head's answer."""
    found = seen(2)
    serving = of_node2.pop("serving", SERVING)
    view = of_node2.pop("view", VIEW)
    found.nodes = {
        "node1": {"mount": head or mount(), "use": USE, "serving": serving},
        "node2": {"mount": mount(AUTOFS, NFS), "use": USE, **of_node2},
    }
    found.pairs = {pair: {"view": view} for pair in (("node1", "node2"), ("node2", "node1"))}
    return found


def served(**fields: Any) -> Seen:
    return looked(serving={**SERVING, **fields})


def exported(**fields: Any) -> Seen:
    return served(exports=[{**EXPORT, **fields}])


def mounted(**fields: Any) -> Seen:
    return looked(mount=mount({**NFS, **fields}))


def used(**fields: Any) -> Seen:
    return looked(use={**USE, **fields})


def named(found: Seen, **addresses: str) -> Seen:
    """A cluster in which some nodes have another address, on a second network."""
    for name, address in addresses.items():
        found.nodes[name]["names"] = {"links": [{"addresses": ["127.0.0.1", address]}]}
    return found


def judged(id_: str, found: Seen) -> list[Result]:
    return [one for one in all_judged(id_, found) if one.verdict != "skip"]


@pytest.mark.parametrize(
    ("id_", "found", "verdict", "where", "words", "remedy"),
    [
        ("NFS09", served(server="inactive"), "fail", "node1", "nfs-server is inactive", ""),
        ("NFS09", served(is_listening=False), "fail", "node1", "nothing listens on port 2049", ""),
        ("NFS09", served(answers=False), "fail", "node1", "nfs-server accepts connections, but answers no call", ""),
        ("NFS09", served(exports=[]), "fail", "node1", f"{SHARE} is not exported to node2", ""),
        ("NFS09", exported(path="/other"), "fail", "node1", f"{SHARE} is not exported to node2", ""),
        ("NFS09", exported(client="10.9.0.0/24"), "fail", "node1", f"{SHARE} is not exported to node2", ""),
        ("NFS09", served(exports=None, server="inactive"), "fail", "node1", "", ""),
        ("NFS01", looked(mount=mount()), "fail", "node2", "is a local folder", TO_SET_UP),
        ("NFS01", looked(mount=mount(kind="missing")), "fail", "node2", f"there is no {SHARE}", TO_SET_UP),
        ("NFS01", looked(mount=mount(AUTOFS, why="No such")), "fail", "node2", "is not mounted: No such", TO_SET_UP),
        ("NFS01", looked(mount=mount(AUTOFS, slow=5.0)), "fail", "node2", "does not end within 5 s", TO_SET_UP),
        ("NFS01", mounted(type="tmpfs", source="tmpfs"), "fail", "node2", "is tmpfs from tmpfs", TO_SET_UP),
        ("NFS01", mounted(source=f"10.0.0.9:{SHARE}"), "fail", "node2", f"is 10.0.0.9:{SHARE}", TO_SET_UP),
        ("NFS01", mounted(source="10.0.0.1:/srv"), "fail", "node2", "is 10.0.0.1:/srv", TO_SET_UP),
        ("NFS02", used(list={"slow": 5.0}), "fail", "node2", "listing it does not end within 5 s", ""),
        ("NFS02", used(list={"seconds": 1.4, "why": ""}), "warn", "node2", "", ""),
        ("NFS03", used(list={"seconds": 0, "why": "x", "code": "ESTALE"}), "fail", "node2", "listing it as", MEND),
        ("NFS03", used(write={"doing": "a", "why": "RO", "code": "EROFS"}), "fail", "node2", "RO", "umount"),
        ("NFS03", used(write={"doing": "a", "why": "denied", "code": "EACCES"}), "fail", "node2", "denied", MEND),
        ("NFS03", used(write={"doing": "reading", "why": "x", "code": ""}), "fail", "node2", "reading", MEND),
        ("NFS03", used(write={"slow": 5.0}), "fail", "node2", "does not end within 5 s", "--tags nfs"),
        ("NFS05", mounted(options=["rw", "soft"]), "fail", "node2", "soft", "--limit {limit}"),
        ("NFS05", mounted(options=["rw", "vers=3", "hard"]), "warn", "node2", "NFS 3", "--limit {limit}"),
        ("NFS05", mounted(options=["rw", "hard", "noac"]), "warn", "node2", "noac", "--limit {limit}"),
        ("NFS06", exported(options=["rw", "no_root_squash"]), "fail", "", "no_root_squash to 10.0.0.2", "--tags nfs"),
        ("NFS06", exported(client="*"), "fail", "", "exported to *", "--tags nfs"),
        ("NFS06", exported(client="10.0.0.0/24"), "warn", "", "exported to 10.0.0.0/24", "--tags nfs"),
        ("NFS07", used(room={**ROOM, "free_bytes": 1 << 20}), "fail", "node2", "0.0 of 100.0 GiB free", "du -xh"),
        ("NFS07", used(room={**ROOM, "free_bytes": 5 << 30}), "warn", "node2", "5.0 of 100.0 GiB free", "du -xh"),
        ("NFS07", used(room={**ROOM, "free_files": 3}), "fail", "node2", "space for 3 of 1000 files", "du -xh"),
        ("NFS07", used(room={"slow": 5.0}), "unknown", "node2", "", ""),
        ("NFS08", looked(mount=mount(NFS, units={"automount": {}, "mount": {}})), "fail", "node2", "", ""),
        ("NFS08", served(enabled="disabled"), "fail", "node1", "nfs-server is disabled", ""),
    ],
)
def test_findings(id_: str, found: Seen, verdict: str, where: str, words: str, remedy: str) -> None:
    (one,) = judged(id_, found)
    assert one.verdict == verdict and (not where or one.where == (where,))
    assert words in one.observed and remedy in one.remedy
    assert verdict == "unknown" or one.remedy
    assert id_ not in ("NFS01", "NFS09") or one.allowed
    assert id_ != "NFS01" or f"10.0.0.1:{SHARE}" in one.allowed


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


BY_HAND = {"automount": {}, "mount": {}}
USER_SPACE = {**NFS, "type": "fuse.nfs", "options": ["rw"]}


@pytest.mark.parametrize("id_", ALL)
def test_a_sound_share_passes_all(id_: str) -> None:
    assert not judged(id_, looked())
    # It may be a folder of a larger one: all homes are on one server, mounted as /home.
    homes = mount({**NFS, "path": "/home", "source": "nas:/export/home"})
    assert not judged(
        id_, looked(homes, mount=homes, serving={**SERVING, "exports": [], "server": "missing", "enabled": ""})
    )


@pytest.mark.parametrize(
    ("id_", "found"),
    [
        *(("NFS09", exported(client=name)) for name in ("*", "<world>", "node2", "10.0.0.0/24", "*.a.org", "@group")),
        *((id_, named(exported(client="10.1.0.2"), node2="10.1.0.2")) for id_ in ("NFS09", "NFS06")),
        ("NFS09", named(exported(client="10.1.0.0/24"), node2="10.1.0.2")),
        *(("NFS01", mounted(type=kind)) for kind in ("nfs", "nfs4", "fuse.nfs")),
        # The head itself may export a larger folder.
        ("NFS01", looked(mount=mount({**NFS, "path": "/home", "source": "10.0.0.1:/home"}))),
        # Options of a client in user space are the unit's.
        ("NFS05", looked(mount=mount(USER_SPACE, unit_options=["vers=4.2", "hard"]))),
        ("NFS08", looked(mount=mount(NFS, units=BY_HAND, fstab=["hard", "nofail"]))),
    ],
)
def test_what_is_right_in_another_way(id_: str, found: Seen) -> None:
    assert not judged(id_, found)


def test_what_is_wrong_in_another_way() -> None:
    soft = mount(USER_SPACE, unit_options=["vers=4.2", "soft"])
    assert judged("NFS05", looked(mount=soft))[0].verdict == "fail"
    assert judged("NFS08", looked(mount=mount(NFS, units=BY_HAND, fstab=["hard"])))[0].verdict == "warn"
    disk = {**NFS, "path": "/home", "type": "ext4", "source": "/dev/sdb1"}
    assert "is a local folder" in judged("NFS01", looked(mount=mount(disk)))[0].observed


def test_a_share_of_another_server() -> None:
    other = mount({**NFS, "source": "10.0.0.99:/pool"})
    found = looked(other, mount=other, serving={"error": "not asked"})
    assert not judged("NFS01", found) and not judged("NFS09", found)
    found.nodes["node2"]["mount"] = mount(NFS)
    assert judged("NFS01", found)[0].allowed == "10.0.0.99:/pool, as on the head"
    # The node mounts the same folder at a deeper path, from another name of the server.
    homes = mount({**NFS, "path": "/home", "source": "nas:/export/home"})
    deeper = {**NFS, "path": "/home/cluster", "source": "nas.example.org:/export/home/cluster"}
    found = looked(homes, mount=mount(deeper, server_addresses=["10.2.0.9"]))
    assert judged("NFS01", found)[0].allowed == "nas:/export/home/cluster/nfs, as on the head"
    homes["server_addresses"] = ["10.2.0.9"]
    assert not judged("NFS01", found)


def test_a_server_under_another_name_or_address_of_the_head() -> None:
    def of(server: str, leads_to: str) -> list[Result]:
        other = mount({**NFS, "source": f"{server}:{SHARE}"}, server_addresses=[leads_to])
        return judged("NFS01", named(looked(mount=other), node1="10.1.0.1"))

    assert of("10.1.0.1", "10.1.0.1") == of("head.a.org", "10.0.0.1") == of("head-storage", "10.1.0.1") == []
    assert of("nas.example.org", "10.9.9.9")[0].verdict == "fail"


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


def test_the_mount_that_a_folder_lies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = {"/": "ext4", "/home": "nfs4", "/home/cluster2": "nfs4", "/data": "autofs", "/data/": "nfs4"}
    lines = "\n".join(f"1 1 0:1 / {path.rstrip('/') or '/'} rw - {kind} s rw" for path, kind in mounts.items())
    monkeypatch.setattr(facts, "text", lambda _path: lines)
    assert [one["path"] for one in facts.mounts("/home/cluster/nfs")] == ["/home"]
    assert [one["type"] for one in facts.mounts("/data/")] == ["autofs", "nfs4"]
    assert [one["path"] for one in facts.mounts("/srv")] == ["/"]


def test_no_share_is_skipped_and_no_answer_is_unknown() -> None:
    for id_ in ("NFS01", "NFS03", "NFS04", "NFS09"):
        assert verdicts(id_, seen(2, share=None)) == {"skip"}
    assert verdicts("NFS01", seen(2)) == {"unknown"}


def test_without_sudo_the_exports_are_skipped() -> None:
    unseen = served(exports=None)
    for id_ in ("NFS09", "NFS06"):
        (one,) = judge([CHECKS[id_]], unseen)
        assert one.verdict == "skip" and "sudo" in one.observed
    assert not [one for one in judged("NFS08", unseen) if one.where == ("node1",)]


@pytest.mark.parametrize(("may", "exports"), [((), None), (("true",), [])])
def test_no_sudo_is_not_no_exportfs(may: tuple[str, ...], exports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "as_root", lambda *command: "" if command[0] in may else None)
    assert node_share.serving({})["exports"] == exports
