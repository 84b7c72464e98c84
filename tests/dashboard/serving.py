"""A dashboard in a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from jobs import HANG_SECONDS, clean_environment


def require() -> None:
    """Skip a test where there is nothing to serve with."""
    for name in ("starlette", "uvicorn"):
        pytest.importorskip(name, reason="needs Starlette and uvicorn: pip install 'mpitrain[dashboard]'")


@dataclass
class Dashboard:
    """A dashboard that serves. `viewer` and `operator` are its tokens."""

    process: subprocess.Popen[str]
    base: str
    viewer: str
    operator: str
    root: Path  # the folder with records

    @property
    def port(self) -> int:
        port = urlsplit(self.base).port
        assert port is not None
        return port

    @property
    def operators_link(self) -> str:
        return f"{self.base}/?token={self.operator}"

    @property
    def link(self) -> str:
        return f"{self.base}/?token={self.viewer}"

    def ask(
        self,
        path: str,
        token: str | None = None,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: str | None = None,
    ) -> tuple[int, dict[str, str], str]:
        """Make a request with the viewer's token, or another one; "": with none. Returns status, headers and text."""
        token = self.viewer if token is None else token
        sent = {"Authorization": f"Bearer {token}"} if token else {}
        if self.base.startswith("https"):
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            line: Any = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=HANG_SECONDS, context=context)
        else:
            line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_SECONDS)
        with contextlib.closing(line):
            line.request(method, path, body, {**sent, **(headers or {})})
            answer = line.getresponse()
            fields = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, fields, answer.read().decode()

    def get(self, path: str) -> Any:
        """The JSON of an answer."""
        status, _, text = self.ask(path)
        assert status == 200, (status, text)
        return json.loads(text)

    def records(self, answer: Any) -> list[dict[str, Any]]:
        """The runs of a list that are below `root`, without those of jobs that other tests run at the same time."""
        return [run for run in answer["runs"] if Path(run["folder"]).is_relative_to(self.root)]

    def wait_for(self, path: str, test: Any) -> Any:
        """Ask until the answer passes the test. Returns the answer."""
        deadline = time.monotonic() + HANG_SECONDS
        while not test(answer := self.get(path)):
            assert time.monotonic() < deadline, answer
            time.sleep(0.2)
        return answer


@contextlib.contextmanager
def dashboard(
    cache: Path,
    *words: str,
    cwd: Path | None = None,
    code: int = 0,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
) -> Iterator[Dashboard]:
    """Start one at a free port; at the end, end it by Ctrl-C. It must end with this code.

    `before` is a command that becomes the one behind it.
    """
    require()
    environment = clean_environment({"XDG_CACHE_HOME": str(cache), **(env or {})})
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "mpitrain", "dashboard", "--port", "0", *words],
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        printed = "".join(process.stdout.readline() for _ in range(3))
        links = re.findall(r"for (viewers|operators): +(https?://[^/]+)/\?token=(\S+)", printed)
        assert len(links) == 2, printed + process.stderr.read()
        (_, base, viewer), (_, _, operator) = links
        yield Dashboard(process, base, viewer, operator, Path(cwd or "", words[0]))
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(HANG_SECONDS)
        finally:
            process.kill()
            _, errors = process.communicate()
            print(errors, file=sys.stderr)  # where a test has failed, this may say why
    assert process.returncode == code, errors
    assert "Traceback" not in errors, errors


def refused(cache: Path, *words: str) -> tuple[int, str]:
    """Start one that cannot serve. Returns its exit code and stderr."""
    require()
    environment = clean_environment({"XDG_CACHE_HOME": str(cache)})
    words = (sys.executable, "-m", "mpitrain", "dashboard", *words)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    return done.returncode, done.stderr


def chromium() -> str:
    """The path of a Chromium; "": there is none."""
    return next((path for path in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if os.access(path, os.X_OK)), "")
