"""The playbooks' own module for several files at once, on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import REPOSITORY

PROGRAM = Path(sys.executable).with_name("ansible-playbook")
pytestmark = [
    pytest.mark.skipif(not PROGRAM.exists(), reason="Ansible is not installed: pip install 'mpitrain[cluster]'"),
    pytest.mark.skipif(os.geteuid() != 0, reason="files get the owner root, which takes root"),
]


def made(folder: Path, *tasks: list[dict[str, str]], options: tuple[str, ...] = ()) -> tuple[dict[str, int], str]:
    """Run a play of tasks, each with such entries; paths are below a folder. Return Ansible's counts and its output."""
    lists = [[{**entry, "path": str(folder / entry["path"])} for entry in entries] for entries in tasks]
    made_all = [{"mpitrain_files": {"entries": entries}, "ignore_errors": len(tasks) > 1} for entries in lists]
    play = {"hosts": "localhost", "gather_facts": False, "tasks": made_all}
    path = folder.with_name("play.yml")
    path.write_text(json.dumps([play]))
    settings = {
        "ANSIBLE_LIBRARY": str(REPOSITORY / "cluster/playbooks/library"),
        "ANSIBLE_STDOUT_CALLBACK": "default",
        "ANSIBLE_LOCALHOST_WARNING": "false",
    }
    done = subprocess.run(
        [str(PROGRAM), "-c", "local", "-i", "localhost,", "-e", f"ansible_python_interpreter={sys.executable}"]
        + [*options, str(path)],
        cwd=folder.parent,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    counts = re.findall(r"(\w+)=(\d+)", done.stdout.rpartition("PLAY RECAP")[2])
    return {name: int(count) for name, count in counts}, done.stdout + done.stderr


def tree(folder: Path) -> dict[str, str]:
    """The tree: mode and content of each file, and the target of each link."""
    found = {}
    for path in sorted(folder.rglob("*")):
        what = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else "folder"
        found[str(path.relative_to(folder))] = what if path.is_symlink() else f"{path.stat().st_mode & 0o777:o} {what}"
    return found


def test_all_kinds_are_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    (folder / "old/below").mkdir(parents=True)
    (folder / "another").write_text("not ours\n")
    (folder / "leads").symlink_to("another")
    (folder / "loose").write_text("as it should be\n")
    (folder / "loose").chmod(0o666)
    os.chown(folder / "loose", 1, 1)
    (folder / "other").symlink_to("another")
    entries = [
        {"path": "new/below", "kind": "folder"},
        {"path": "new/file", "content": "text\n"},
        {"path": "new/program", "content": "#!/bin/sh\n", "mode": "0755", "validate": "sh -n %s"},
        {"path": "new/link", "kind": "link", "target": "program"},
        {"path": "leads", "content": "ours\n"},
        {"path": "other", "kind": "link", "target": "loose"},
        {"path": "loose", "content": "as it should be\n"},
        {"path": "old", "kind": "absent"},
    ]
    before = tree(folder)
    counts, said = made(folder, entries, options=("--check", "--diff"))
    assert (counts.get("failed"), counts.get("changed")) == (0, 1), said
    assert "+text" in said and "+link to program" in said, said
    assert tree(folder) == before
    counts, said = made(folder, entries)
    assert (counts.get("failed"), counts.get("changed")) == (0, 1), said
    assert tree(folder) == {
        "another": "644 not ours\n",  # the target of the link
        "leads": "644 ours\n",
        "loose": "644 as it should be\n",
        "new": "755 folder",
        "new/below": "755 folder",
        "new/file": "644 text\n",
        "new/link": "program",
        "new/program": "755 #!/bin/sh\n",
        "other": "loose",
    }
    assert ((folder / "loose").stat().st_uid, (folder / "loose").stat().st_gid) == (0, 0)
    counts, said = made(folder, entries)
    assert (counts.get("ok"), counts.get("changed")) == (1, 0), said


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"path": "file", "content": "if\n", "validate": "sh -n %s"}, "/there/file: the new content is not valid: "),
    ({"path": "taken", "content": "text\n"}, "/there/taken: is a folder and should be a file or a link"),
    ({"path": "file/below", "kind": "folder"}, "/there/file: is there and is no folder; move it away"),
    ({"path": "nowhere/file", "content": "text\n"}, "/there/nowhere/file: its folder is not there"),
    ({"path": "leads", "kind": "folder"}, "/there/leads: is a link and should be a folder; move it away"),
    ({"path": "link", "kind": "link"}, "/there/link: an entry of kind link needs target"),
]


def test_what_cannot_be_made_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    (folder / "taken").mkdir(parents=True)
    (folder / "file").write_text("valid\n")
    (folder / "leads").symlink_to("taken")
    before = tree(folder)
    counts, said = made(folder, *([entry] for entry, _ in REFUSED))
    assert counts.get("ignored") == len(REFUSED), said
    for _, words in REFUSED:
        assert words in re.sub(r"\s+", " ", said), said
    assert tree(folder) == before
