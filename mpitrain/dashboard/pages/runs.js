// The list of runs: filter, sort, choose some to compare.

import {get, keepInAddress, listen} from "./api.js";
import {duration, element, number, stateMark, time} from "./text.js";

const step = (run) => run.step ?? run.last.step ?? null;
const loss = (run) => run.metrics.loss ?? run.last.loss ?? null;
const speed = (run) => run.speed ?? run.metrics["samples/s"] ?? null;
const length = (run) => run.started ? (run.ended ?? (run.is_live ? Date.now() / 1000 : run.changed)) - run.started : null;
const COLUMNS = [
  {name: "Run", value: (run) => run.name, cell: (run) => element("a", {href: `/run/${encodeURIComponent(run.id)}`, title: run.folder || run.script}, run.name)},
  {name: "State", value: (run) => run.state, cell: (run) => stateMark(run.state, run.why)},
  {name: "Started", value: (run) => run.started, cell: (run) => time(run.started), minor: true},
  {name: "Took", value: length, cell: (run) => duration(length(run)), minor: true},
  {name: "Hosts", value: (run) => run.hosts.join(" "), cell: (run) => run.hosts.length > 3 ? `${run.hosts.length} hosts` : run.hosts.join(", "), minor: true},
  {name: "Ranks", value: (run) => run.ranks, cell: (run) => run.ranks ? number(run.ranks) : "", numeric: true, minor: true},
  {name: "Step", value: step, cell: (run) => number(step(run)), numeric: true},
  {name: "Loss", value: loss, cell: (run) => number(loss(run)), numeric: true},
  {name: "Samples/s", value: speed, cell: (run) => number(speed(run)), numeric: true, title: "mean over the run"},
  {name: "Last event", value: (run) => run.event, cell: (run) => run.problems.length ? `⚠ ${run.problems[0]}` : run.event, wide: true},
];

const kind = (column) => [column.numeric ? "numeric" : "", column.wide ? "wide" : "", column.minor ? "minor" : ""].join(" ").trim();
const body = document.querySelector("#runs tbody");
const filter = document.getElementById("filter");
const compare = document.getElementById("compare");
const chosen = new Set(), known = new Map();
let runs = [], numRuns = 0, sorting = null, rising = true, words = null;

document.getElementById("heads").append(element("th", {scope: "col"}, element("span", {className: "hidden"}, "Choose")),
  ...COLUMNS.map((column, place) => {
    const button = element("button", {type: "button", title: column.title ?? "", onclick: () => sort(place)}, column.name);
    return element("th", {scope: "col", className: kind(column)}, button);
  }));

function sort(place, isRising = sorting === place ? !rising : !COLUMNS[place].numeric) {
  rising = isRising;
  sorting = place;
  keepInAddress({sort: COLUMNS[place].name, order: rising ? "rising" : "falling"});
  words ??= new Intl.Collator("en", {numeric: true});
  document.querySelectorAll("#heads th").forEach((head, number) => {
    if (number === place + 1) head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  });
  show();
}

function compared(a, b) {
  const [x, y] = [COLUMNS[sorting].value(a), COLUMNS[sorting].value(b)];
  if (x === null || x === undefined) return 1;
  if (y === null || y === undefined) return -1;
  const order = typeof x === "number" && typeof y === "number" ? x - y : words.compare(String(x), String(y));
  return rising ? order : -order;
}

function matches(run) {
  const text = [run.name, run.folder, run.state, run.hosts.join(" "), run.script, run.job, run.event].join(" ").toLowerCase();
  return filter.value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function row(run) {
  const box = element("input", {type: "checkbox", checked: chosen.has(run.id), ariaLabel: `compare ${run.name}`, onchange: () => choose(run.id, box.checked)});
  const cells = COLUMNS.map((column) => element("td", {className: kind(column)}, column.cell(run)));
  const made = element("tr", {}, element("td", {}, run.rows ? box : null), ...cells);
  made.dataset.id = run.id;
  return made;
}

function choose(id, isChosen) {
  if (isChosen) chosen.add(id); else chosen.delete(id);
  compare.disabled = chosen.size < 2 || chosen.size > MOST_COMPARED;
  compare.textContent = chosen.size < 2 ? "Compare" : chosen.size > MOST_COMPARED ? `At most ${MOST_COMPARED} of ${chosen.size}` : `Compare ${chosen.size}`;
}

// Rows whose text has not changed stay, so that the focus and a selection stay too. A table of a thousand rows takes a
// browser half a second, so a row is made when the end of those that are there comes near the screen.
const MORE_ROWS = 40;
const MOST_COMPARED = 16;
const shown = new Map();
let mostRows = MORE_ROWS;
const end = document.getElementById("end");
const nearEnd = new IntersectionObserver((entries) => {
  if (!entries.at(-1).isIntersecting) return;
  mostRows += MORE_ROWS;
  show();
  nearEnd.unobserve(end);  // so that it is told again, if the end is still near
  nearEnd.observe(end);
}, {rootMargin: "1000px"});
nearEnd.observe(end);

function show() {
  const all = runs.filter(matches);
  if (sorting !== null) all.sort(compared);
  const list = all.slice(0, mostRows);
  const rows = list.map((run) => {
    const key = JSON.stringify(run), old = shown.get(run.id);
    if (old && old.key === key) return old.row;
    const made = row(run);
    const focused = old && old.row.contains(document.activeElement) ? [...old.row.querySelectorAll("a, input")].indexOf(document.activeElement) : -1;
    old?.row.replaceWith(made);
    if (focused >= 0) made.querySelectorAll("a, input")[focused]?.focus();
    shown.set(run.id, {key, row: made});
    return made;
  });
  const isSame = rows.length === body.rows.length && rows.every((made, place) => body.rows[place] === made);
  if (!isSame) {
    const focused = document.activeElement;
    body.replaceChildren(...rows);
    if (focused && body.contains(focused)) focused.focus();
  }
  end.hidden = list.length === all.length;
  document.getElementById("count").textContent = all.length === runs.length ? `${numRuns} runs` : `${all.length} of ${numRuns} runs`;
  document.getElementById("empty").hidden = runs.length > 0;
}

filter.addEventListener("input", () => { keepInAddress({filter: filter.value}); show(); });
document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
compare.addEventListener("click", () => { location.href = `/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}`; });

function take(answer) {
  runs = [...known.values()].sort((a, b) => b.is_live - a.is_live || (b.started ?? 0) - (a.started ?? 0));
  numRuns = answer.num_runs;
  const problem = document.getElementById("problem");
  problem.textContent = answer.problem;
  problem.hidden = !answer.problem;
  show();
}

const asked = new URLSearchParams(location.search), ofAddress = COLUMNS.findIndex((column) => column.name === asked.get("sort"));
filter.value = asked.get("filter") ?? "";
if (ofAddress >= 0) sort(ofAddress, asked.get("order") !== "falling");

function follow() {
  listen("/api/stream", (answer) => {
    if (answer.isWhole) known.clear();  // also after the connection was lost
    for (const id of answer.gone) known.delete(id);
    for (const run of answer.runs) known.set(run.id, run);
    take(answer);
  });
}

// What finds room on a screen comes first, and the rest when that is to be seen. The stream has all runs.
get(document.querySelector("link[as=fetch]").href).then((answer) => {
  for (const run of answer.runs) known.set(run.id, run);
  take(answer);
}).catch(() => null).finally(() => requestAnimationFrame(() => setTimeout(follow)));
