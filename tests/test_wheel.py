"""mpitrain as pip installs it: built from a checkout and from the sdist, tried in an environment without a checkout.

The environment has the packages of this one, but a mpitrain of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import mpitrain
from jobs import REPOSITORY, Job, clean_environment, run_command

pytest.importorskip("hatchling", reason="needs hatchling: pip install 'mpitrain[test]'")

# The machine that runs the test, which Ansible reaches without a network.
LOCAL = "[head]\nhere ansible_host=10.0.0.1 ansible_connection=local\n[workers]\n[cluster:children]\nhead\nworkers\n"
INSTALLED = "mpitrain/provision/installed"


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and the wheel."""

    folder: Path
    wheel: Path

    def mpitrain(self, cwd: Path, *arguments: str) -> Job:
        """Run the installed command. mpiexec and Ansible are those of this environment."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        # mpi4py looks for the library beside its Python.
        variables = {"PYTHONPATH": "", "PATH": path, "MPI4PY_LIBMPI": str(Path(sys.prefix, "lib/libmpi.so.12"))}
        return run_command([str(self.folder / "bin/mpitrain"), *arguments], cwd=cwd, env=variables)

    @property
    def site(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.folder)}))


def build(source: Path, target: Path, kind: str) -> Path:
    line = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(line, cwd=source, check=True, capture_output=True, timeout=600)
    (built,) = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of the checkout, installed. The checkout has an inventory, which is nobody else's business."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=60
    ).stdout.split("\0")
    for name in filter(None, files):
        if name.startswith(("mpitrain/", "cluster/", "docs/", "examples/", "scripts/")) or "/" not in name:
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, checkout / name, follow_symlinks=False)
    (checkout / "cluster/hosts").write_text(LOCAL)
    (checkout / "cluster/log").mkdir()
    (checkout / "cluster/log/setup.log").write_text("secret\n")
    wheel = build(checkout, folder / "dist", "wheel")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    made = Installed(folder / "venv", wheel)
    (made.site / "present.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "venv/bin/python")]
    line = [*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run(line, check=True, capture_output=True, timeout=600, env=clean_environment({"PYTHONPATH": ""}))
    return made


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_what_the_wheel_has(installed: Installed) -> None:
    """All of the package, the pages that `--help` names, the playbooks with what they need, once each, and nothing of
    the user's.
    """
    tracked = subprocess.run(
        ["git", "ls-files", "mpitrain", "cluster/playbooks", "docs", "examples"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=60,
    ).stdout.split()  # fmt: skip
    tracked = [name for name in tracked if not (REPOSITORY / name).is_symlink()]
    there = names(installed.wheel)
    tracked = [name for name in tracked if not name.startswith(("docs/dev/", "docs/notebooks/")) and ".png" not in name]
    places = {"mpitrain": "", "docs": "mpitrain/"}
    wanted = {places.get(name.partition("/")[0], f"{INSTALLED}/") + name for name in tracked}
    assert wanted - there == set()
    more = {name.removeprefix(f"{INSTALLED}/") for name in there - wanted if ".dist-info/" not in name}
    assert more == {
        "cluster/README.md",
        "cluster/ansible.cfg",
        "cluster/callback_plugins/mpitrain_short.py",
        "cluster/group_vars/all.yml",
        "cluster/hosts.example",
        "cluster/hosts.none",
        "cluster/playbooks/roles/mpitrain_facts/module_utils/mpitrain_host.py",  # mpitrain/facts.py, for Ansible
        "cluster/requirements.yml",
        "cluster/setup.yml",
        "cluster/teardown.yml",
        "scripts/get-data",
    }


def test_the_sdist_makes_the_same_wheel(installed: Installed, tmp_path: Path) -> None:
    sdist = build(installed.folder.parent / "checkout", tmp_path, "sdist")
    shutil.unpack_archive(sdist, tmp_path)  # Debian 12 has Python 3.11.2, whose function takes no filter
    source = tmp_path / f"mpitrain-{mpitrain.__version__}"
    assert not (source / "cluster/hosts").exists() and not (source / "cluster/log").exists()
    again = build(source, tmp_path / "dist", "wheel")
    assert again.read_bytes() == installed.wheel.read_bytes()


def test_a_project_trains(installed: Installed, tmp_path: Path) -> None:
    """Two commands after the installation."""
    assert installed.mpitrain(tmp_path, "--version").stdout == f"mpitrain {mpitrain.__version__}\n"
    assert installed.mpitrain(tmp_path, "new", "mine").code == 0
    job = installed.mpitrain(tmp_path / "mine", "run", "-n", "2", "--hosts", "localhost", "train.py")
    assert job.code == 0, job.output
    assert "step 630: mean squared error 0.844" in job.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "extras"), [("wheel", "mpich,cluster"), ("sdist", "mpich")])
def test_with_what_the_package_index_has(kind: str, extras: str, installed: Installed, tmp_path: Path) -> None:
    """Two commands in an empty folder: pip install, into a new environment, and a training on 2 ranks."""
    built = installed.wheel if kind == "wheel" else build(installed.folder.parent / "checkout", tmp_path, kind)
    venv.create(tmp_path / "venv", symlinks=True, with_pip=True)
    programs, empty = tmp_path / "venv/bin", tmp_path / "empty"
    empty.mkdir()
    environment = {"PYTHONPATH": "", "PATH": f"{programs}:/usr/bin:/bin"}

    def run(line: str, *more: str) -> Job:
        return run_command([str(programs / line.split()[0]), *line.split()[1:], *more], cwd=empty, env=environment)

    if run("pip download --quiet --no-deps --dest ../index threadpoolctl").code != 0:
        pytest.skip("pip reaches no package index")
    job = run("pip install --quiet --disable-pip-version-check", f"{built}[{extras}]")
    assert job.code == 0, job.output
    job = run("mpitrain run -n 2 -m mpitrain.cli.new_project.train")
    assert job.code == 0, job.output
    assert "step 630: mean squared error 0.844" in job.stdout
    assert [path.name for path in empty.iterdir()] == ["checkpoints"]
    job = run("mpitrain completion bash")
    assert job.code == 2 and "-m pip install 'mpitrain[completion]'" in job.stderr
    assert run("mpitrain cluster init --nodes a=10.0.0.1").code == 0
    job = run("mpitrain cluster setup -- --syntax-check")
    if "cluster" in extras:
        assert job.code == 0, job.output
    else:
        assert job.code == 1 and "-m pip install 'mpitrain[cluster]'" in job.stderr


def test_a_cluster_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    """The inventory and the variables are the user's, and the playbooks those of the package."""
    job = installed.mpitrain(tmp_path, "cluster", "init", "--nodes", "a=10.0.0.1,b=10.0.0.2")
    assert job.code == 0, job.output
    variables = tmp_path / "cluster/group_vars/all.yml"
    assert variables.read_bytes() == (REPOSITORY / "cluster/group_vars/all.yml").read_bytes()
    assert sorted(path.name for path in (tmp_path / "cluster").iterdir()) == ["group_vars", "hosts"]
    variables.write_text("mpitrain_uid: 1907\n")
    assert installed.mpitrain(tmp_path, "cluster", "init", "--nodes", "a=10.0.0.1").code == 2
    assert variables.read_text() == "mpitrain_uid: 1907\n"


