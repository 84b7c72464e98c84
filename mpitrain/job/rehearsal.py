"""The run of a script for `mpitrain plan`: it ends before it does harm, and lists what it has written.

It sees what Python itself does (sys.addaudithook). Writes of C code and of other programs are not seen: for these, the
folder of the script and the current folder are compared before and after.

It imports nothing of mpitrain above job.context, so it can see whether the script has imported mpitrain.
"""
# ruff: noqa: PTH100, PTH118, PTH119, PTH120, PTH208
# Paths are compared as text, for each file that is opened.

from __future__ import annotations

import atexit
import logging
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mpitrain.context import PREFIX

_MOST_UNSEEN = 10  # steps of an optimizer, or twice as many calls of world.mean, that a plan cannot measure
_FIRST_LINE_SECONDS = 30.0  # without a step; later lines follow at doubled intervals
_MOST_FILES = 20_000  # of a folder that is compared
_MOST_NAMES = 20  # in a line
_SKIPPED = {".git", "__pycache__", "node_modules"}
_CACHES = (
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "HF_HOME", "HF_DATASETS_CACHE",
    "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR", "NUMBA_CACHE_DIR", "CUPY_CACHE_DIR",
    "JAX_COMPILATION_CACHE_DIR", "PYTHONPYCACHEPREFIX",
)  # fmt: skip
_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn")

_Files = dict[str, str]


