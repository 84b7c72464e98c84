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
const zoom = new Zoom(() => draw(true).catch(fail));
const files = new Files(`${base}/files`);
let charts = [], names = [], events = [], rows = -1, commands = null, output = null;

// A job that had no record when this page was opened has one: its page has the charts, and lasts.
function hasMoved(run) {
  if (run.id === id || !run.folder) return false;
  location.replace(`/run/${encodeURIComponent(run.id)}${location.search}`);
  return true;
}

function showRun(run, live, waits, slow, facts) {
  document.title = `${run.name} - mpitrain`;
  place("name").textContent = run.name;
  place("state").replaceChildren(stateMark(run.state, run.why), run.why ? ` ${run.why}` : "");
  place("problem").textContent = run.problems.join(". ");
  place("problem").hidden = !run.problems.length;
  const now = {...run.last, ...run.metrics}, speed = run.metrics["samples/s"] ?? run.speed;
  const step = run.step ?? run.last.step, steps = run.steps ? ` / ${number(run.steps)}` : "";
  const took = run.started ? (run.ended ?? (run.is_live ? Date.now() / 1000 : run.changed)) - run.started : null;
  const figures = [["step", step === undefined || step === null ? "" : number(step) + steps], ["loss", number(now.loss)], ["samples/s", number(speed)],
    ["ranks", run.ranks ? number(run.ranks) : ""], ["hosts", run.hosts.length ? number(run.hosts.length) : ""], ["began", time(run.started)], ["took", duration(took)]];
  place("figures").replaceChildren(...figures.filter(([, value]) => value !== "").map(([name, value]) => element("li", {}, element("span", {}, name), element("strong", {}, value))));
  place("live").hidden = !live;
  place("slow").textContent = slow ?? "";
  if (live) showRanks(live, facts);
  showWaits(waits, live?.stall, run.state === "stalled", Boolean(commands));
  commands?.show(live);
  if (output && run.state === "failed" && !place("outputPart").dataset.seen) place("outputPart").open = place("outputPart").dataset.seen = true;
  output?.show(live);
}

const TROUBLE = ["stopped", "failed", "ended", "lost", "unknown", "disk"];
// Of each column of the table of ranks: its heading, the class of its cells, and what is in the cell of a rank. What
// each rank publishes comes with its headings from the server.
const columnsOf = (facts) => [["Rank", "", (rank) => String(rank.rank)], ["Host", "", (rank) => rank.host],
  ["Does", (rank) => kindOf(rank.phase), (rank) => [element("span", {className: `swatch ${kindOf(rank.phase)}`}), rank.phase]],
  ["For", "", (rank) => duration(rank.since)],
  ...facts.map(({name, heading, unit}) => [heading, "numeric", (rank) => (unit === "seconds" ? duration : number)(rank[name])]),
  ["In", "wide", (rank) => rank.call]];

function showRanks(live, facts) {
  const columns = columnsOf(facts);
  grid.add(live);
  const weight = (rank) => [TROUBLE.includes(rank.phase) ? 0 : 1, rank.step, ["waits", "wire"].includes(rank.phase) ? 1 : 0, rank.rank];
  const sorted = [...live.ranks].sort((a, b) => { const [x, y] = [weight(a), weight(b)]; const at = x.findIndex((value, number) => value !== y[number]); return at < 0 ? 0 : x[at] - y[at]; });
  const heads = columns.map(([heading, kind]) => element("th", {scope: "col", className: kind === "numeric" ? kind : ""}, heading));
  place("ranks").tHead.rows[0].replaceChildren(...heads);
  place("ranks").tBodies[0].replaceChildren(...sorted.map((rank) => element("tr", {}, ...columns.map(([, kind, cell]) =>
    element("td", {className: typeof kind === "string" ? kind : kind(rank)}, ...[cell(rank)].flat())))));
}

function showEvents(live) {
  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");
  const teller = (event) => event.teller ? `, told by ${event.teller} at ${clock(event.at)}` : "";
  const ofRecord = events.map((event) => `after step ${number(event.after_step)}: ${event.text}${teller(event)}${event.seconds ? `; the training paused for ${duration(event.seconds)}` : ""}`);
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

// One request at a time; where a run is so long that an answer takes time, the next one for new rows comes later. A zoom
// waits for nothing: it takes the place of a request that goes on.
let asking = null, pause = 0, isStale = false;
async function draw(isZoom = false) {
  if (!isZoom && (asking || pause)) { isStale = true; return; }
  if (!charts.length) return;
  asking?.abort();
  clearTimeout(pause);
  pause = 0; isStale = false;
  const own = asking = new AbortController(), begun = performance.now();
  try {
    const query = names.map((name) => `name=${encodeURIComponent(name)}`).join("&");
    const answer = await get(`${base}/series?${query}&${zoom.query(charts[0].width)}`, own.signal);
    if (asking !== own) return;
    if (!zoom.range) {
      const ends = Object.values(answer.curves).filter((curve) => curve.steps.length).flatMap((curve) => [curve.steps[0], curve.steps[curve.steps.length - 1]]);
      if (ends.length) zoom.extent = [Math.min(...ends), Math.max(...ends)];
    }
    const marks = events.map((event) => ({step: event.after_step, text: event.text}));
    for (const chart of charts) chart.show(chart.names.map((name) => answer.curves[name] ?? null), marks);
    place("charts").dataset.drawn = String(performance.now());
  } catch (error) {
    if (!own.signal.aborted) throw error;
  } finally {
    if (asking === own) {
      const wait = Math.min(10 * (performance.now() - begun), 5000);
      asking = null;
      pause = setTimeout(() => { pause = 0; if (isStale) draw().catch(fail); }, wait > 500 ? wait : 0);
    }
  }
}

async function load() {
  const answer = await get(base);
  if (hasMoved(answer.run)) return;
  events = answer.events;
  if (answer.role === "operator") {
    commands ??= new Commands(`${base}/tell`);
    output ??= new Output(`${base}/output`);
  }
  if (answer.live) grid.set(answer.history);
  showRun(answer.run, answer.live, answer.waits, answer.slow, answer.facts);
  showEvents(answer.live);
  showDocument(answer.document);
  rows = answer.run.rows;
  zoom.extent[1] = Math.max(zoom.extent[1], answer.run.last.step ?? 1);  // of a zoom that the address has
  const shown = [...panelsOf(answer.names).values()].flat();
  if (shown.join("\n") !== names.join("\n")) { names = shown; makeCharts(); }
  await draw();
}

listen(`/api/stream?run=${encodeURIComponent(id)}`, (message) => {
  if (!message.run) { place("state").textContent = "its record and its job have gone"; return; }
  if (hasMoved(message.run)) return;
  showRun(message.run, message.live, message.waits, message.slow, message.facts);
  showEvents(message.live);
  if (message.run.rows !== rows || message.run.state === "done") { rows = message.run.rows; load().catch(fail); }
});
function fail(error) { place("problem").textContent = error.message; place("problem").hidden = false; }
load().catch(fail);
files.look();