def test_set_up_from_the_package(installed: Installed, tmp_path: Path) -> None:
    """Set-up refuses this machine, which has another name, before it changes anything. An inventory may be anywhere."""
    if not Path(sys.executable).with_name("ansible-playbook").exists():
        pytest.skip("Ansible is not installed: pip install 'mpitrain[cluster]'")
    inventory = tmp_path / "elsewhere/machines"
    (inventory.parent / "group_vars").mkdir(parents=True)
    inventory.write_text(LOCAL)
    (inventory.parent / "group_vars/all.yml").write_text("mpitrain_share: /no/such/place\nmpitrain_uid: 0\n")
    (tmp_path / "empty").mkdir()
    arguments = ("cluster", "setup", "--inventory", str(inventory), "--", "--tags", "preflight")
    job = installed.mpitrain(tmp_path / "empty", *arguments)
    assert job.code == 1, job.output
    text = " ".join(job.stderr.split())
    assert "Nothing was changed. What is wrong:" in text
    assert "mpitrain_uid" in text  # of the user's variables: 0 is root; all others are the package's
    line = next(line for line in job.stdout.splitlines() if line.startswith("$ ")).removeprefix("$ ")
    settings = dict(re.findall(r"(\w+)=(\S+) ", line.partition("ansible-playbook ")[0]))
    assert Path(settings["ANSIBLE_CONFIG"]).is_file()
    log = re.search(r"^All output goes to (\S+)", job.stdout, re.M)
    assert log is not None and Path(log[1]).parent == inventory.parent / "log"
    assert list((tmp_path / "empty").iterdir()) == []


def test_the_wheel_can_be_made_again_from_what_is_installed(installed: Installed, tmp_path: Path) -> None:
    """Set-up brings it to the nodes."""
    program = installed.site / "mpitrain/provision/wheel_again.py"
    subprocess.run([sys.executable, "-I", str(program), str(tmp_path)], check=True, capture_output=True, timeout=60)
    again = tmp_path / installed.wheel.name
    record = f"mpitrain-{mpitrain.__version__}.dist-info/RECORD"
    with zipfile.ZipFile(installed.wheel) as one, zipfile.ZipFile(again) as other:
        assert set(one.namelist()) == set(other.namelist())
        for name in one.namelist():
            if name == record:
                assert sorted(one.read(name).splitlines()) == sorted(other.read(name).splitlines())
            else:
                assert one.read(name) == other.read(name), name


def test_a_checkout_is_no_installation_to_make_a_wheel_of(tmp_path: Path) -> None:
    (tmp_path / "site/mpitrain/provision").mkdir(parents=True)
    program = tmp_path / "site/mpitrain/provision/wheel_again.py"
    shutil.copy(REPOSITORY / "mpitrain/provision/wheel_again.py", program)
    line = [sys.executable, "-I", str(program), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "there are no records of an installed mpitrain in" in done.stderr
    assert list(tmp_path.glob("*.whl")) == []