class Rehearsal:
    """Watches what a script does in its process, as far as Python sees it. Make one before the script begins.

    Existing files are never overwritten, removed or renamed: the script is ended before that. It may create files, and
    append to others; at the end of the process a line on stderr names them. A script that has imported no mpitrain ends
    before it makes a file. The caches of libraries do not count.
    """

    def __init__(self, script: str, seconds: float, *, may_write: bool) -> None:
        """
        Args:
            script: its file.
            seconds: the time without a measurable step after which the script is ended; 0: no limit.
            may_write: the script may change any files.
        """
        self._script, self._seconds, self._may_write = script, seconds, may_write
        self._began = time.time_ns()
        self._is_rank_0 = {os.environ.get(name, "0") for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")} == {"0"}
        self._pid = os.getpid()
        own = [str(Path(script).resolve().parent), os.path.realpath(Path.cwd())]
        self._folders = [
            one for one in dict.fromkeys(own) if not any(_is_in(one, other) for other in own if other != one)
        ]
        home = os.path.realpath(Path.home())
        self._home = "" if any(_is_hidden(one, home) for one in own) else home
        self._caches = [os.path.realpath(os.environ[name]) for name in _CACHES if os.environ.get(name)]
        if record := os.environ.get(f"{PREFIX}PLAN_RECORD"):
            self._caches.append(os.path.realpath(Path(record).parent))
        self._temporary = [os.path.realpath(one) for one in (os.environ.get("TMPDIR", "/tmp"), "/tmp", "/var/tmp")]
        self._existed: dict[str, bool] = {}  # by path, when it was first seen
        # A forked process also has the file. For each path: its earlier state, for the line at the end.
        self._journal = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self._noted: set[str] = set()
        self._refused: set[str] = set()
        self._before = _files(self._folders)
        self._last_seen = time.monotonic()
        self._num_unseen = 0.0
        self._has_torch = False
        self._forget_optimizers: Callable[[], None] | None = None
        self.has_steps = self.is_measured = self.is_over = False
        self._exit: SystemExit | None = None

    def begin(self) -> None:
        """Begin to watch. A second object in the same process would also watch."""
        global current  # noqa: PLW0603 - audit hooks stay for the whole process, too
        current = self
        atexit.register(self.report)
        sys.addaudithook(self._hear)
        logging.getLogger("jax._src.callback").addFilter(self._is_news)
        threading.Thread(target=self._watch_time, daemon=True, name="mpitrain-plan").start()

    def stepped(self) -> None:
        """Note a step that is measured."""
        self._last_seen, self.has_steps = time.monotonic(), True
        if self._forget_optimizers is not None:
            self._forget_optimizers()
            self._forget_optimizers = None

    def unseen(self, steps: str, share: float = 1.0) -> None:
        """Note what may be a step that cannot be measured. End the script after a few, if nothing was measured."""
        self._num_unseen += share
        if self._num_unseen >= _MOST_UNSEEN and not self.has_steps:
            self._end(
                f"has trained for some steps that mpitrain plan cannot measure ({steps}), so it was ended. mpitrain "
                "plan measures the steps of Trainer, of mpitrain.torch.prepare and of GradientReducer: use one of these"
            )

    def report(self) -> None:
        """Print on stderr what was written."""
        if os.getpid() != self._pid or self._journal.closed:
            return
        self._journal.seek(0)
        lines = [line.split("\0") for line in self._journal.read().decode(errors="surrogateescape").splitlines()]
        self._journal.close()
        seen = {path: state for kind, path, before in lines if kind == "file" and (state := _change(path, before))}
        programs = dict.fromkeys(path for kind, path, _ in lines if kind == "program")
        now = _files(self._folders) if self._before is not None else None
        unseen: dict[str, str] = {}
        if self._before is not None and now is not None:
            for path in self._before.keys() | now.keys():
                if self._before.get(path) != now.get(path) and path not in seen:
                    unseen[path] = "removed" if path not in now else "changed" if path in self._before else "new"
        if seen:
            self._say(f"wrote {self._listed(seen)}")
        if unseen:
            self._say(f"or other users wrote, unseen by Python: {self._listed(unseen)}")
        if programs:
            where = " and ".join(self._folders)
            looked = f"outside of {where}" if now is not None else f"(there are too many files in {where} to compare)"
            self._say(f"has started {', '.join(list(programs)[:_MOST_NAMES])}; what they write {looked} was not seen")

    def _say(self, text: str) -> None:
        print(f"mpitrain plan: {self._script} {text}", file=sys.stderr, flush=True)

    def _end(self, why: str) -> None:
        """End the script; the steps that were measured count."""
        if why not in self._refused:
            self._refused.add(why)
            self._say(why)
        if os.getpid() != self._pid:  # a forked process also has the functions of atexit
            os._exit(1)
        self.leave(0 if self.is_measured else 1)

    def leave(self, code: int) -> NoReturn:
        """End the script here with this exit code."""
        self._exit = SystemExit(code)
        raise self._exit

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for the script.

        If the script is ended inside a callback, the calling library raises its own error, as JAX does.
        """
        try:
            yield
        except Exception:
            if self._exit is None:
                raise
            raise self._exit from None

    def _is_news(self, record: logging.LogRecord) -> bool:
        return self._exit is None or not record.exc_info or record.exc_info[1] is not self._exit

    def _watch_time(self) -> None:
        wait, said = _FIRST_LINE_SECONDS, self._last_seen
        while not self.is_over:
            time.sleep(0.2)
            if said != self._last_seen:
                wait, said = _FIRST_LINE_SECONDS, self._last_seen
            seconds = time.monotonic() - said
            if self._seconds and seconds >= self._seconds:
                self._say(
                    f"was ended, because it has made no step that mpitrain plan can measure for {seconds:.0f} s. If it "
                    "needs longer, give --step-timeout; measured are the steps of Trainer, of mpitrain.torch.prepare "
                    "and of GradientReducer"
                )
                self.report()
                sys.stdout.flush()
                os._exit(1)
            if seconds >= wait and self._is_rank_0:
                limit = f"; after {self._seconds:.0f} s it is ended (--step-timeout)" if self._seconds else ""
                self._say(f"has made no step that can be measured for {seconds:.0f} s{limit}")
                wait *= 2

    def _hear(self, event: str, arguments: Sequence[Any]) -> None:
        hear = _EVENTS.get(event)
        if hear is not None:
            hear(self, event, arguments)

    def _imported(self, _: str, __: Sequence[Any]) -> None:
        """Once PyTorch is imported, count the steps of optimizers, and notice torch.save, which writes in C++."""
        module = sys.modules.get("torch.optim.optimizer")
        if self._has_torch or module is None:
            return
        if register := getattr(module, "register_optimizer_step_post_hook", None):
            self._has_torch = True
            handle = register(lambda optimizer, *_: self.unseen(f"of {type(optimizer).__name__}"))
            self._forget_optimizers = handle.remove
            writer = sys.modules["torch"]._C.PyTorchFileWriter
            make = writer.__init__

            def tell_and_make(own: Any, file: Any, *more: Any, **named: Any) -> None:
                if isinstance(file, str):
                    sys.audit("open", file, "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                make(own, file, *more, **named)

            writer.__init__ = tell_and_make

    def _opened(self, _: str, arguments: Sequence[Any]) -> None:
        path, _mode, flags = arguments
        if not isinstance(flags, int) or (path := _path(path)) is None:
            return
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & (os.O_TRUNC | os.O_CREAT):
            self._writes(os.path.realpath(path), "overwrite" if flags & os.O_TRUNC else "")

    def _truncated(self, _: str, arguments: Sequence[Any]) -> None:
        if (path := _path(arguments[0])) is not None:
            self._writes(os.path.realpath(path), "overwrite")

    def _removed(self, event: str, arguments: Sequence[Any]) -> None:
        if (path := _path(arguments[0], arguments[-1])) is not None:
            self._writes(_place(path), "remove")

    def _renamed(self, _: str, arguments: Sequence[Any]) -> None:
        source, target, *folders = arguments
        for path, folder, action in ((source, folders[0], "rename"), (target, folders[1], "overwrite")):
            if (place := _path(path, folder)) is not None:
                self._writes(_place(place), action)

    def _made(self, event: str, arguments: Sequence[Any]) -> None:
        path = arguments[0] if event == "os.mkdir" else arguments[1]
        if (place := _path(path, arguments[-1] if event != "os.link" else -1)) is not None:
            self._writes(_place(place), "")

    def _met(self, _: str, arguments: Sequence[Any]) -> None:
        """Remember whether a file existed, before its modification time changes."""
        if (path := _path(arguments[0])) is not None:
            self._was_there(os.path.realpath(path))

    def _connected(self, _: str, arguments: Sequence[Any]) -> None:
        path = _path(arguments[0])
        if path and path != ":memory:":
            self._writes(os.path.realpath(path.removeprefix("file:").partition("?")[0]), "")

    def _started(self, event: str, arguments: Sequence[Any]) -> None:
        words = arguments[1] if event == "subprocess.Popen" else arguments[0]
        if event == "subprocess.Popen" and not isinstance(words, (list, tuple)):
            words = [words]
        if isinstance(words, (list, tuple)):
            words = words[0] if words else "?"
        name = os.path.basename(os.fsdecode(words).split()[0]) if isinstance(words, (str, bytes)) else str(words)
        self._note("program", name, "")

    def _was_there(self, path: str) -> bool:
        """Whether something was at `path` before the script began."""
        if path not in self._existed:
            try:
                self._existed[path] = os.lstat(path).st_ctime_ns < self._began
            except OSError:
                self._existed[path] = False
        return self._existed[path]

    def _writes(self, path: str, action: str) -> None:
        """Note an action that is about to change a path. End the script before existing content is lost."""
        if self._is_cache(path):
            return
        try:
            status = os.lstat(path)
        except OSError:
            status = None
        was_there = self._was_there(path)
        if not self._may_write:
            if action and was_there and status is not None and _has_content(path, status):
                self._end(
                    f"would {action} {self._shown(path)}{_caller()}, which was there before, so it was ended. The "
                    "file is as it was. Plan in a copy of the folder, or allow such writes with --writes"
                )
            if not was_there and self._cannot_be_measured() and not self._is_temporary(path):
                self._end(
                    f"would write {self._shown(path)}{_caller()} and has not imported mpitrain, so it was ended: "
                    "mpitrain plan measures the steps of Trainer, of mpitrain.torch.prepare and of GradientReducer"
                )
        before = "" if status is None or not was_there else _state(status)
        self._note("file", path, before)

    def _cannot_be_measured(self) -> bool:
        if "mpitrain.world.world" in sys.modules:
            return False
        with suppress(OSError):
            return b"mpitrain" not in Path(self._script).read_bytes()
        return False

    def _note(self, kind: str, path: str, before: str) -> None:
        if path in self._noted or self._journal.closed or "\n" in path:
            return
        self._noted.add(path)
        line = f"{kind}\0{path}\0{before}\n".encode(errors="surrogateescape")
        with suppress(OSError):
            os.write(self._journal.fileno(), line)

    def _is_cache(self, path: str) -> bool:
        return (
            path.startswith(("/dev/", "/proc/", "/sys/"))
            or "/__pycache__/" in path
            or "/torchinductor_" in path
            or _is_hidden(path, self._home)
            or any(_is_in(path, one) for one in self._caches)
        )

    def _is_temporary(self, path: str) -> bool:
        return any(_is_in(path, one) for one in self._temporary) and not any(_is_in(path, one) for one in self._folders)

    def _listed(self, states: Mapping[str, str]) -> str:
        names = [f"{self._shown(path)} ({states[path]})" for path in sorted(states)]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return ", ".join(names[:_MOST_NAMES]) + more

    def _shown(self, path: str) -> str:
        here = self._folders[-1]
        return os.path.relpath(path, here) if _is_in(path, here) else path


_EVENTS: dict[str, Callable[[Rehearsal, str, Sequence[Any]], None]] = {
    "import": Rehearsal._imported,
    "open": Rehearsal._opened,
    "os.truncate": Rehearsal._truncated,
    **dict.fromkeys(("os.remove", "os.rmdir", "shutil.rmtree"), Rehearsal._removed),
    "os.rename": Rehearsal._renamed,
    **dict.fromkeys(("os.mkdir", "os.link", "os.symlink"), Rehearsal._made),
    **dict.fromkeys(("os.chmod", "os.chown", "os.utime", "os.setxattr"), Rehearsal._met),
    "sqlite3.connect": Rehearsal._connected,
    **dict.fromkeys(_PROGRAMS, Rehearsal._started),
}
current: Rehearsal | None = None


def _path(path: Any, folder: Any = -1) -> str | None:
    """The path of an event as text; None: it is a descriptor, or malformed."""
    try:
        text = os.fsdecode(path)
        if isinstance(folder, int) and folder >= 0 and not text.startswith("/"):
            text = f"{Path(f'/proc/self/fd/{folder}').readlink()}/{text}"
    except (TypeError, ValueError, OSError):
        return None
    return None if "\0" in text else text


def _place(path: str) -> str:
    """The location of `path` itself, even if it is a link."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _is_hidden(path: str, home: str) -> bool:
    """Whether it is in a folder such as ~/.cache."""
    return bool(home) and path.startswith(f"{home.rstrip('/')}/.")


def _has_content(path: str, status: os.stat_result) -> bool:
    """Whether content would be lost: locks and other empty files have none."""
    if stat.S_ISDIR(status.st_mode):
        with suppress(OSError):
            return bool(os.listdir(path))
    return stat.S_ISLNK(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_size > 0)


def _caller() -> str:
    """The line of the script that does it; "": not known."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<", os.path.dirname(os.__file__), sys.prefix)) and name != __file__:
            return f" ({os.path.basename(name)}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""


def _change(path: str, before: str) -> str:
    """How a path has changed; "": no lasting change."""
    try:
        status = os.lstat(path)
    except OSError:
        return "removed" if before else ""
    if not before:
        return "" if stat.S_ISDIR(status.st_mode) and os.listdir(path) else "new"
    return "" if before == _state(status) or stat.S_ISDIR(status.st_mode) else "changed"


def _state(status: os.stat_result) -> str:
    """A value that is equal if a file has not changed."""
    return f"{status.st_size} {status.st_mtime_ns}" if status.st_size else "empty"


def _files(folders: Sequence[str]) -> _Files | None:
    """The files of folders with size, time and inode number; None: there are too many."""
    files: _Files = {}
    for path, status in _walk(list(folders)):
        files[path] = f"{_state(status)} {status.st_ino}"
        if len(files) > _MOST_FILES:
            return None
    return files


def _walk(folders: list[str]) -> Iterator[tuple[str, os.stat_result]]:
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:
            continue
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _SKIPPED:
                        folders.append(entry.path)
                else:
                    yield entry.path, entry.stat(follow_symlinks=False)
