// The cluster: hosts with their load, what was measured between them, and what the last check has found.

import {get, listen} from "./api.js";
import {Matrix} from "./matrix.js";
import {ago, bytes, duration, element, number, stateMark} from "./text.js";

const LOOK_MS = 60000;  // files change seldom
const place = (name) => document.getElementById(name);
const shownHosts = new Map();  // rows that have not changed stay, so that the focus and a selection stay too
let shownWays = "";

function showHosts(hosts) {
  place("hostTable").hidden = !hosts.length;
  const body = document.querySelector("#hosts tbody");
  const made = hosts.map((host) => {
    const key = JSON.stringify(host), old = shownHosts.get(host.name);
    if (old?.key === key) return old.row;
    const focused = old ? [...old.row.querySelectorAll("a")].indexOf(document.activeElement) : -1;
    const made_ = row(host);
    if (focused >= 0) { old.row.replaceWith(made_); made_.querySelectorAll("a")[focused]?.focus(); }
    shownHosts.set(host.name, {key, row: made_});
    return made_;
  });
  if (made.length !== body.rows.length || made.some((one, place_) => body.rows[place_] !== one)) {
    const focused = document.activeElement;
    body.replaceChildren(...made);
    if (body.contains(focused)) focused.focus();
  }
}

function row(host) {
  const load = host.load;
  const name = element("td", {title: host.address ?? ""}, host.name, host.silence > 3 ? element("span", {className: "problem"}, ` silent for ${duration(host.silence)}`) : null);
  const jobs = host.jobs.flatMap((job, place_) => [place_ ? ", " : "", element("a", {href: `/run/${encodeURIComponent(job.id)}`}, job.name), " ", stateMark(job.state, "")]);
  const cores = element("td", {className: "numeric"}, number(host.cores));
  const cells = [name, element("td", {className: "wide"}, ...jobs), cores];
  if (!load) {
    const why = host.jobs.length ? "not measured" : "no job runs there, so nobody measures its load";
    const memory = host.memory_bytes ? `${bytes(host.memory_bytes)} of memory; ` : "";
    return element("tr", {}, ...cells, element("td", {colSpan: 6, className: "now wide"}, memory + why));
  }
  const disks = `${rate(load.read_bytes_per_second)} read, ${rate(load.written_bytes_per_second)} written`;
  const gpus = load.gpus.map((gpu, place_) => bar(gpu.busy, `${percent(gpu.busy)}, ${used(gpu)}`, `GPU ${place_}`));
  return element("tr", {}, ...cells, element("td", {}, bar(load.busy, percent(load.busy), "cores")),
    element("td", {}, bar(load.memory_used_bytes / load.memory_bytes, used(load), "memory")),
    element("td", {className: "numeric"}, rate(load.received_bytes_per_second)), element("td", {className: "numeric"}, rate(load.sent_bytes_per_second)),
    element("td", {}, bar(load.disk_busy, percent(load.disk_busy), "disk"), element("small", {}, disks)), element("td", {}, ...gpus));
}

const percent = (share) => share === undefined ? "" : `${Math.round(100 * share)} %`;
const rate = (value) => value === undefined ? "" : `${bytes(value)}/s`;
const used = (one) => one.memory_bytes === undefined ? "" : `${bytes(one.memory_used_bytes)} of ${bytes(one.memory_bytes)}`;

// A bar beside its text; the text says the same.
function bar(share, text, name) {
  const meter = isFinite(share) ? element("meter", {min: 0, max: 1, high: 0.9, value: Math.min(1, share), ariaLabel: name}) : null;
  return element("div", {className: "bar"}, meter, text);
}

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
  show(answer.problems);
  place("source").textContent = answer.hosts.length ? (answer.inventory ? `Of the inventory ${answer.inventory}, and of jobs.` : "Of jobs and checks; no inventory was found or named.")
    : "No host is known. Start a job, run mpitrain check-cluster, or name an inventory: mpitrain dashboard -i FILE";
  showHosts(answer.hosts);
  showWays(answer.ways);
  showCheck(answer.check);
}

function show(problems) {
  place("problems").hidden = !problems.length;
  place("problems").replaceChildren(...problems.map((text) => element("li", {}, text)));
}

const look = () => load().catch((error) => show([error.message]));
look();
setInterval(() => { if (!document.hidden) look(); }, LOOK_MS);
listen("/api/stream?cluster", (message) => showHosts(message.hosts));
