#!/usr/bin/python
"""Several files, folders and links of a node in one go: a module for each of them costs a start of Python each."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = """
module: mpitrain_files
short_description: Several files, folders and links at once
description: >-
  Makes each entry as it should be, in their order. What is as it should be stays. A link is never followed. Files and
  folders belong to root.
options:
  entries:
    description: what should be there
    type: list
    elements: dict
    required: true
    suboptions:
      path: {description: its place, type: path, required: true}
      kind:
        description: what it is; C(absent) removes whatever is there, a folder with all in it
        type: str
        choices: [file, folder, link, absent]
        default: file
      content: {description: of a file, type: str}
      target: {description: of a link, type: str}
      mode: {description: "of a file, 0644 if it is not said; of a folder, 0755", type: str}
      validate: {description: a command that must accept a new file; C(%s) is its path, type: str}
author: mpitrain
"""

OPTIONS: dict[str, dict[str, Any]] = {
    "path": {"type": "path", "required": True},
    "kind": {"type": "str", "choices": ["file", "folder", "link", "absent"], "default": "file"},
    "content": {"type": "str"},
    "target": {"type": "str"},
    "mode": {"type": "str"},
    "validate": {"type": "str"},
}
MODES = {"file": "0644", "folder": "0755"}


class Entries:
    """Makes entries, and remembers what changed, for --diff too."""

    def __init__(self, module: AnsibleModule) -> None:
        self._module = module
        self.changed: list[str] = []
        self.diffs: list[dict[str, str]] = []

    def make(self, entry: dict[str, Any]) -> None:
        """Make one as it should be."""
        {"file": self._file, "folder": self._folder, "link": self._link, "absent": self._absent}[entry["kind"]](entry)

    def _file(self, entry: dict[str, Any]) -> None:
        path, content = Path(entry["path"]), entry["content"].encode()
        self._refuse_folder(path)
        before = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        if before != content:
            self._note(path, "" if before is None else before.decode(errors="replace"), entry["content"])
            if not self._module.check_mode:
                self._write(path, content, entry)
        self._attributes(entry, path)

    def _write(self, path: Path, content: bytes, entry: dict[str, Any]) -> None:
        """All or nothing: a reader finds the old content or the new one, and never an invalid one."""
        number, new = tempfile.mkstemp(dir=self._module.tmpdir)
        with os.fdopen(number, "wb") as file:
            file.write(content)
        if entry["validate"]:
            code, output, error = self._module.run_command(entry["validate"] % new)
            if code != 0:
                self._fail(path, f"the new content is not valid: {output}{error}")
        if not path.parent.is_dir():
            self._fail(path, "its folder is not there")
        self._module.atomic_move(new, str(path))

    def _folder(self, entry: dict[str, Any]) -> None:
        path = Path(entry["path"])
        if path.is_symlink():
            self._fail(path, "is a link and should be a folder; move it away")
        missing = [folder for folder in [path, *path.parents] if not folder.is_dir()]
        for folder in reversed(missing):
            if os.path.lexists(folder):
                self._fail(folder, "is there and is no folder; move it away")
            self._note(folder, "absent\n", "folder\n")
            if not self._module.check_mode:
                folder.mkdir()
                self._attributes(entry, folder)
        if not missing:
            self._attributes(entry, path)

    def _link(self, entry: dict[str, Any]) -> None:
        path, target = Path(entry["path"]), entry["target"]
        self._refuse_folder(path)
        if path.is_symlink() and str(path.readlink()) == target:
            return
        self._note(path, "another file\n" if os.path.lexists(path) else "absent\n", f"link to {target}\n")
        if not self._module.check_mode:
            new = path.with_name(f".{path.name}.new")
            new.unlink(missing_ok=True)
            new.symlink_to(target)
            new.replace(path)  # at no moment there is none

    def _absent(self, entry: dict[str, Any]) -> None:
        path = Path(entry["path"])
        if not os.path.lexists(path):
            return
        self._note(path, "present\n", "absent\n")
        if self._module.check_mode:
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def _attributes(self, entry: dict[str, Any], path: Path) -> None:
        """Owner, group and mode; in a dry run the file may not be there yet."""
        if path.is_symlink() or not path.exists():
            return
        wanted = {
            "path": str(path),
            "owner": "root",
            "group": "root",
            "mode": entry["mode"] or MODES[entry["kind"]],
        }
        arguments = self._module.load_file_common_arguments(wanted)
        if self._module.set_fs_attributes_if_different(arguments, False) and str(path) not in self.changed:
            self._note(path, "another owner or mode\n", "{owner}:{group} {mode}\n".format(**wanted))

    def _refuse_folder(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            self._fail(path, "is a folder and should be a file or a link; move it away")

    def _note(self, path: Path, before: str, after: str) -> None:
        self.changed.append(str(path))
        self.diffs.append(
            {"before_header": str(path), "after_header": str(path), "before": before, "after": after},
        )

    def _fail(self, path: Path, what: str) -> None:
        self._module.fail_json(msg=f"{path}: {what}", changed=bool(self.changed))


def main() -> None:
    """Make all entries."""
    arguments = {"entries": {"type": "list", "elements": "dict", "required": True, "options": OPTIONS}}
    module = AnsibleModule(arguments, supports_check_mode=True)
    entries = Entries(module)
    for entry in module.params["entries"]:
        needed = {"file": "content", "link": "target"}.get(entry["kind"])
        if needed and entry[needed] is None:
            module.fail_json(msg=f"{entry['path']}: an entry of kind {entry['kind']} needs {needed}")
        try:
            entries.make(entry)
        except OSError as error:
            module.fail_json(msg=f"{entry['path']}: {error}", changed=bool(entries.changed))
    module.exit_json(changed=bool(entries.changed), diff=entries.diffs)


if __name__ == "__main__":
    main()
