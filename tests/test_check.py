"""scripts/check fails where a linter ends well and has not looked at what it was given."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from jobs import REPOSITORY, run_command

SUMMARY = "Passed: 0 failure(s), 0 warning(s) in {} files processed of 9 encountered. It passed."


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Three playbooks and a file of variables, and tools that find nothing."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts/check", tmp_path / "scripts")
    for name in ("setup.yml", "teardown.yml", "playbooks/roles/one/tasks/main.yml", "group_vars/all.yml"):
        path = tmp_path / "cluster" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("---\n")
    tools = ("python", "ruff", "mypy", "yamllint", "shellcheck", "ansible-lint")
    for program in ("scripts/environment", *(f".venv/bin/{tool}" for tool in tools)):
        script(tmp_path / program, "exit 0")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True, timeout=60)
    subprocess.run(["git", "-C", str(tmp_path), "add", "cluster", "scripts"], check=True, timeout=60)
    return tmp_path


def script(path: Path, lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("says", "passes"), [(SUMMARY.format(3), True), (SUMMARY.format(9), True), (SUMMARY.format(2), False), ("", False)]
)
def test_ansible_lint_must_look_at_all_playbooks(checkout: Path, says: str, passes: bool) -> None:
    script(checkout / ".venv/bin/ansible-lint", f"echo '{says}' >&2")
    job = run_command([str(checkout / "scripts/check")], cwd=checkout)
    assert (job.code == 0) == passes, job.output
    assert ("git has 3 in cluster that it must look at" in job.stdout) != passes, job.output


def test_what_a_linter_finds_fails_it(checkout: Path) -> None:
    script(checkout / ".venv/bin/ansible-lint", f"echo '{SUMMARY.format(3)}'; exit 2")
    assert run_command([str(checkout / "scripts/check")], cwd=checkout).code != 0
