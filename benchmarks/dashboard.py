"""What the dashboard costs and how fast it is, in a real Chromium.

    python benchmarks/dashboard.py                         # all of them
    python benchmarks/dashboard.py list zoom fresh cost    # some of them

    list    from the start of the navigation to a list of 1,000 runs, until its first screen is painted; at most 0.3 s
    zoom    from a key on a chart of 10^6 rows until the page has drawn the new points; at most 0.2 s
    fresh   from the end of a step, by the clock of its rank, until the page shows a row of this step; at most 1 s in
            the worst of 100
    cost    the wall time of a step of 50 ms on two ranks, alternately with and without a viewer of the page in the same
            job; a viewer costs less than 0.2 %. The step also takes the ranks' own processor time, which other work on
            the machine does not change.

It needs Playwright and Chromium. Every figure has its median, its worst, and the load of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from mpitrain.forecast.rounds import versions_line
from mpitrain.training.run_document import RunDocument

CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
ROWS, RUNS, LOOKS = 1_000_000, 1000, 100
# Each rank notes the end of each step: number, clock, seconds, and seconds of the processor.
SCRIPT = r"""
import os, resource, sys, time
from pathlib import Path
import numpy
import mpitrain as mt

folder, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

def build(world):
    def function(parameters, batch, on_gradient):
        time.sleep(seconds)
        on_gradient("w", parameters["w"] - batch[0].mean())
        return 1.0

    data = mt.data.ArrayData(world, [numpy.arange(64.0)], global_batch=8)
    return mt.Parts(mt.ArrayFunction(function, {"w": numpy.zeros(1)}, mt.optim.SGD(0.1)), mt.Sync(), data)

class Clock(mt.Hook):
    def __init__(self, world):
        self.file = (folder.parent / f"steps-{world.rank}").open("w", buffering=1)

    def after_step(self, trainer, step):
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.file.write(f"{step.number} {time.time()} {time.perf_counter()} {used.ru_utime + used.ru_stime}\n")

world = mt.init()
record = mt.Record([mt.writers.JsonLines(folder)], steps=int(sys.argv[4]))
mt.Trainer(build, [mt.StopAtStep(steps), Clock(world), record]).run()
"""


@contextlib.contextmanager
def dashboard(folder: Path, cache: Path) -> Iterator[str]:
    """Serve; yields the link of viewers."""
    line = [sys.executable, "-m", "mpitrain", "dashboard", "--port", "0", str(folder)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "XDG_STATE_HOME": str(cache)}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        printed = "".join(process.stdout.readline() for _ in range(3))
        try:
            yield re.findall(r"for viewers: +(\S+)", printed)[0]
        finally:
            process.terminate()


@contextlib.contextmanager
def browser() -> Iterator[Callable[[], Page]]:
    """Yields what opens a page in a profile of its own."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
        yield lambda: chromium.new_context(viewport={"width": 1400, "height": 900}).new_page()
        chromium.close()


def say(name: str, values: Sequence[float], unit: str, limit: str) -> None:
    """A line for the log."""
    print(
        f"| {name} | {len(values)} | {statistics.median(values):.3g} {unit} | {max(values):.3g} {unit} | {limit} "
        f"| {os.getloadavg()[0]:.1f} |",
        flush=True,
    )


def record(folder: Path, number: int, rows: int) -> None:
    """A record that has ended, with so many rows."""
    folder.mkdir(parents=True)
    document = RunDocument(
        job=f"{number:08x}",
        script="train.py",
        arguments=["--lr", f"{0.1 / (1 + number % 7):.3g}", "--seed", str(number % 5)],
        folder="/home/ada",
        hosts={"node1": [0], "node2": [1]},
        strategy="Sync",
        settings={},
        python="3.11.7",
        packages={"numpy": "2.4.6"},
        commit="0123abcd",
        is_changed=False,
        process="nowhere 1 2",
        after_step=0,
        first_started=1000.0 + number,
        started=1000.0 + number,
        ended=2000.0 + number,
        end="done",
        steps=rows,
    )
    (folder / "run.json").write_text(document.text())
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, rows + 1):
            loss = 3 / step**0.5 + (step * 7919 % 1000) / 1e4
            file.write(json.dumps({"step": step, "loss": loss, "samples_per_second": 100.0}) + "\n")


