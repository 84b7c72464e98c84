"""Make the pictures of the documents anew: of the dashboard, of `mpitrain plot` and of `mpitrain plan`.

    python benchmarks/pictures/make.py                    # as root: docs/*.png, in about 5 min on a quiet machine
    python benchmarks/pictures/make.py --to /tmp/new      # into another folder
    python benchmarks/pictures/make.py --width 400        # of a narrow screen

It trains on four hosts that are namespaces of this machine (hosts.py): a run that ends, one that fails, and one that is
told to change its learning rate at step 500 while node3 computes three times as long as the others. The link of node3
has a fifth of the rate of the others. It needs Chromium, and the extras browser, dashboard and plot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hosts import HOME, Hosts

from mpitrain.forecast.report import IDEAL, Panel, draw

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
RATES = {"node1": "1gbit", "node2": "1gbit", "node3": "200mbit", "node4": "1gbit"}
STEPS, TOLD_AT, SHOWN_AT = 1200, 500, 800
LIVE_STEPS = 5000  # more than are made until all pictures are
CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
DEADLINE_SECONDS = 1800.0


def main() -> None:
    """Make the hosts, and on the first one the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=REPOSITORY / "docs", metavar="FOLDER")
    parser.add_argument("--width", type=int, default=1200, help="of the screen in pixels")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        make(options.inside, options.to, options.width)
        return
    options.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, Hosts(Path(folder), RATES) as hosts:
        pictures = Path(folder, "pictures")  # hosts have a /tmp of their own
        pictures.mkdir()
        words = ["--inside", folder, "--to", str(pictures), "--width", str(options.width)]
        maker = hosts.on("node1", [sys.executable, __file__, *words])
        try:
            code = maker.wait()
        finally:
            if maker.poll() is None:  # ended by Ctrl-C; it ends what it has started
                maker.send_signal(signal.SIGINT)
                maker.wait()
        if code:
            raise SystemExit(code)
        for picture in sorted(pictures.iterdir()):
            shutil.copy(picture, options.to)
            print(options.to / picture.name)


def make(folder: Path, to: Path, width: int) -> None:
    """Make the pictures, on node1."""
    os.environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    os.environ["MPITRAIN_PROFILE"] = f"{HOME}/profile.json"
    runs = Path(HOME, "runs")
    os.chdir(Path(HOME, "mpitrain/benchmarks/pictures"))
    over_hosts = ["--hosts", ",".join(RATES), "--ppn", "1"]
    train = ["mpitrain", "run", "--max-restarts", "0", *over_hosts, "digits.py", "--steps", str(STEPS)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL}
    subprocess.run(
        ["mpitrain", "bench", *over_hosts, "--save-profile", os.environ["MPITRAIN_PROFILE"]], check=True, **quiet
    )
    subprocess.run([*train, "--run", str(runs / "lr-0.01"), "--lr", "0.01", "--step-ms", "10"], check=True, **quiet)
    words = ["--run", str(runs / "lr-0.1"), "--lr", "0.1", "--step-ms", "10", "--fails-at", "320"]
    subprocess.run([*train, *words], check=False, stderr=subprocess.DEVNULL, **quiet)
    words = ["--run", str(runs / "lr-0.03"), "--lr", "0.03", "--step-ms", "40", "--slow", "node3"]
    words += ["--steps", str(LIVE_STEPS)]
    with dashboard(runs) as (base, token), browser(width) as open_page, process([*train, *words], **quiet) as job:
        run = wait_for(base, token, lambda run: run["name"] == "lr-0.03" and (run["step"] or 0) >= TOLD_AT - 5)
        for told in ({"kind": "rate", "value": "0.5"}, {"kind": "set", "name": "label_noise", "value": "0.05"}):
            asked(f"{base}/api/runs/{run['id']}/tell", token, told)
            time.sleep(15)
        wait_for(base, token, lambda run: run["name"] == "lr-0.03" and (run["step"] or 0) >= SHOWN_AT)
        ids = {one["name"]: one["id"] for one in runs_of(base, token)}
        pages = {
            "dashboard-run": (f"/run/{ids['lr-0.03']}", "#charts[data-drawn]", 760),
            "dashboard-cluster": ("/cluster", "#matrices canvas", 780),
            "dashboard-runs": ("/", "#runs tbody tr", 350),
            "dashboard-failed": (f"/run/{ids['lr-0.1']}", "#charts[data-drawn]", 560),
        }
        for name, (path, shown, height) in pages.items():
            page = open_page(height)
            page.goto(f"{base}{path}{'&' if '?' in path else '?'}token={token}")
            page.wait_for_selector(shown)
            page.wait_for_timeout(4000)  # of looks at machines
            page.screenshot(path=to / f"{name}.png")
            page.context.close()
        asked(f"{base}/api/runs/{run['id']}/tell", token, {"kind": "stop"})
        job.wait()
    metrics = [
        word for name in ("loss", "test loss", "test accuracy", "samples_per_second") for word in ("--metric", name)
    ]
    line = ["mpitrain", "plot", "runs/lr-0.03", *metrics, "-o", str(to / "first-run.png")]
    subprocess.run(line, check=True, cwd=HOME, **quiet)
    draw_plan(to / "plan.png")


