"""Make the wheel of an installed mpitrain again: `python wheel_again.py FOLDER`.

Set-up brings the nodes the same mpitrain that runs it. If there is no checkout to build from, the files that pip
installed here are put into a wheel again, with the hashes as a wheel needs them. The format is that of "Binary
distribution format" of the PyPA's specifications.

Ansible's own Python runs this file, which may lack mpitrain. So it imports the standard library alone.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

# Written by pip at the installation, each for this place only.
_OF_THIS_PLACE = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"}


def make(site: Path, folder: Path) -> Path:
    """Write the wheel of the mpitrain that is installed in `site` into `folder`, and return its path.

    Raises:
        SystemExit: mpitrain is not installed in `site`, or files of it are missing.
    """
    installed = next(iter(distributions(name="mpitrain", path=[str(site)])), None)
    names = _names(installed) if installed is not None else []
    if installed is None or "mpitrain/__init__.py" not in names:
        raise SystemExit(
            f"there are no records of an installed mpitrain in {site}, which a wheel could be made of; install it with "
            "pip, or set mpitrain_package to a requirement for pip, such as mpitrain==0.2.0"
        )
    missing = [name for name in names if not (site / name).is_file()]
    if missing:
        raise SystemExit(
            f"{site / missing[0]} is missing; install mpitrain again: pip install --force-reinstall mpitrain"
        )
    information = f"mpitrain-{installed.version}.dist-info"
    path = folder / f"mpitrain-{installed.version}-py3-none-any.whl"
    lines = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name in names:
            content = (site / name).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}\n")
            wheel.write(site / name, name)
        wheel.writestr(f"{information}/RECORD", "".join([*lines, f"{information}/RECORD,,\n"]))
    return path


def _names(installed: Distribution) -> list[str]:
    """The files of the wheel: without commands, which pip makes, and what Python has compiled."""
    names = [str(file) for file in installed.files or []]
    return [
        name
        for name in names
        if not name.startswith(("..", "/", "bin/"))
        and not name.endswith(".pyc")
        and not (".dist-info/" in name and Path(name).name in _OF_THIS_PLACE)
    ]


if __name__ == "__main__":
    print(make(Path(__file__).resolve().parents[2], Path(sys.argv[1])))
