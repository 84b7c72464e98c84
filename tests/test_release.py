"""scripts/release refuses what is not ready, and scripts/collection makes a collection that Ansible takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import mpitrain
from jobs import REPOSITORY, Job, run_command

VERSION = mpitrain.__version__
UNREADY = 7
OLD = "## [0.0.1] - 2025-01-02\n\n- The first\n"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that is ready for a release; making the environment, the first step after the checks, ends it."""
    for name in ("scripts/release", "mpitrain/__init__.py", "README.md", "cluster/galaxy.yml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## [Unreleased]\n\n## [{VERSION}] - 2026-01-02\n\n- News\n\n" + OLD
    )
    (tmp_path / "scripts/environment").write_text(f"#!/bin/sh\nexit {UNREADY}\n")
    (tmp_path / "scripts/environment").chmod(0o755)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "now")


def release(checkout: Path, *arguments: str) -> Job:
    return run_command([str(checkout / "scripts/release"), *arguments], cwd=checkout)


def add(text: str) -> Callable[[Path], None]:
    def change(checkout: Path) -> None:
        (checkout / "page.md").write_text(text)
        commit(checkout)

    return change


def edit(name: str, before: str, after: str) -> Callable[[Path], None]:
    def change(checkout: Path) -> None:
        text = (checkout / name).read_text()
        assert before in text
        (checkout / name).write_text(text.replace(before, after))
        commit(checkout)

    return change


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda checkout: (checkout / "more").touch(), "the tree is not clean; commit or remove this first:\n?? more"),
        (edit("CHANGELOG.md", VERSION, "0.0.1"), f"CHANGELOG.md has no heading ## [{VERSION}] - YYYY-MM-DD"),
        (edit("CHANGELOG.md", " - 2026-01-02", ""), f"CHANGELOG.md has no heading ## [{VERSION}] - YYYY-MM-DD"),
        (
            edit("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n\n- More\n"),
            "CHANGELOG.md has entries under Unreleased",
        ),
        (edit("README.md", f"This is version {VERSION}.", ""), "README.md does not say: This is version"),
        (edit("cluster/galaxy.yml", f"version: {VERSION}", "version: 9"), "cluster/galaxy.yml has no line version: "),
        (add("pip install 'mpitrain==0.0.1'"), "page.md:1:pip install 'mpitrain==0.0.1'"),
        (add("\ndist/mpitrain-cluster-0.0.1.tar.gz"), "page.md:2:dist/mpitrain-cluster-0.0.1.tar.gz"),
        (lambda checkout: git(checkout, "tag", f"v{VERSION}"), f"the tag v{VERSION} exists"),
    ],
    ids=["dirty", "heading", "date", "unreleased", "readme", "galaxy", "requirement", "file", "tag"],
)
def test_what_is_not_ready(spoil: Callable[[Path], None], said: str, checkout: Path) -> None:
    assert release(checkout).code == UNREADY
    spoil(checkout)
    job = release(checkout)
    assert job.code == 1, job.output
    assert said in job.stderr


def test_other_numbers_are_not_the_version_before(checkout: Path) -> None:
    add("pip install 'mpitrain==0.0.10' 'other==0.0.1'")(checkout)
    assert release(checkout).code == UNREADY


def test_an_option_that_there_is_not(checkout: Path) -> None:
    job = release(checkout, "--now")
    assert (job.code, job.stderr) == (1, "release: found --now; allowed: --upload, or nothing\n")


def test_this_repository_names_its_version() -> None:
    assert re.search(
        rf"^## \[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d$", (REPOSITORY / "CHANGELOG.md").read_text(), re.M
    )
    assert f"This is version {VERSION}." in (REPOSITORY / "README.md").read_text()
    assert yaml.safe_load((REPOSITORY / "cluster/galaxy.yml").read_text())["version"] == VERSION


@pytest.mark.nightly  # only a release makes it
def test_the_collection(tmp_path: Path) -> None:
    """Its roles find their modules and filters. Preflight refuses this machine, which has another name."""
    if not Path(sys.executable).with_name("ansible-galaxy").exists():
        pytest.skip("Ansible is not installed: pip install 'mpitrain[cluster]'")
    programs = Path(sys.executable).parent
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "ANSIBLE_COLLECTIONS_PATH": str(tmp_path / "made")}
    job = run_command([str(REPOSITORY / "scripts/collection"), str(tmp_path)], env=env)
    assert job.code == 0, job.output
    file = tmp_path / f"mpitrain-cluster-{VERSION}.tar.gz"
    install = ["ansible-galaxy", "collection", "install", "--offline", str(file), "-p", str(tmp_path / "made")]
    job = run_command([str(programs / install[0]), *install[1:]], env=env)
    assert job.code == 0, job.output
    folder = tmp_path / "made/ansible_collections/mpitrain/cluster"
    roles = {path.name for path in (REPOSITORY / "cluster/playbooks/roles").iterdir()}
    assert {path.name for path in (folder / "roles").iterdir()} == roles
    (tmp_path / "group_vars").mkdir()
    shutil.copy(folder / "all.yml.example", tmp_path / "group_vars/all.yml")
    (tmp_path / "hosts").write_text(
        "[head]\nhere ansible_host=10.0.0.1 ansible_connection=local\n[workers]\n[cluster:children]\nhead\nworkers\n"
    )
    play = [str(programs / "ansible-playbook"), "-i", "hosts"]
    names = [f"mpitrain.cluster.{path.stem}" for path in (folder / "playbooks").glob("*.yml")]
    job = run_command([*play, "--syntax-check", *names], cwd=tmp_path, env=env)
    assert job.code == 0, job.output
    assert len(names) > 2 and job.stdout.count("playbook: ") == len(names), job.output
    job = run_command([*play, "mpitrain.cluster.setup", "--tags", "preflight"], cwd=tmp_path, env=env)
    assert job.code == 2, job.output
    assert "Nothing was changed. What is wrong:" in job.output
