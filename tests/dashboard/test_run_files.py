"""Checkpoints of a run, and the last result of verify, as the page of the run gets them. No checkpoint is loaded."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from records_made import DOCUMENT, make_record

from jobs import run_job
from mpitrain.dashboard import run_files
from mpitrain.dashboard.record_reader import run_id
from mpitrain.dashboard.run_files import files_of
from mpitrain.errors import CheckpointError
from mpitrain.last_word import keep_word
from mpitrain.state import manifest
from mpitrain.state.store import name_of, save
from mpitrain.state_files import state_folder
from mpitrain.training.run_document import RunDocument, read_document
from serving import dashboard

SCRIPT = """
import sys
import numpy
import mpitrain as mt

def function(parameters, batch, on_gradient):
    on_gradient("w", parameters["w"] - 1)
    return 0.5

def build(world):
    data = mt.data.ArrayData(world, [numpy.arange(10.0)], global_batch=5)
    return mt.Parts(mt.ArrayFunction(function, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)), mt.Sync(), data)

folder = sys.argv[1]
record = mt.Record([mt.writers.JsonLines(f"{folder}/run")])
hooks = [mt.StopAtStep(5), mt.Checkpoint(f"{folder}/kept", 2, keep=2), record]
mt.Trainer(build, hooks).run()
"""


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def document(**changes: Any) -> RunDocument:
    return dataclasses.replace(DOCUMENT, **changes)


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    (found,) = files_of(document(checkpoints=[str(folder)]))["folders"]
    assert found["problem"] == ""
    return list(found["checkpoints"])


def test_the_checkpoints_of_a_training(tmp_path: Path) -> None:
    """`run.json` names their folder, from whatever folder the script was started."""
    job = run_job(2, SCRIPT, os.path.relpath(tmp_path))
    assert job.code == 0, job.output
    found = read_document(tmp_path / "run/run.json")
    assert found.checkpoints == [str(Path.cwd() / os.path.relpath(tmp_path) / "kept")]
    rows = checkpoints(tmp_path / "kept")
    assert [(row["step"], row["ranks"], row["loss"], row["problem"]) for row in rows] == [
        (5, 2, 0.5, ""),
        (4, 2, 0.5, ""),
    ]
    for row in rows:
        files = list((tmp_path / "kept" / name_of(row["step"])).iterdir())
        assert row["bytes"] == sum(file.stat().st_size for file in files) > 0
        assert row["saved"] == (tmp_path / "kept" / name_of(row["step"]) / "manifest.json").stat().st_mtime


def test_parts_of_ranks_count(tmp_path: Path) -> None:
    whole = save(tmp_path, 7, {"w": numpy.zeros(1000)})
    alone = checkpoints(tmp_path)[0]["bytes"]
    shutil.copytree(whole, tmp_path / "step-00000007.part-0-of-2")
    assert checkpoints(tmp_path)[0]["bytes"] == 2 * alone
    shutil.rmtree(whole)
    (row,) = checkpoints(tmp_path)
    assert (row["bytes"], row["saved"]) == (alone, None) and row["problem"].startswith("only parts of ranks")


def test_what_is_damaged_is_named_and_the_rest_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 9):
        save(tmp_path, step, {"w": numpy.zeros(3)})
    path = {step: tmp_path / name_of(step) / "manifest.json" for step in range(1, 9)}
    path[1].write_bytes(path[1].read_bytes()[:-20])
    path[2].unlink()
    path[3].unlink()
    os.mkfifo(path[3])
    (tmp_path / name_of(4)).rename(tmp_path / name_of(14))
    path[5].write_text("[" * 50)
    path[6].write_text(path[6].read_text().replace('"step": 6', '"step": 9'))
    monkeypatch.setattr(run_files, "_MOST_MANIFEST_BYTES", path[8].stat().st_size)
    path[7].write_bytes(path[7].read_bytes() + b" ")
    for name in (".writing-step-00000009-1", "step-1", "step-00000009x", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000010").write_text("no folder")
    rows = {row["step"]: row["problem"] for row in checkpoints(tmp_path)}
    assert list(rows) == [14, 10, 8, 7, 6, 5, 3, 2, 1]
    assert rows.pop(8) == ""
    says = {
        14: "holds step 4; was it renamed?",
        10: "it cannot be read: Not a directory",
        7: "and is not read here",
        6: "does not have the checksum that it names",
        5: "is damaged",
        3: "its manifest.json is not a file",
        2: "it has no manifest.json",
        1: "is damaged",
    }
    for step, problem in rows.items():
        assert says[step] in problem, (step, problem)
    save(tmp_path, 2, {"w": numpy.zeros(3)})
    assert {row["step"]: row["problem"] for row in checkpoints(tmp_path)}[2] == "", "it is read anew"


def test_what_is_wrong_is_said_in_few_words(tmp_path: Path) -> None:
    """A damaged manifest may have any number of letters where a number should be."""
    for step, key in ((1, "format"), (2, "x" * 10**6), (3, "score")):
        save(tmp_path, step, {})
        path = tmp_path / name_of(step) / "manifest.json"
        content = json.loads(path.read_text())["manifest"] | {key: "1" * 10**6}
        path.write_text(json.dumps({"manifest": content, "sha256": manifest._checksum(content)}))
        with pytest.raises(CheckpointError) as caught:
            manifest.read_manifest(path.parent)
        assert len(str(caught.value)) < 500 + len(str(path))
    assert all(0 < len(row["problem"]) <= 300 for row in checkpoints(tmp_path))


def test_only_the_newest_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "_MOST_CHECKPOINTS", 3)
    for step in (5, 100_000_000, 7, 6):
        save(tmp_path, step, {})
    (found,) = files_of(document(checkpoints=[str(tmp_path)]))["folders"]
    assert ([row["step"] for row in found["checkpoints"]], found["more"]) == ([100_000_000, 7, 6], 1)


@pytest.mark.parametrize(
    ("name", "says"), [("missing", "is not on this machine"), ("file", "cannot be read"), ("a\0b", "cannot be read")]
)
def test_a_folder_that_cannot_be_looked_at(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "file").touch()
    (found,) = files_of(document(checkpoints=[f"{tmp_path}/{name}"]))["folders"]
    assert (found["checkpoints"], says in found["problem"]) == ([], True)


@pytest.mark.parametrize("command", ["verify", "plan"])
def test_what_a_command_said(tmp_path: Path, command: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("1\n")
    (tmp_path / "link.py").symlink_to(script)
    run = document(folder=str(tmp_path), script="link.py")
    assert files_of(run)[command] is None
    equal: Any = {"is_equal": False} if command == "verify" else {}
    keep_word(command, script, ["--lr", "0.1"], ["<b>first difference</b>"], **equal)
    found = files_of(run)[command]
    assert (found["arguments"], found["lines"]) == (["--lr", "0.1"], ["<b>first difference</b>"])
    assert found["script"] == str(script) and not found["isOld"]
    assert found.get("is_equal") == equal.get("is_equal")
    os.utime(script, (found["at"] + 5, found["at"] + 5))
    assert files_of(run)[command]["isOld"]
    assert files_of(document(folder=str(tmp_path), script="other.py"))[command] is None
    keep_word(command, script, [], ["equal"], **dict.fromkeys(equal, True))
    answer = files_of(run)
    assert (answer[command]["lines"], answer[f"{command}Problem"]) == (["equal"], "")
    (path,) = state_folder().iterdir()
    kept = json.loads(path.read_text())
    damages = [{"at": "x"}, {"lines": [1]}, {"lines": 5}, {"arguments": 5}, {"more": 1}]
    for change in (*damages, *([{"is_equal": "yes"}] if equal else []), None):
        path.write_text("{" if change is None else json.dumps(kept | change))
        damaged = files_of(run)
        assert damaged[command] is None, change
        assert damaged[f"{command}Problem"].startswith(f"the last result of mpitrain {command} cannot be read: ")
        assert "is damaged" in damaged[f"{command}Problem"]


def test_they_come_over_http(tmp_path: Path) -> None:
    save(tmp_path / "kept", 3, {})
    make_record(tmp_path / "runs/a", checkpoints=[str(tmp_path / "kept"), str(tmp_path / "gone")])
    (tmp_path / "runs/b").mkdir()
    (tmp_path / "runs/b/metrics.jsonl").write_text("")
    with dashboard(tmp_path / "cache", str(tmp_path / "runs")) as served:
        served.wait_for("/api/runs", lambda answer: len(served.records(answer)) == 2)
        answer = served.get(f"/api/runs/{run_id(tmp_path / 'runs/a')}/files")
        assert [one["step"] for one in answer["folders"][0]["checkpoints"]] == [3]
        assert "is not on this machine" in answer["folders"][1]["problem"]
        empty = {"folders": [], "verify": None, "verifyProblem": "", "plan": None, "planProblem": ""}
        assert served.get(f"/api/runs/{run_id(tmp_path / 'runs/b')}/files") == empty
        assert served.ask("/api/runs/0000/files")[0] == 404
