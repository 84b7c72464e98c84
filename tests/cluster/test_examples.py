"""The role that puts the examples on the shared folder. This machine stands for both nodes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from jobs import REPOSITORY, Job, run_command

ROLES = REPOSITORY / "cluster/playbooks/roles"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a data set of one file, and with files that a run has left."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    (folder / "examples/runs").mkdir(exist_ok=True)
    (folder / "examples/runs/step1.npz").write_text("what a run has left")
    get_data = folder / "scripts/get-data"
    get_data.write_text('#!/bin/sh\nmkdir -p "$2/fashion" || exit 1\necho data >"$2/fashion/images"\n')
    get_data.chmod(0o755)
    return folder


def brought(checkout: Path, mpi: str = "wheel", cache: str = "") -> Job:
    program = Path(sys.executable).with_name("ansible-playbook")
    if not program.exists():
        pytest.skip("Ansible is not installed: pip install 'mpitrain[cluster]'")
    folder, playbooks = checkout.parent, checkout / "cluster/playbooks"
    shutil.copytree(ROLES / "mpitrain_examples", playbooks / "roles/mpitrain_examples")
    for name in ("share", "home"):
        (folder / name).mkdir()
    play = {
        "hosts": "cluster",
        "gather_facts": False,
        "roles": ["mpitrain_examples"],
        "vars": {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "ansible_become": False,
            "ansible_facts": {"mpitrain": {"examples": False}},
            "mpitrain_user": "cluster",
            "mpitrain_share": str(folder / "share"),
            "mpitrain_mpi": mpi,
        },
    }
    (playbooks / "play.yml").write_text(yaml.safe_dump([play]))
    (folder / "hosts").write_text("[head]\nnode1\n[workers]\nnode2\n[cluster:children]\nhead\nworkers\n")
    env = {"HOME": str(folder / "home"), "XDG_CACHE_HOME": cache or str(folder / "cache"), "ANSIBLE_NOCOLOR": "1"}
    return run_command([str(program), "-i", "hosts", str(playbooks / "play.yml")], cwd=folder, env=env, timeout=300.0)


@pytest.mark.parametrize(
    ("mpi", "line"),
    [
        ("wheel", "mpiexec -n 2 -ppn 1 -hosts node1,node2 python examples/train.py"),
        pytest.param("system", "mpitrain run -n 2 examples/train.py", marks=pytest.mark.nightly),
    ],
)
def test_the_examples_and_the_data_set_are_on_the_share(checkout: Path, mpi: str, line: str) -> None:
    job = brought(checkout, mpi)
    assert job.code == 0, job.output
    assert f"as a user of node1: sudo -iu cluster {line}" in job.stdout
    share = checkout.parent / "share/examples"
    assert (checkout.parent / "home/examples").readlink() == share
    assert (share / "data/fashion/images").read_text() == "data\n"
    assert (share / "train.py").read_text() == (REPOSITORY / "examples/train.py").read_text()
    assert not (share / "runs").exists()


def test_without_the_data_set_the_set_up_ends_well_and_says_so(checkout: Path) -> None:
    job = brought(checkout, cache="/dev/null/cache")
    assert job.code == 0, job.output
    assert "The cluster is set up, but WITHOUT the examples and their data set" in job.stdout
    assert "cannot create directory" in job.stdout  # the output of get-data
    assert "run: ansible-playbook cluster/setup.yml --tags examples" in job.stdout
    assert "To train on all nodes" not in job.stdout
    assert list((checkout.parent / "share").iterdir()) == list((checkout.parent / "home").glob("examples")) == []


def test_of_a_checkout_what_git_tracks_is_packed(checkout: Path, tmp_path: Path) -> None:
    git = ["git", "-C", str(checkout)]
    for words in (["init", "--quiet"], ["add", "examples/train.py"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    pack = ROLES / "mpitrain_examples/files/pack"
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    job = run_command(["bash", str(pack), str(checkout), str(tmp_path / "out")], env=env, timeout=60.0)
    assert job.code == 0, job.output
    with tarfile.open(tmp_path / "out/examples.tar") as packed:
        files = sorted(member.name for member in packed if member.isfile())
    assert files == ["examples/data/fashion/images", "examples/train.py"]
