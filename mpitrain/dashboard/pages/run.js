// One run: how it goes, its machines, charts and events, and how it ended.

import {get, listen} from "./api.js";
import {Charts} from "./charts.js";
import {Commands} from "./commands.js";
import {Files} from "./files.js";
import {Grid, kindOf} from "./grid.js";
import {Table, State, html, show} from "./html.js";
import {Notes} from "./notes.js";
import {Output} from "./output.js";
import {Result} from "./result.js";
import {duration, milliseconds, number} from "./text.js";
import {Top} from "./top.js";
import {Waits} from "./waits.js";

const LOOK_MS = 20000;  // at the run before
const id = decodeURIComponent(location.pathname.split("/").pop());
const base = `/api/runs/${encodeURIComponent(id)}`;
const place = (name) => document.getElementById(name);
const grid = new Grid(place("grid"));
const charts = new Charts(base, fail);
const files = new Files(`${base}/files`, (answer) => { checkpoints = answer.folders.flatMap((one) => one.checkpoints.map((saved) => ({...saved, folder: one.folder}))); showTop(); });
let events = [], names = [], rows = -1, commands = null, output = null, last = null, before = null, checkpoints = null, role = "viewer";

// A job that had no record when this page was opened has one: its page has the charts, and lasts.
function hasMoved(run) {
  if (run.id === id || !run.folder) return false;
  location.replace(`/run/${encodeURIComponent(run.id)}${location.search}`);
  return true;
}

function showAll(message) {
  const {run, live} = last = message;
  document.title = `${run.name} - mpitrain`;
  place("name").textContent = run.name;
  place("problem").textContent = run.problems.join(". ");
  place("problem").hidden = !run.problems.length;
  place("slow").textContent = message.slow ?? "";
  place("live").hidden = !live;
  showTop();
  if (live) {
    show("machines", html`<${Table} id="hosts" columns=${MACHINES} rows=${message.machines} keyOf=${(row) => row.name} />`);
    if (run.state === "stalled" && !place("ranksPart").dataset.seen) place("ranksPart").open = place("ranksPart").dataset.seen = true;
    grid.add(live);
    show("rankTable", html`<${Table} id="ranks" columns=${ranksColumns(message.facts)} rows=${inOrder(live.ranks)} keyOf=${(rank) => rank.rank} />`);
  }
  show("waits", html`<${Waits} waits=${message.waits} stall=${live?.stall} isStalled=${run.state === "stalled"} isOperator=${commands} />`);
  showEvents(live);
  commands?.show(live);
  output?.show(live, run.state === "failed");
}

function showTop() {
  if (!last) return;
  const {run, live} = last;
  const hasEnded = !live && !["trains", "unknown"].includes(run.state);  // the card then has why
  show("state", html`<${State} ...${run} /> ${hasEnded ? "" : run.why}`);
  show("top", html`<${Top} run=${run} before=${before} checkpoint=${checkpoints && (checkpoints[0] ?? null)} orders=${events.filter((event) => event.kind === "order")} />`);
  show("notes", html`<${Notes} run=${run} base=${base} isOperator=${role === "operator"} fail=${fail} />`);
  show("result", !hasEnded ? null : html`<${Result} run=${run} document=${last.document} checkpoint=${checkpoints?.find((one) => !one.problem)} lines=${output?.lines ?? []} />`);
}

// The parts of a step as a bar beside their numbers; the longest step of all machines has the whole width.
function Parts({row}) {
  const longest = Math.max(...last.machines.map((one) => one.computes + one.waits + one.exchanges)) || 1;
  return html`<span class="parts">${PARTS.map(([name, kind]) => html`<i class=${`swatch ${kind}`} style=${{width: `${100 * row[name] / longest}%`}} />`)}</span>`;
}

const PARTS = [["computes", "computes"], ["waits", "waits"], ["exchanges", "wire"]];
const part = ([name, kind]) => ({heading: html`<span class=${`swatch ${kind}`}></span>${name}`, kind: "numeric", title: "milliseconds of a step, of the slowest rank there, in the last 10 s", cell: (row) => milliseconds(row[name])});
const Machine = ({row}) => html`${row.name}<small class=${row.isOdd ? "below red" : "below"}>${row.does}<span class="narrow">, step ${number(row.step)}</span></small>`;
const MACHINES = [{heading: "Machine", cell: (row) => html`<${Machine} row=${row} />`}, {heading: "Step", kind: "numeric minor", cell: (row) => number(row.step)},
  {heading: "", kind: "minor", cell: (row) => html`<${Parts} row=${row} />`}, ...PARTS.map(part)];