def wait_for(page: Page, place: Path, test: Callable[[list[Any]], bool]) -> list[Any]:
    """Wait until the runs in a folder pass the test, as the page's server knows them; it also knows other jobs."""
    page.wait_for_selector("#runs tbody tr", timeout=600_000)  # behind the redirection of the link
    deadline = time.monotonic() + 1200
    while time.monotonic() < deadline:
        runs = page.evaluate("async () => (await (await fetch('/api/runs')).json()).runs")
        runs = [run for run in runs if Path(run["folder"]).is_relative_to(place)]
        if runs and test(runs):
            return runs
        time.sleep(0.5)
    raise SystemExit("the index took too long")


def of_list(place: Path) -> None:
    """Measure the list of 1,000 runs."""
    for number in range(RUNS):
        record(place / f"runs/run-{number:04}", number, 20)
    with dashboard(place / "runs", place / "cache") as link, browser() as open_page:
        page = open_page()
        page.goto(link)
        wait_for(page, place, lambda runs: len(runs) == RUNS)
        page.context.add_init_script(PAINTED)
        times = []
        for _ in range(30):
            page.goto(link.split("?")[0])
            page.wait_for_selector("html[data-painted]", state="attached")
            times.append(float(page.get_attribute("html", "data-painted") or "nan") / 1000)
        say(f"list of {RUNS} runs, from the start of the navigation to the painted rows", times, "s", "0.3 s")


# Notes when the rows that find room on a screen are painted, in milliseconds since the start of the navigation.
PAINTED = """addEventListener("DOMContentLoaded", () => {
    const observer = new MutationObserver(() => {
        if (document.querySelectorAll("#runs tbody tr").length < 20) return;
        observer.disconnect();
        const page = document.documentElement.dataset;
        requestAnimationFrame(() => setTimeout(() => { page.painted = performance.now(); }));
    });
    observer.observe(document.body, {subtree: true, childList: true});
});"""


def of_zoom(place: Path) -> None:
    """Measure a zoom of 10^6 rows."""
    record(place / "long/run", 0, ROWS)
    with dashboard(place / "long", place / "cache2") as link, browser() as open_page:
        page = open_page()
        page.goto(link)
        [run] = wait_for(page, place, lambda runs: runs[0]["rows"] == ROWS)
        page.goto(f"{link.split('?')[0]}run/{run['id']}")
        page.wait_for_selector("#charts[data-drawn]", timeout=120_000)
        page.wait_for_timeout(3000)
        page.locator("#charts .plot").first.focus()
        keys = ["+"] * 8 + ["ArrowRight"] * 4 + ["-"] * 8 + ["+"] * 8 + ["ArrowLeft"] * 4 + ["0"]
        times = [page.evaluate(ZOOM, key) / 1000 for key in keys]
        say(f"zoom with {ROWS:,} rows, from the key to the drawn points", times, "s", "0.2 s")


# Presses a key on the first chart. Resolves with the milliseconds until the page has drawn what the server answered.
ZOOM = """(key) => new Promise((done) => {
    const charts = document.getElementById("charts"), begun = performance.now();
    const observer = new MutationObserver(() => {
        observer.disconnect();
        requestAnimationFrame(() => done(performance.now() - begun));
    });
    observer.observe(charts, {attributes: true, attributeFilter: ["data-drawn"]});
    const event = new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true});
    document.querySelector("#charts .plot").dispatchEvent(event);
})"""


@contextlib.contextmanager
def job(place: Path, steps: int, seconds: float, every: int) -> Iterator[Any]:
    """Run the script on two ranks."""
    place.mkdir(parents=True, exist_ok=True)
    script = place / "train.py"
    script.write_text(SCRIPT)
    words = [str(place / "live/run"), str(steps), str(seconds), str(every)]
    line = [sys.executable, "-m", "mpitrain", "run", "-n", "2", "--hosts", "localhost", str(script), *words]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)


def steps_of(place: Path, rank: int) -> list[list[float]]:
    """The steps that a rank has ended: number, clock, seconds, seconds of the processor."""
    path = place / f"live/steps-{rank}"
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [[float(word) for word in line.split()] for line in lines]


