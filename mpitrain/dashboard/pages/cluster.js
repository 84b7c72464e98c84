// The cluster: hosts with their load, what was measured between them, and what the last check has found.

import {get, listen} from "./api.js";
import {Matrix} from "./matrix.js";
import {State, Table, html, runAddress, show} from "./html.js";
import {ago, bytes, duration, element, number} from "./text.js";

const LOOK_MS = 60000;  // files change seldom
const place = (name) => document.getElementById(name);
let shownWays = "";

const COLUMNS = [
  {heading: "Host", cell: (host) => html`<span title=${host.address}>${host.name}</span>${host.silence > 3 ? html`<span class="problem"> silent for ${duration(host.silence)}</span>` : null}`},
  {heading: "Jobs", kind: "wide", cell: (host) => host.jobs.map((job, place_) => html`${place_ ? ", " : ""}<a href=${runAddress(job.id)}>${job.name}</a> <${State} state=${job.state} />`)},
  {heading: "Cores", kind: "numeric minor", cell: (host) => number(host.cores)},
  {heading: "Busy", cell: ({load, ...host}) => load ? html`<${Bar} share=${load.busy} text=${percent(load.busy)} name="cores" />` : html`<span class="now">${unknown(host)}</span>`},
  {heading: "Memory", cell: of((load) => html`<${Bar} share=${load.memory_used_bytes / load.memory_bytes} text=${used(load)} name="memory" />`)},
  {heading: "In", kind: "numeric", cell: of((load) => rate(load.received_bytes_per_second))},
  {heading: "Out", kind: "numeric", cell: of((load) => rate(load.sent_bytes_per_second))},
  {heading: "Disk", cell: of((load) => html`<${Bar} share=${load.disk_busy} text=${percent(load.disk_busy)} name="disk" /><small>${rate(load.read_bytes_per_second)} read, ${rate(load.written_bytes_per_second)} written</small>`)},
  {heading: "GPUs", cell: of((load) => load.gpus.map((gpu, place_) => html`<${Bar} share=${gpu.busy} text=${`${percent(gpu.busy)}, ${used(gpu)}`} name=${`GPU ${place_}`} />`))}];

function of(cell) { return ({load}) => load ? cell(load) : ""; }

function unknown(host) {
  const why = host.jobs.length ? "not measured" : "no job runs there, so nobody measures its load";
  return (host.memory_bytes ? `${bytes(host.memory_bytes)} of memory; ` : "") + why;
}

function showHosts(hosts) {
  place("hostTable").hidden = !hosts.length;
  show("hostTable", html`<${Table} id="hosts" columns=${COLUMNS} rows=${hosts} keyOf=${(host) => host.name} />`);
}

const percent = (share) => share === undefined ? "" : `${Math.round(100 * share)} %`;
const rate = (value) => value === undefined ? "" : `${bytes(value)}/s`;
const used = (one) => one.memory_bytes === undefined ? "" : `${bytes(one.memory_used_bytes)} of ${bytes(one.memory_bytes)}`;

// A bar beside its text; the text says the same.
const Bar = ({share, text, name}) => html`<div class="bar">${isFinite(share) ? html`<meter min="0" max="1" high="0.9" value=${Math.min(1, share)} aria-label=${name} />` : null}${text}</div>`;

function showWays(ways) {
  const text = JSON.stringify(ways);
  if (text === shownWays) return;  // a focus in a matrix stays
  shownWays = text;
  place("ways").hidden = !ways.length;
  place("matrices").replaceChildren();
  for (const one of ways) {
    place("matrices").append(element("p", {className: "note"}, `Measured ${ago(one.measured)} by ${one.origin}.`));
    const parent = element("div", {className: "matrices"});
    place("matrices").append(parent);
    new Matrix(parent, "Bandwidth", one.nodes, one.bytes_per_second, (value) => `${bytes(value)}/s`, {isMoreBetter: true});
    if (one.latency_us) new Matrix(parent, "Latency", one.nodes, one.latency_us, (value) => `${number(value, 3)} µs`, {isMoreBetter: false});
  }
}

const MARKS = {fail: "✕", warn: "!", unknown: "?", skip: "–"};
function showCheck(check) {
  if (!check) {
    place("checkWhen").textContent = "This user has not run mpitrain check-cluster yet.";
    place("findings").replaceChildren();
    return;
  }
  const parts = [check.only.length ? `only ${check.only.join(", ")}` : `level ${check.level}`, check.skip.length ? `without ${check.skip.join(", ")}` : ""];
  const counts = ["fail", "warn", "unknown", "blocked", "skip", "pass"].filter((name) => check.counts[name]).map((name) => `${check.counts[name]} ${name}`);
  place("checkWhen").textContent = `${ago(check.at)}, ${parts.filter(Boolean).join(", ")}, ${Object.keys(check.nodes).length} hosts: ${counts.join(", ")}.`;
  place("findings").replaceChildren(...check.findings.filter((one) => one.verdict !== "skip").map(finding));
}

function finding(one) {
  const where = one.places ? ` on ${one.places}` : "";
  const head = element("p", {}, element("strong", {className: `verdict ${one.verdict}`}, `${MARKS[one.verdict] ?? "?"} ${one.verdict}`), ` ${one.id}${where}: ${one.found || one.title}`);
  const made = element("li", {}, head);
  const facts = [["allowed", one.allowed], ["why", one.why], ["blocks", one.blocks.join(", ")]].filter(([, text]) => text);
  if (facts.length) made.append(element("dl", {className: "facts"}, ...facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)])));
  if (one.remedy) made.append(element("pre", {className: "scroll", tabIndex: 0, ariaLabel: `What repairs ${one.id}`}, one.remedy));
  return made;
}

async function load() {
  const answer = await get("/api/cluster");
  showProblems(answer.problems);
  place("source").textContent = answer.hosts.length ? (answer.inventory ? `Of the inventory ${answer.inventory}, and of jobs.` : "Of jobs and checks; no inventory was found or named.")
    : "No host is known. Start a job, run mpitrain check-cluster, or name an inventory: mpitrain dashboard -i FILE";
  showHosts(answer.hosts);
  showWays(answer.ways);
  showCheck(answer.check);
}

function showProblems(problems) {
  place("problems").hidden = !problems.length;
  place("problems").replaceChildren(...problems.map((text) => element("li", {}, text)));
}

const look = () => load().catch((error) => showProblems([error.message]));
look();
setInterval(() => { if (!document.hidden) look(); }, LOOK_MS);
listen("/api/stream?cluster", (message) => showHosts(message.hosts));