const TROUBLE = ["stopped", "failed", "ended", "lost", "unknown", "disk"];
// What each rank publishes comes with its headings from the server.
const ranksColumns = (facts) => [{heading: "Rank", cell: (rank) => rank.rank}, {heading: "Host", cell: (rank) => rank.host},
  {heading: "Does", kind: (rank) => kindOf(rank.phase), cell: (rank) => html`<span class=${`swatch ${kindOf(rank.phase)}`}></span>${rank.phase}`},
  {heading: "For", cell: (rank) => rank.phase === "paused" ? "" : duration(rank.since)},  // in a pause a rank looks for commands again and again
  ...facts.map(({name, heading, unit}) => ({heading, kind: "numeric", cell: (rank) => (unit === "seconds" ? duration : number)(rank[name])})),
  {heading: "In", kind: "wide", cell: (rank) => rank.call}];

function inOrder(ranks) {
  const weight = (rank) => [TROUBLE.includes(rank.phase) ? 0 : 1, rank.step, ["waits", "wire"].includes(rank.phase) ? 1 : 0, rank.rank];
  return [...ranks].sort((a, b) => { const [x, y] = [weight(a), weight(b)]; const at = x.findIndex((value, place_) => value !== y[place_]); return at < 0 ? 0 : x[at] - y[at]; });
}

function showEvents(live) {
  const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
  const teller = (event) => event.teller ? `, told by ${event.teller} at ${clock(event.at)}` : "";
  const ofRecord = events.map((event) => html`<li class=${event.kind}>after step ${number(event.after_step)}: ${event.text}${teller(event)}${event.seconds ? `; the training paused for ${duration(event.seconds)}` : ""}</li>`);
  const ofLauncher = (live?.events ?? []).map((event) => html`<li class="fault">${clock(event.at)} ${event.text}</li>`);
  place("events").hidden = !ofRecord.length && !ofLauncher.length;
  show("eventList", ...ofRecord, ...ofLauncher);
}

function About({of}) {
  if (!of) return null;
  const facts = {script: of.script, arguments: of.arguments.join(" "), folder: of.folder, job: of.job,
    hosts: Object.entries(of.hosts).map(([host, ranks]) => `${host}: ${ranks.length} ranks`).join(", "), strategy: of.strategy,
    settings: Object.entries(of.settings).map(([name, value]) => `${name}=${value}`).join(", "),
    commit: of.commit + (of.is_changed ? ", with changes" : ""), Python: of.python,
    "began": new Date(of.first_started * 1000).toLocaleString("sv"), "resumed after step": of.after_step || ""};
  const terms = (table) => html`<dl class="facts">${Object.entries(table).filter(([, value]) => value !== "").map(([name, value]) => html`<dt>${name}</dt><dd>${String(value)}</dd>`)}</dl>`;
  return html`<h2>What was run</h2>${terms(facts)}<details><summary>Packages</summary>${terms(of.packages)}</details>`;
}

async function load() {
  const answer = await get(base);
  if (hasMoved(answer.run)) return;
  role = answer.role;
  if (role === "operator") {
    commands ??= new Commands(`${base}/tell`);
    output ??= new Output(`${base}/output`, showTop);
  }
  events = answer.events.map((event, place_) => ({...event, number: place_ + 1, kind: {told: "order", auto: "own"}[event.source] ?? "fault"}));
  if (answer.live) grid.set(answer.history);
  showAll(answer);
  show("about", html`<${About} of=${answer.document} />`);
  rows = answer.run.rows;
  names = answer.names;
  await charts.take(names, events, answer.run.last);
}

listen(`/api/stream?run=${encodeURIComponent(id)}`, (message) => {
  if (!message.run) { place("state").textContent = "its record and its job have gone"; return; }
  if (hasMoved(message.run)) return;
  showAll({document: last?.document, ...message});
  if (message.run.rows === rows && message.run.state !== "done") return;
  rows = message.run.rows;
  // Most new rows change only the curves. To ask for all of the run each time would cost a viewer twice as much.
  const isKnown = message.run.state !== "done" && message.numEvents === events.length && message.names.join("\n") === names.join("\n");
  (isKnown ? charts.take(names, events, message.run.last) : load()).catch(fail);
});
function fail(error) { place("problem").textContent = error.message; place("problem").hidden = false; }
async function look() { before = await get(`${base}/before`); showTop(); }
load().catch(fail);
look().catch(fail);
setInterval(() => { if (!document.hidden && last?.live) look().catch(fail); }, LOOK_MS);
files.look();
