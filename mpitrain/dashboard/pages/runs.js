// The list of runs: filter, sort, columns, groups; choose some to compare. What is shown is in the address.

import {csv, download, get, keepInAddress, listen} from "./api.js";
import {columnsOf, defaults} from "./columns.js";
import {html, show} from "./html.js";
import {number} from "./text.js";

const MORE_ROWS = 40;
const MOST_COMPARED = 32;
const asked = new URLSearchParams(location.search), place = (name) => document.getElementById(name);
const chosen = new Set(), known = new Map(), open = new Set();
const list = (text) => text === null ? null : text.split(",").map((name) => name.replaceAll("%2C", ","));
let runs = [], numRuns = 0, mostRows = MORE_ROWS, words = null;
let filter = asked.get("filter") ?? "", sorting = asked.get("sort") ?? "", isFalling = asked.get("order") === "falling", shown = list(asked.get("columns")), isGrouped = asked.has("group"), hasHidden = asked.has("hidden");

function change(values) {
  keepInAddress(values);
  draw();
}

function sort(column) {
  isFalling = sorting === column.name ? !isFalling : Boolean(column.numeric);
  sorting = column.name;
  change({sort: sorting, order: isFalling ? "falling" : "rising"});
}

function matches(run) {
  const text = [run.name, run.folder, run.state, run.hosts.join(" "), run.script, run.job, run.event, run.note, run.tags.join(" ")].join(" ").toLowerCase();
  return (hasHidden || !run.isHidden) && filter.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

// A row is a run, or a group of runs with the same script and the same values in the columns of arguments.
function rowsOf(list, columns) {
  if (!isGrouped) return list.map((run) => ({key: run.id, runs: [run]}));
  const groups = new Map(), by = columns.filter((column) => column.isArgument);
  for (const run of list) {
    const key = JSON.stringify([run.script.split(" ")[0], ...by.map((column) => column.value(run))]);
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  return [...groups].flatMap(([key, members]) => members.length === 1 ? [{key: members[0].id, runs: members}] : [{key, runs: members, isGroup: true}]);
}

// The mean of a group's numbers with the lowest and the highest, or what all have in common.
function valueOf(row, column) {
  const values = row.runs.map(column.value).filter((value) => value !== null && value !== undefined && value !== "");
  if (!row.isGroup) return {sort: values[0] ?? null};
  if (values.length && values.every((value) => typeof value === "number")) {
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return low === high ? {sort: low} : {sort: mean, low, high};
  }
  return {sort: new Set(values).size === 1 ? values[0] : null};
}

function compared(x, y) {
  if (x === null || y === null) return (x === null) - (y === null);
  words ??= new Intl.Collator("en", {numeric: true});
  const order = typeof x === "number" && typeof y === "number" ? x - y : words.compare(String(x), String(y));
  return isFalling ? -order : order;
}

function choose(ids, isChosen) {
  for (const id of ids) if (isChosen) chosen.add(id); else chosen.delete(id);
  draw();
}

function Row({row, columns}) {
  const ids = row.runs.filter((run) => run.rows).map((run) => run.id), name = row.isGroup ? `${row.runs.length} runs` : row.runs[0].name;
  const cell = (column, place_) => {
    if (!row.isGroup) return column.cell(row.runs[0]);
    const {sort: value, low, high} = valueOf(row, column);
    if (place_ === 0) return html`<button type="button" aria-expanded=${open.has(row.key)} onClick=${() => { if (!open.delete(row.key)) open.add(row.key); draw(); }}>${open.has(row.key) ? "▾" : "▸"} ${name}</button>`;
    if (low !== undefined && !column.isArgument && !column.hasNoMean) return html`${number(value, 3)} <small>${number(low, 3)} to ${number(high, 3)}</small>`;
    return column.isArgument || column.hasCommon ? value : typeof value === "number" && !column.hasNoMean ? number(value) : "";
  };
  return html`<tr data-id=${row.key}><td>${ids.length ? html`<input type="checkbox" checked=${ids.every((id) => chosen.has(id))} aria-label=${`compare ${name}`} onChange=${(event) => choose(ids, event.target.checked)} />` : null}</td>
    ${columns.map((column, place_) => html`<td class=${column.kind}>${cell(column, place_)}</td>`)}</tr>`;
}

function draw() {
  const all = columnsOf(runs), columns = all.filter((column, place_) => place_ === 0 || (shown ?? defaults(all)).includes(column.name));
  const fitting = runs.filter(matches), column = all.find((one) => one.name === sorting);
  let rows = rowsOf(fitting, columns);
  if (column) rows = rows.map((row) => [valueOf(row, column).sort, row]).sort((a, b) => compared(a[0], b[0])).map(([, row]) => row);
  rows = rows.flatMap((row) => [row, ...(row.isGroup && open.has(row.key) ? row.runs.map((run) => ({key: run.id, runs: [run]})) : [])]);
  show("tools", html`<${Tools} all=${all} columns=${columns} count=${fitting.length} rows=${rows} />`);
  const heads = columns.map((one) => html`<th scope="col" class=${one.kind} aria-sort=${one === column ? (isFalling ? "descending" : "ascending") : null}><button type="button" title=${one.title ?? ""} onClick=${() => sort(one)}>${one.name}</button></th>`);
  show("list", html`<table id="runs"><thead><tr><th scope="col"><span class="hidden">Choose</span></th>${heads}</tr></thead>
    <tbody>${rows.slice(0, mostRows).map((row) => html`<${Row} key=${row.key} row=${row} columns=${columns} />`)}</tbody></table>`);
  place("end").hidden = rows.length <= mostRows;
  place("empty").hidden = runs.length > 0;
}

function Tools({all, columns, count, rows}) {
  const group = all.filter((column) => column.isArgument && columns.includes(column)).map((column) => column.name.replaceAll(",", "%2C")).join(",");
  const compare = () => { location.href = `/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}${isGrouped ? `&group=${encodeURIComponent(group)}` : ""}`; };
  const toggle = (name) => {
    const names = columns.map((column) => column.name);
    shown = names.includes(name) ? names.filter((one) => one !== name) : [...names, name];
    change({columns: shown.map((one) => one.replaceAll(",", "%2C")).join(",")});
  };
  const save = () => download("runs.csv", csv([columns.map((column) => column.name), ...rows.filter((row) => !row.isGroup).map((row) => columns.map((column) => column.value(row.runs[0])))]));
  return html`<form role="search" onSubmit=${(event) => event.preventDefault()}>
    <label>Filter <input id="filter" type="search" placeholder="name, state, host, tag" autocomplete="off" value=${filter} onInput=${(event) => { filter = event.target.value; change({filter}); }} /></label>
    <button id="compare" type="button" disabled=${chosen.size < 2 || chosen.size > MOST_COMPARED} onClick=${compare}>${chosen.size < 2 ? "Compare" : chosen.size > MOST_COMPARED ? `At most ${MOST_COMPARED} of ${chosen.size}` : `Compare ${chosen.size}`}</button>
    <span id="count" role="status">${count === runs.length ? "" : `${count} of `}${numRuns} ${numRuns === 1 ? "run" : "runs"}</span>
    <label title="Runs with the same script and the same values in the shown columns of arguments"><input type="checkbox" checked=${isGrouped} onChange=${(event) => { isGrouped = event.target.checked; change({group: isGrouped ? "1" : ""}); }} /> Group by shown arguments</label>
    ${runs.some((run) => run.isHidden) ? html`<label><input type="checkbox" checked=${hasHidden} onChange=${(event) => { hasHidden = event.target.checked; change({hidden: hasHidden ? "1" : ""}); }} /> Hidden ones too</label>` : null}
    <a href="#" onClick=${(event) => { event.preventDefault(); save(); }}>CSV</a>
    <details><summary>Columns</summary><div class="choices">${all.slice(1).map((column) => html`<label key=${column.name}><input type="checkbox" checked=${columns.includes(column)} onChange=${() => toggle(column.name)} /> ${column.name}</label>`)}</div></details></form>`;
}

function take(answer) {
  runs = [...known.values()].sort((a, b) => b.is_live - a.is_live || (b.started ?? 0) - (a.started ?? 0));
  numRuns = answer.num_runs;
  place("problem").textContent = answer.problem;
  place("problem").hidden = !answer.problem;
  draw();
}

// A table of a thousand rows takes a browser half a second, so a row is made when the end of those that are there comes
// near the screen.
const nearEnd = new IntersectionObserver((entries) => {
  if (!entries.at(-1).isIntersecting) return;
  mostRows += MORE_ROWS;
  draw();
  nearEnd.unobserve(place("end"));  // so that it is told again, if the end is still near
  nearEnd.observe(place("end"));
}, {rootMargin: "1000px"});
nearEnd.observe(place("end"));

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
