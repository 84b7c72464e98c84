"""How long the dashboard's list of many ended runs takes to open in a browser, and where the time goes.

    python benchmarks/dashboard_list.py [--runs 1000] [--visits 7] [CHECKOUT ...]

Makes the records, and starts one dashboard for each checkout of this repository, with the runs in its index. Then a
Chromium visits them in turns, each time in a fresh context, so without a cache. Needs Playwright and Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from mpitrain.bench.rounds import spread, versions_line
from mpitrain.training.run_document import RunDocument

HERE = Path(__file__).resolve().parents[1]
DEADLINE_SECONDS = 120
SETTLE_SECONDS = 1.5  # behind the first rows, the stream brings the whole list
# Notes when the first rows are painted: the frame after the one that has them has begun.
WATCH = """
(() => {
  const watch = new MutationObserver(() => {
    if (!document.querySelector("#runs tbody tr[data-id]")) return;
    watch.disconnect();
    requestAnimationFrame(() => setTimeout(() => { window.firstRows = performance.now(); }));
  });
  watch.observe(document, {childList: true, subtree: true});
})();
"""


def make_records(folder: Path, number: int) -> None:
    """Write the records of ended runs: a row each 10 steps, and two events."""
    for place in range(number):
        run = folder / f"run-{place:04}"
        run.mkdir(parents=True)
        begun = 1.76e9 + 3600 * place
        document = RunDocument(
            job=f"{place:08x}",
            script="/srv/work/train.py",
            arguments=["--lr", str(0.001 * (place + 1)), "--epochs", "30"],
            folder="/srv/work",
            hosts={f"node{host}": list(range(4 * host, 4 * host + 4)) for host in range(1 + place % 6)},
            strategy="Sync",
            settings={"algorithm": "auto"},
            python="3.11.7",
            packages={"numpy": "2.4.6", "mpi4py": "4.1.2", "torch": "2.9.0"},
            commit="0123abcd",
            is_changed=False,
            process="nowhere 1 2",
            after_step=0,
            first_started=begun,
            started=begun,
            ended=begun + 60 * (1 + place % 50),
            end="done" if place % 7 else "DataError: rank 3 on node1: a batch has 0 samples",
        )
        (run / "run.json").write_text(document.text())
        rows: list[dict[str, Any]] = [
            {"step": 10 * row, "loss": 3.0 / row + place / 1e4, "samples_per_second": 950.5 + place}
            for row in range(1, 31)
        ]
        event = {"after_step": 100, "text": "rank 2 on node0 was killed; the others went on", "source": "ranks"}
        rows[10]["events"] = [event]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def dashboard(checkout: Path, folder: Path, cache: Path) -> Iterator[tuple[str, str, int]]:
    """Start the dashboard of a checkout. Yields its address, its token, and its process."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(cache)}
    words = [sys.executable, "-m", "mpitrain", "dashboard", "--port", "0", str(folder)]
    process = subprocess.Popen(words, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        match = re.search(r"(http://[^/]+)/\?token=(\S+)", process.stdout.readline())
        assert match, "the dashboard has not started"
        yield match[1], match[2], process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_SECONDS)


def processor_seconds(pid: int) -> float:
    """Processor time of a process until now, of all its threads."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def visit(browser: Any, base: str, token: str, num_runs: int) -> dict[str, float]:
    """Open the list. Returns seconds from the begin of the navigation, and of the page's processor."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    try:
        port = base.rsplit(":", 1)[1]
        context.add_cookies([{"name": f"mpitrain-{port}", "value": token, "url": base}])
        context.add_init_script(WATCH)
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        time.sleep(SETTLE_SECONDS)  # a new window loads much of the browser's own
        page.goto(base + "/", wait_until="commit")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (first := page.evaluate("window.firstRows")) is None:  # the page's policy forbids wait_for_function
            assert time.monotonic() < deadline, "no row has appeared"
            time.sleep(0.1)
        time.sleep(SETTLE_SECONDS)
        count = page.inner_text("#count")
        assert int(count.partition(" ")[0]) >= num_runs, count
        metrics = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
        return {
            "first rows, clock": first / 1000,
            "scripts, processor": metrics["ScriptDuration"],
            "styles, processor": metrics["RecalcStyleDuration"],
            "layout, processor": metrics["LayoutDuration"],
            "all of the page's thread, processor": metrics["TaskDuration"],
        }
    finally:
        context.close()


def main() -> None:
    """Visit the dashboards, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--visits", type=int, default=7)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[HERE], metavar="CHECKOUT")
    options = parser.parse_args()
    checkouts = [checkout.resolve() for checkout in options.checkouts]
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpitrain-list-")))
        make_records(place / "runs", options.runs)
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        stack.callback(browser.close)
        served = [
            stack.enter_context(dashboard(checkout, place / "runs", place / f"cache-{number}"))
            for number, checkout in enumerate(checkouts)
        ]
        results: list[list[dict[str, float]]] = [[] for _ in served]
        for number in range(options.visits + 1):
            for (base, token, pid), visits in zip(served, results, strict=True):
                before = processor_seconds(pid)
                seconds = visit(browser, base, token, options.runs)
                seconds["the dashboard, processor"] = processor_seconds(pid) - before
                if number:  # the first visit waits for the index
                    visits.append(seconds)
        version = browser.version
    print(versions_line(), f"; Chromium {version}; {options.runs} runs, {options.visits} visits", sep="")
    print(f"load {os.getloadavg()[0]:.1f}; seconds: median (10th to 90th percentile)")
    for name in results[0][0]:
        columns = [[one[name] for one in visits] for visits in results]
        shown = ["{:.3f} ({:.3f} to {:.3f})".format(*spread(values)) for values in columns]
        print(f"| {name} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
