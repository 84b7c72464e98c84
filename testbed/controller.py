"""The bed's controller: this machine in the bed's network. ssh, Ansible and the packages' server run on it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpitrain.errors import LaunchError
from testbed import processes
from testbed.bed_record import BedRecord
from testbed.network import REPOSITORY_PORT
from testbed.processes import last_lines, start_in_background, wait_until

# Runs in its own mount namespace (ip netns exec makes one), with names, no name server, and ssh's settings for the
# nodes.
_ENTER = """\
mount --bind "$0/etc/hosts" /etc/hosts
[ ! -e /etc/resolv.conf ] || mount --bind "$0/etc/resolv.conf" /etc/resolv.conf
[ ! -d /etc/ssh/ssh_config.d ] || mount --bind "$0/etc/ssh_config.d" /etc/ssh/ssh_config.d
exec "$@"
"""
_NO_WAY_OUT = {"http_proxy", "https_proxy", "all_proxy", "ftp_proxy"}


def start_repository(record: BedRecord) -> None:
    """Serve packages and wheels to the nodes."""
    python = [sys.executable, "-u"]  # so that the log shows at once that it listens
    command = ["ip", "netns", "exec", record.namespace, *python, "-m", "http.server", str(REPOSITORY_PORT)]
    command += ["--bind", record.controller, "--directory", str(record.image_folder / "repository")]
    start_in_background(
        processes.in_group(processes.group(record.name, "repository"), command), _repository_log(record)
    )


def wait_for_repository(record: BedRecord) -> None:
    """Wait until packages and wheels are served.

    Raises:
        LaunchError: the server did not start in time. The error has the end of its log.
    """
    log = _repository_log(record)
    if not wait_until(lambda: "Serving HTTP" in log.read_text(), timeout_seconds=60):
        raise LaunchError(
            f"the packages' server of test bed {record.name} did not start:\n{last_lines(log.read_text())}"
        )


def _repository_log(record: BedRecord) -> Path:
    return record.folder / "repository.log"


def write_files(record: BedRecord, host_keys: Mapping[str, str]) -> None:
    """Write the inventory, the nodes' true host keys, and the /etc/hosts and ssh settings that commands see."""
    names = record.names
    known_hosts = record.folder / "known_hosts"
    known_hosts.write_text(
        "".join(f"{name},{record.address(name)} {' '.join(host_keys[name].split()[:2])}\n" for name in names)
    )
    options = f"-o UserKnownHostsFile={known_hosts} -o StrictHostKeyChecking=yes"
    lines = [
        f"{name} ansible_host={record.address(name)} ansible_user=admin "
        f"ansible_ssh_private_key_file={record.key} ansible_ssh_common_args='{options}'"
        for name in names
    ]
    record.inventory.write_text(
        "\n".join(["[head]", lines[0], "", "[workers]", *lines[1:], "", "[cluster:children]", "head", "workers", ""])
    )
    etc = record.folder / "etc"
    (etc / "ssh_config.d").mkdir(parents=True, exist_ok=True)
    (etc / "resolv.conf").write_text("")
    (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{record.address(name)} {name}\n" for name in names))
    (etc / "ssh_config.d" / "testbed.conf").write_text(
        f"Host {' '.join(names)} {record.subnet}.*\n"
        f"    User admin\n    IdentityFile {record.key}\n    IdentitiesOnly yes\n"
        f"    UserKnownHostsFile {known_hosts}\n    GlobalKnownHostsFile /dev/null\n"
        "    StrictHostKeyChecking yes\n    ConnectTimeout 10\n"
    )
    (record.folder / "ansible").mkdir(exist_ok=True)


def inside(record: BedRecord, command: Sequence[str], part: str = "cli") -> list[str]:
    """Return the command line that runs `command` on the controller, in the bed's group, so `down` ends it too."""
    enter = ["ip", "netns", "exec", record.namespace, "sh", "-ec", _ENTER, str(record.folder), *command]
    return processes.in_group(command_group(record, part), enter)


def command_group(record: BedRecord, part: str) -> Path:
    """Return the control group of a command that runs on the controller."""
    return processes.group(record.name, f"commands/{part}")


def environment(record: BedRecord, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for commands on the controller, with the bed's inventory for Ansible and its wheels for pip."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith("PIP_") and name.lower() not in _NO_WAY_OUT
    }
    wheels = f"http://{record.controller}:{REPOSITORY_PORT}/wheels/"
    # The wheel of the checkout is built with this Python's hatchling, if it has one. Otherwise pip first makes an
    # environment for it, which takes three times as long as the rest. pip reads this variable the wrong way round: 0
    # means "no isolation".
    if importlib.util.find_spec("hatchling") is not None:
        kept["PIP_NO_BUILD_ISOLATION"] = "0"
    return kept | {
        # Programs beside this Python, such as ansible-playbook, are found even under sudo.
        "PATH": f"{Path(sys.executable).parent}:{environ.get('PATH', os.defpath)}",
        "ANSIBLE_INVENTORY": str(record.inventory),
        # Ansible names its kept connections after user and address, which two beds may share.
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(record.folder / "ansible"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": wheels,
        "PIP_TRUSTED_HOST": record.controller,
    }


def link_group_vars(record: BedRecord, directory: Path) -> None:
    """Let Ansible find the checkout's group_vars beside the bed's inventory, as beside cluster/hosts."""
    link = record.folder / "group_vars"
    variables = directory / "cluster" / "group_vars"
    if variables.is_dir():
        new = record.folder / f"group_vars.{os.getpid()}"
        new.symlink_to(variables.resolve())
        new.replace(link)


def run(
    record: BedRecord,
    command: Sequence[str],
    *,
    timeout_seconds: float,
    env: Mapping[str, str],
    input: str | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command on the controller.

    Raises:
        LaunchError: the command took longer than `timeout_seconds`. It is killed, with all it started.
    """
    directory = cwd or Path.cwd()
    link_group_vars(record, directory)
    part = f"{os.getpid()}-{os.urandom(4).hex()}"
    group = command_group(record, part)
    process = subprocess.Popen(
        inside(record, command, part),
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment(record, os.environ) | dict(env),
        cwd=directory,
    )
    with process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout_seconds)
        except subprocess.TimeoutExpired as late:
            processes.kill(group)
            stdout, stderr = process.communicate(timeout=60)
            raise LaunchError(
                f"did not end within {timeout_seconds:g} s on test bed {record.name}: {' '.join(command)}\n"
                f"{last_lines(stdout + stderr)}"
            ) from late
        except BaseException:
            processes.kill(group)
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, stdout, stderr)
