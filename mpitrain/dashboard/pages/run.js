// One run: figures, ranks, charts, events, and what was run.

import {get, listen} from "./api.js";
import {Chart, Zoom} from "./chart.js";
import {Commands} from "./commands.js";
import {Files} from "./files.js";
import {Grid, kindOf} from "./grid.js";
import {Output} from "./output.js";
import {panelsOf} from "./panels.js";
import {duration, element, number, stateMark, time, words} from "./text.js";
import {showWaits} from "./waits.js";

const id = decodeURIComponent(location.pathname.split("/").pop());
const base = `/api/runs/${encodeURIComponent(id)}`;
const place = (name) => document.getElementById(name);
const grid = new Grid(place("grid"));
const zoom = new Zoom(() => draw());
const files = new Files(`${base}/files`);
let charts = [], names = [], events = [], rows = -1, commands = null, output = null;

function showRun(run, live, waits) {
  document.title = `${run.name} - mpitrain`;
  place("name").textContent = run.name;
  place("state").replaceChildren(stateMark(run.state, run.why), run.why ? ` ${run.why}` : "");
  place("problem").textContent = run.problems.join(". ");
  place("problem").hidden = !run.problems.length;
  const now = {...run.last, ...run.metrics}, speed = run.metrics["samples/s"] ?? run.last.samples_per_second;
  const took = run.started ? (run.ended ?? (run.is_live ? Date.now() / 1000 : run.changed)) - run.started : null;
  const figures = [["step", number(run.step ?? run.last.step)], ["loss", number(now.loss)], ["samples/s", number(speed)],
    ["ranks", run.ranks ? number(run.ranks) : ""], ["hosts", run.hosts.length ? number(run.hosts.length) : ""], ["began", time(run.started)], ["took", duration(took)]];
  place("figures").replaceChildren(...figures.filter(([, value]) => value !== "").map(([name, value]) => element("li", {}, element("span", {}, name), element("strong", {}, value))));
  place("live").hidden = !live;
  if (live) showRanks(live);
  showWaits(waits, live?.stall, run.state === "stalled", Boolean(commands));
  commands?.show(live);
  output?.show(live);
}

const TROUBLE = ["stopped", "failed", "ended", "lost", "unknown", "disk"];
function showRanks(live) {
  grid.add(live);
  const weight = (rank) => [TROUBLE.includes(rank.phase) ? 0 : 1, rank.step, ["waits", "wire"].includes(rank.phase) ? 1 : 0, rank.rank];
  const sorted = [...live.ranks].sort((a, b) => { const [x, y] = [weight(a), weight(b)]; const at = x.findIndex((value, number) => value !== y[number]); return at < 0 ? 0 : x[at] - y[at]; });
  place("ranks").tBodies[0].replaceChildren(...sorted.map((rank) => {
    const kind = kindOf(rank.phase);
    return element("tr", {}, element("td", {}, String(rank.rank)), element("td", {}, rank.host),
      element("td", {className: kind}, element("span", {className: `swatch ${kind}`}), rank.phase), element("td", {}, duration(rank.since)),
      element("td", {className: "numeric"}, number(rank.step)), element("td", {className: "wide"}, rank.call));
  }));
}

function showEvents(live) {
  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
  const teller = (event) => event.teller ? `, told by ${event.teller} at ${clock(event.at)}` : "";
  const ofRecord = events.map((event) => `after step ${number(event.after_step)}: ${event.text}${teller(event)}${event.seconds ? `; the training stood still for ${duration(event.seconds)}` : ""}`);
  const ofLauncher = (live?.events ?? []).map((event) => `${clock(event.at)} ${event.text}`);
  const all = [...ofRecord, ...ofLauncher];
  place("events").hidden = !all.length;
  if (place("eventList").childElementCount !== all.length) place("eventList").replaceChildren(...all.map((text) => element("li", {}, text)));
}

function showDocument(document_) {
  place("about").hidden = !document_;
  if (!document_) return;
  const facts = {script: document_.script, arguments: document_.arguments.join(" "), folder: document_.folder, job: document_.job,
    hosts: Object.entries(document_.hosts).map(([host, ranks]) => `${host}: ${ranks.length} ranks`).join(", "), strategy: document_.strategy,
    settings: Object.entries(document_.settings).map(([name, value]) => `${name}=${value}`).join(", "),
    commit: document_.commit + (document_.is_changed ? ", with changes" : ""), Python: document_.python,
    "began": new Date(document_.first_started * 1000).toLocaleString("sv"), "resumed after step": document_.after_step || ""};
  const terms = (table) => Object.entries(table).filter(([, value]) => value !== "").flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]);
  place("facts").replaceChildren(...terms(facts));
  place("packages").replaceChildren(...terms(document_.packages));
}

function makeCharts() {
  const panels = panelsOf(names);
  place("metrics").hidden = !panels.size;
  charts.forEach((chart) => chart.drop());
  place("charts").replaceChildren();
  charts = [...panels.values()].map((ofPanel) => {
    const chart = new Chart(place("charts"), ofPanel.map(words).join(", "), ofPanel.map((label, color) => ({label, color})), zoom);
    return Object.assign(chart, {names: ofPanel});
  });
}

// One request at a time; where a run is so long that an answer takes time, the next one comes later.
let isDrawing = false, isStale = false;
async function draw() {
  if (isDrawing) { isStale = true; return; }
  if (!charts.length) return;
  isDrawing = true;
  const begun = performance.now();
  try {
    const query = names.map((name) => `name=${encodeURIComponent(name)}`).join("&");
    const answer = await get(`${base}/series?${query}&${zoom.query(charts[0].width)}`);
    if (!zoom.range) {
      const ends = Object.values(answer.curves).filter((curve) => curve.steps.length).flatMap((curve) => [curve.steps[0], curve.steps[curve.steps.length - 1]]);
      if (ends.length) zoom.extent = [Math.min(...ends), Math.max(...ends)];
    }
    const marks = events.map((event) => ({step: event.after_step, text: event.text}));
    for (const chart of charts) chart.show(chart.names.map((name) => answer.curves[name] ?? null), marks);
    place("charts").dataset.drawn = String(performance.now());
  } finally {
    const took = performance.now() - begun;
    setTimeout(() => { isDrawing = false; if (isStale) { isStale = false; draw(); } }, Math.min(10 * took, 5000) > 500 ? Math.min(10 * took, 5000) : 0);
  }
}

async function load() {
  const answer = await get(base);
  events = answer.events;
  if (answer.role === "operator") {
    commands ??= new Commands(`${base}/tell`);
    output ??= new Output(`${base}/output`);
  }
  if (answer.live) grid.set(answer.history);
  showRun(answer.run, answer.live, answer.waits);
  showEvents(answer.live);
  showDocument(answer.document);
  rows = answer.run.rows;
  const shown = [...panelsOf(answer.names).values()].flat();
  if (shown.join("\n") !== names.join("\n")) { names = shown; makeCharts(); }
  draw();
}

listen(`/api/stream?run=${encodeURIComponent(id)}`, (message) => {
  if (!message.run) { place("state").textContent = "its record and its job have gone"; return; }
  showRun(message.run, message.live, message.waits);
  showEvents(message.live);
  if (message.run.rows !== rows || message.run.state === "done") { rows = message.run.rows; load().catch(fail); }
});
function fail(error) { place("problem").textContent = error.message; place("problem").hidden = false; }
load().catch(fail);
files.look();
