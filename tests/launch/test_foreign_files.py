"""A file that was found by a search is refused if another user may write it: owner, mode, folders above, links."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.launch.foreign_files import refuse_foreign

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
ME = pwd.getpwuid(os.geteuid()).pw_name
INVENTORY = """\
[head]
a ansible_host=192.0.2.1 {}
[workers]
[cluster:children]
head
workers
"""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own inventory. Its name is relative to the current folder."""
    monkeypatch.chdir(tmp_path)
    path = Path("cluster/hosts")
    path.parent.mkdir(mode=0o755)
    path.write_text(INVENTORY.format("note=mine"))
    path.chmod(0o644)
    refuse_foreign(path)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_foreign(path, instead="do without")
    return str(caught.value)


def repair(message: str, path: Path | None = None) -> None:
    """Run the command that a refusal prints, which must be enough."""
    command = re.search(r"Then repair it: (.*?)(  # or, if you trust the file as it is, .*)?\n?$", message)
    assert command is not None, message
    subprocess.run(command[1], shell=True, check=True)
    if path is not None:
        refuse_foreign(path)


def described(place: Path) -> str:
    status = place.lstat()
    group = next((entry.gr_name for entry in grp.getgrall() if entry.gr_gid == status.st_gid), status.st_gid)
    owner = next((entry.pw_name for entry in pwd.getpwall() if entry.pw_uid == status.st_uid), status.st_uid)
    return f"{place} has owner {owner}, group {group}, mode {status.st_mode & 0o7777:04o}"


@pytest.mark.parametrize("place", ["cluster/hosts", "cluster", "."])
@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_all_may_write(found: Path, place: str, mode: int) -> None:
    """The file, its folder, or a folder above."""
    Path(place).chmod(mode)
    message = refusal(found)
    allowed = "root" if os.geteuid() == 0 else f"{ME} or root"
    assert message == (
        "cluster/hosts is not used, because others than this user may write there: "
        f"{described(Path(place).resolve())}. Allowed is owner {allowed}, and no write permission for anybody else. "
        "Look through cluster/hosts. "
        f"Then repair it: chmod go-w {Path(place).resolve()}  # or, if you trust the file as it is, do without"
    )
    repair(message, found)


def test_several_places_are_one_command(found: Path) -> None:
    for place in (found, found.parent):
        place.chmod(0o777)
    message = refusal(found)
    assert f"{described(found.parent.resolve())}; {described(found.resolve())}. Allowed" in message
    repair(message, found)
    assert [place.stat().st_mode & 0o777 for place in (found, found.parent)] == [0o755, 0o755]
    found.parent.chmod(0o1777)  # like /tmp: others may write beside it, and cannot replace it
    refuse_foreign(found)


@needs_root
@pytest.mark.parametrize("place", ["cluster/hosts", "cluster", "."])
def test_somebody_else_owns_it(found: Path, place: str) -> None:
    os.chown(place, NOBODY, -1)
    message = refusal(found)
    assert f"may write there: {described(Path(place).resolve())}. Allowed is owner root, and" in message
    # No chown: the command would take over somebody else's file.
    said = "Then copy the files that you need into a folder of your own; or, if you trust the file as it is, do without"
    assert message.endswith(said)


@needs_root
@pytest.mark.parametrize("is_link", [True, False])
def test_somebody_else_owns_the_link_or_the_file_that_it_leads_to(found: Path, is_link: bool) -> None:
    found.rename("own")
    found.symlink_to("../own")
    refuse_foreign(found)
    os.chown(found, NOBODY, -1, follow_symlinks=not is_link)
    assert described(Path.cwd() / found if is_link else Path("own").resolve()) in refusal(found)


@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_that_a_link_leads_to_is_in_a_folder_of_all(found: Path, absolute: bool) -> None:
    """Neither the name of the file nor its final place is in that folder."""
    found.parent.rename("own")
    Path("open").mkdir()
    Path("open/hop").symlink_to(Path("own").absolute() if absolute else "../own")
    Path("cluster").symlink_to("open/hop")
    refuse_foreign(found)
    Path("open").chmod(0o777)
    message = refusal(found)
    assert f"may write there: {described(Path('open').resolve())}. Allowed" in message
    repair(message, found)


def group(monkeypatch: pytest.MonkeyPatch, primary: list[int], others: list[str], name: str = "group") -> None:
    """Give the test's files a group with these members."""
    gid = os.getegid()
    users = [pwd.struct_passwd((f"user{uid}", "x", uid, gid, "", "/nowhere", "/bin/sh")) for uid in primary]
    monkeypatch.setattr("pwd.getpwall", lambda: users)
    monkeypatch.setattr("grp.getgrgid", lambda _: grp.struct_group((name, "x", gid, others)))


def be(monkeypatch: pytest.MonkeyPatch, name: str, gid: int, home: str = "/nowhere") -> None:
    user = pwd.struct_passwd((name, "x", os.geteuid(), gid, "", home, "/bin/sh"))
    monkeypatch.setattr("pwd.getpwuid", lambda _: user)