def opened(open_page: Callable[[], Page], place: Path, link: str) -> Page:
    """The page of the live run."""
    page = open_page()
    page.set_default_timeout(300_000)
    page.goto(link)
    [run] = wait_for(page, place, lambda runs: runs[0]["rows"] > 0)
    page.goto(f"{link.split('?')[0]}run/{run['id']}")
    page.wait_for_selector("#charts[data-drawn]")
    return page


def of_fresh(place: Path) -> None:
    """Measure from the end of a step until the page shows it."""
    (place / "live").mkdir(parents=True)
    with (
        dashboard(place / "live", place / "cache") as link,
        job(place, 100_000, 0.05, 1),
        browser() as open_page,
    ):
        page = opened(open_page, place, link)
        page.evaluate(SHOWN)
        while len(page.evaluate("() => window.shown")) < LOOKS + 10:
            page.wait_for_timeout(1000)
        shown = page.evaluate("() => window.shown")
        ends = {int(number): clock for number, clock, *_ in steps_of(place, 0)}
        delays = [at / 1000 - ends[step] for step, at in shown if step in ends][-LOOKS:]
        # The oldest step that the page did not know: of it the page has known nothing until the next look.
        stale = [b[1] / 1000 - ends[a[0] + 1] for a, b in itertools.pairwise(shown) if a[0] + 1 in ends][-LOOKS:]
        say("step to browser: the step that is shown, when it is shown", delays, "s", "1 s")
        say("step to browser: the oldest step that was not shown until then", stale, "s", "1 s")


# Notes each step that the head of the page shows, with the clock of when it was painted.
SHOWN = """() => {
    window.shown = [];
    const look = () => {
        const text = document.querySelector("#figures strong")?.textContent ?? "";
        const step = parseInt(text.replaceAll(",", ""));
        if (step > (window.shown.at(-1)?.[0] ?? 0)) requestAnimationFrame(() => window.shown.push([step, Date.now()]));
    };
    const all = {subtree: true, childList: true, characterData: true};
    new MutationObserver(look).observe(document.getElementById("top"), all);
}"""


def of_cost(place: Path) -> None:
    """Measure steps with and without a viewer, in turns in one job."""
    (place / "live").mkdir(parents=True)
    seconds, turns = 6.0, 16
    with (
        dashboard(place / "live", place / "cache") as link,
        job(place, 1_000_000, 0.05, 10),
        browser() as open_page,
    ):
        while len(steps_of(place, 0)) < 60:
            time.sleep(0.5)
        spans: list[tuple[bool, float, float]] = []
        for turn in range(turns):
            has_viewer = turn % 4 in (1, 2)
            page = opened(open_page, place, link) if has_viewer else None
            time.sleep(1.0)
            begun = time.time()
            time.sleep(seconds)
            spans.append((has_viewer, begun, time.time()))
            if page is not None:
                page.context.close()
        of_ranks = [steps_of(place, rank) for rank in (0, 1)]
    wall: dict[bool, list[float]] = {False: [], True: []}
    used: dict[bool, list[float]] = {False: [], True: []}
    for has_viewer, begun, ended in spans:
        for steps in of_ranks:
            inside = [step for step in steps if begun <= step[1] <= ended]
            gaps = [b[2] - a[2] for a, b in itertools.pairwise(inside)]
            wall[has_viewer].append(statistics.median(gaps))
            used[has_viewer].append((inside[-1][3] - inside[0][3]) / (len(inside) - 1))
    for name, values in (("wall time", wall), ("processor time", used)):
        more = statistics.median(values[True]) - statistics.median(values[False])
        step = statistics.median(wall[False])
        print(
            f"| one viewer, {name} of a step | {len(values[True])} | {1e3 * statistics.median(values[False]):.4g} ms "
            f"without, {1e3 * statistics.median(values[True]):.4g} ms with | {100 * more / step:+.3f} % of a step "
            f"| 0.2 % | {os.getloadavg()[0]:.1f} |",
            flush=True,
        )


MEASUREMENTS = {"list": of_list, "zoom": of_zoom, "fresh": of_fresh, "cost": of_cost}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *MEASUREMENTS], help="default: all")
    options = parser.parse_args()
    print(versions_line("playwright"))
    print("| what | number | median | worst | goal | load |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.names or MEASUREMENTS:
        with tempfile.TemporaryDirectory() as folder:
            MEASUREMENTS[name](Path(folder))


if __name__ == "__main__":
    main()