ROW = re.compile(r" +(\d+)  (\w+) +[\d.]+ m?s +([\d.]+) +[\d.]+ +(\d+)%")


def draw_plan(path: Path) -> None:
    """Draw the plan that docs/how-to/performance.md quotes, as `mpitrain plan --plot` draws it."""
    text = (REPOSITORY / "docs/how-to/performance.md").read_text()
    block = text[text.index("$ mpitrain plan --link") :].split("```")[0]
    rows = [(int(ranks), way, float(speed), int(share) / 100) for ranks, way, speed, share in ROW.findall(block)]
    [(_, _, alone, _)] = [row for row in rows if row[1] == "alone"]
    speeds: dict[str, list[Any]] = {}
    shares: dict[str, list[Any]] = {}
    for ranks, way, speed, share in rows:
        if way != "alone":
            speeds.setdefault(way, [(1, *[alone] * 3)]).append((ranks, *[speed] * 3))
            shares.setdefault(way, [(1, *[1.0] * 3)]).append((ranks, *[share] * 3))
    ideal = {IDEAL: [(ranks, *[ranks * alone] * 3) for ranks in sorted({row[0] for row in rows})]}
    title = block.strip().splitlines()[-1]
    draw(path, title, "ranks", [[Panel("samples/s", speeds | ideal, log_base=2), Panel("efficiency", shares)]])


@contextlib.contextmanager
def process(line: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program that is ended in the end."""
    with subprocess.Popen(line, text=True, **options) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.send_signal(signal.SIGINT)


@contextlib.contextmanager
def dashboard(runs: Path) -> Iterator[tuple[str, str]]:
    """Serve; yields the address and the token of operators."""
    with process(["mpitrain", "dashboard", str(runs)], stdout=subprocess.PIPE) as served:
        assert served.stdout is not None
        printed = "".join(served.stdout.readline() for _ in range(3))
        yield re.findall(r"for operators: +(http://[^/]+)/\?token=(\S+)", printed)[0]


@contextlib.contextmanager
def browser(width: int) -> Iterator[Callable[[int], Any]]:
    """Yields what opens a page of a height."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)

        def open_page(height: int) -> Any:
            context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme="light")
            context.set_default_timeout(120_000)
            return context.new_page()

        yield open_page
        chromium.close()


def runs_of(base: str, token: str) -> list[dict[str, Any]]:
    """The runs of the dashboard."""
    return [run for run in asked(f"{base}/api/runs", token)["runs"] if run["folder"]]


def asked(address: str, token: str, told: dict[str, str] | None = None) -> dict[str, Any]:
    """What the dashboard answers, or what a job says to a command."""
    body = None if told is None else json.dumps(told).encode()
    request = urllib.request.Request(address, body, {"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        result: dict[str, Any] = json.load(answer)
    if "refused" in result:
        raise SystemExit(result["refused"])
    return result


def wait_for(base: str, token: str, test: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first run that passes the test."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        for run in runs_of(base, token):
            if test(run):
                return run
        time.sleep(0.2)
    raise SystemExit(f"no run came so far in {DEADLINE_SECONDS:.0f} s")


if __name__ == "__main__":
    main()