def test_umask_002_with_a_group_of_ones_own(found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary checkout on Debian is accepted."""
    found.parent.chmod(0o775)
    found.chmod(0o664)
    for primary, others in (([os.geteuid()], []), ([os.geteuid()], [ME]), ([], [ME])):
        group(monkeypatch, primary, others)
        refuse_foreign(found)


@pytest.mark.parametrize(
    ("primary", "others"),
    [([os.geteuid(), NOBODY], []), ([os.geteuid()], ["nobody"]), ([os.geteuid()], ["who-is-this"]), ([], [])],
)
def test_umask_002_with_a_group_of_others(
    found: Path, monkeypatch: pytest.MonkeyPatch, primary: list[int], others: list[str]
) -> None:
    found.chmod(0o664)
    group(monkeypatch, primary, others)
    message = refusal(found)
    assert f"{found.resolve()} has owner {ME}, group group, mode 0664. Allowed" in message
    repair(message, found)


def test_umask_002_where_a_directory_service_does_not_list_its_users(
    found: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group without known members is the user's own if it has the user's name. A group with members is not."""
    found.chmod(0o664)
    be(monkeypatch, "ada", os.getegid())
    group(monkeypatch, [], [])
    assert "has owner ada, group group, mode 0664" in refusal(found)
    group(monkeypatch, [], ["nobody"], "ada")
    assert "has owner ada, group ada, mode 0664" in refusal(found)
    group(monkeypatch, [], [], "ada")
    refuse_foreign(found)
    be(monkeypatch, "ada", os.getegid() + 1)  # the group of that name is another user's own
    assert "has owner ada, group ada, mode 0664" in refusal(found)


def test_above_the_home_directory_nobody_looks(found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders above belong to the administrator. ssh does not check them either."""
    Path.cwd().chmod(0o777)
    be(monkeypatch, ME, os.getegid(), str(Path("cluster").resolve()))
    refuse_foreign(found)
    found.parent.chmod(0o777)  # the home directory itself counts
    assert described(found.parent.resolve()) in refusal(found)


def mpitrain(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpitrain", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


COMMANDS = {
    "check-cluster": ["--only", "SSH01"],
    "run": ["-n", "1", "script.py"],
    "bench": ["-n", "1"],
    "ps": [],
    "kill": ["1a2b3c4d"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_it(found: Path, command: str) -> None:
    Path("script.py").write_text("print('it ran')")
    found.parent.chmod(0o777)
    done = mpitrain(command, *COMMANDS[command])
    assert (done.returncode, "it ran" in done.stdout) == (2, False)
    assert "cluster/hosts is not used, because others than this user may write there: " in done.stderr
    assert "  # or, if you trust the file as it is, name it: -i cluster/hosts" in done.stderr
    here_alone = done.stderr.endswith("cluster/hosts, or for this machine alone: --hosts localhost\n")
    assert here_alone == (command != "check-cluster")


def test_a_command_in_it_runs_only_where_it_is_named(found: Path) -> None:
    """The attack: another user puts the file there, and root's check-cluster runs a program of that user."""
    pytest.importorskip("fabric")
    program = shlex.quote(f"ProxyCommand=touch {found.resolve().with_name('theirs-ran')}")
    found.write_text(INVENTORY.format(f'ansible_ssh_common_args="-o {program}"'))
    found.parent.chmod(0o777)
    words = ["check-cluster", "--level", "quick", "--only", "SSH01"]
    done = mpitrain(*words)
    assert done.returncode == 2
    repair(done.stderr)
    done = mpitrain(*words)
    assert done.returncode == 2
    assert done.stderr == (
        "mpitrain check-cluster: cluster/hosts, which was found rather than named, sets ansible_ssh_common_args to "
        f"{f'-o {program}'!r}. This setting can make ssh run commands on this machine, so it is only allowed in an "
        "inventory that you name. If you trust the file, name the inventory: -i cluster/hosts\n"
    )
    assert not found.with_name("theirs-ran").exists()
    mpitrain(*words, "-i", "cluster/hosts")
    assert found.with_name("theirs-ran").exists()


def test_the_group_vars_of_the_current_folder(found: Path) -> None:
    """The variables are found even if the inventory is named. Arguments of ssh count only beside a named inventory."""
    pytest.importorskip("fabric")
    found.rename("mine")
    group_vars = Path("cluster/group_vars/all.yml")
    group_vars.parent.mkdir()
    group_vars.write_text("ansible_ssh_extra_args: -o ProxyCommand=true\n")
    group_vars.chmod(0o666)
    words = ["check-cluster", "--level", "quick", "--only", "INV01", "-i", "mine"]
    done = mpitrain(*words)
    assert (done.returncode, f"{described(group_vars.resolve())}. Allowed" in done.stderr) == (2, True)
    repair(done.stderr)
    done = mpitrain(*words)
    assert done.returncode == 2
    assert done.stderr == (
        "mpitrain check-cluster: cluster/group_vars/all.yml, which was found rather than named, sets "
        "ansible_ssh_extra_args to '-o ProxyCommand=true'. This setting can make ssh run commands on this machine, so "
        "it is only allowed in an inventory that you name. If you trust the file, write the setting into mine, and "
        "name that file: -i mine\n"
    )
    Path("mine").rename(found)
    assert mpitrain(*words[:-1], "cluster/hosts").returncode == 0


@pytest.mark.parametrize("name", ["ansible.cfg", "cluster/setup.yml", "cluster/group_vars/all.yml", "cluster/hosts"])
def test_the_playbooks_of_the_current_folder(found: Path, name: str) -> None:
    for file in ("ansible.cfg", "cluster/setup.yml", "cluster/group_vars/all.yml"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).touch(mode=0o644)
    Path(name).chmod(0o666)
    done = mpitrain("cluster", "setup", "--dry-run")
    assert (done.returncode, f"{described(Path(name).resolve())}. Allowed" in done.stderr) == (2, True)
