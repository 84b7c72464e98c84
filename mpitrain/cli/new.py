"""`mpitrain new FOLDER`: write a small project to start from."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from mpitrain.errors import ConfigError

HELP = "write a small project to start from"
PAGE = "tutorials/get-started.md"

_EPILOG = """\
The folder gets train.py, job.sh and README.md. It must not exist, or be empty.

  mpitrain new my-project
  cd my-project
  mpitrain run -n 2 train.py
"""

_FILES = Path(__file__).parent / "new_project"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EPILOG
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to make")


def run(arguments: argparse.Namespace) -> int:
    """Write the files. Return 0."""
    folder: Path = arguments.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if present := sorted(path.name for path in folder.iterdir()):
            raise ConfigError(
                f"{folder} is not empty: it has {present[0]}; name a folder that does not exist or is empty"
            )
        # Not shutil.copy: the package's files may be read-only.
        for name in ("train.py", "job.sh", "README.md"):
            text = (_FILES / name).read_text(encoding="utf-8")
            if name == "README.md":
                text = text.replace("# NAME", f"# {folder.resolve().name}", 1)
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "job.sh").chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; name another folder") from None
    print(f"{folder} has train.py, job.sh and README.md. Next:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(folder))}")
    print("  mpitrain run -n 2 train.py")
    return 0
