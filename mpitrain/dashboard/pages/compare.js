// Several runs, or groups of them: every metric on a chart of its own, and a table against a baseline.

import {csv, download, get, keepInAddress} from "./api.js";
import {Axis, Chart, View, colorOf, dashOf, interpolated} from "./chart.js";
import {Tools} from "./charts.js";
import {State, html, runAddress, show} from "./html.js";
import {MEASURED, isMain, metricsOf} from "./panels.js";
import {number, words} from "./text.js";

const place = (name) => document.getElementById(name), asked = new URLSearchParams(location.search);
const view = new View(() => draw().catch(fail));
const groupedBy = asked.has("group") ? asked.get("group").split(",").filter(Boolean).map((name) => name.replaceAll("%2C", ",")) : null;
let runs = [], lines = [], charts = [], names = [], facts = [], baseline = asked.get("baseline") ?? "", filter = asked.get("metrics") ?? "", drawing = 0;

// Runs in folders of one name are told apart by the folder.
function labels(list) {
  const isUnique = new Set(list.map((run) => run.name)).size === list.length;
  return list.map((run) => isUnique ? run.name : run.folder || run.name);
}

// Each run is a line, or each group of runs with the same script and the same values of some arguments.
function linesOf() {
  if (!groupedBy) return labels(runs).map((label, color) => ({label, color, runs: [runs[color]]}));
  const scriptOf = (run) => run.script.split(" ")[0], isOne = groupedBy.length && new Set(runs.map(scriptOf)).size === 1;
  const groups = Map.groupBy(runs, (run) => [...(isOne ? [] : [scriptOf(run)]), ...groupedBy.map((name) => `${name} ${run.arguments[name] ?? "-"}`)].join(", "));
  return [...groups].map(([label, members], color) => ({label: `${label} (${members.length})`, color, runs: members}));
}

const series = async (run, query) => (await get(`/api/runs/${encodeURIComponent(run.id)}/series?${query}`)).curves;

async function draw() {
  const own = ++drawing, shown = names.filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
  show("chartTools", html`<${Tools} view=${view} names=${[...new Set(runs.flatMap((run) => Object.keys(run.last)))]} />
    <label>Metrics <input id="metric" type="search" value=${filter} autocomplete="off" onInput=${(event) => { filter = event.target.value; keepInAddress({metrics: filter}); draw().catch(fail); }} /></label>`);
  for (const chart of charts) chart.box.hidden = !shown.includes(chart.name);
  if (!shown.length || !runs.length) return;
  const width = charts.find((chart) => !chart.box.hidden).width, query = shown.map((name) => `name=${encodeURIComponent(name)}`).join("&");
  const answers = await Promise.all(runs.map(async (run) => {
    const axis = new Axis(view.x === "step" ? null : (await series(run, `name=${view.x}&pixels=2000`))[view.x]);
    const of = (more) => more === null ? null : series(run, `${query}&${more}`);
    const [raw, smooth] = await Promise.all([of(view.query(width, axis)), of(view.smoothQuery(width, axis))]);
    return {axis, raw, smooth};
  }));
  if (own !== drawing) return;
  const of = new Map(runs.map((run, number_) => [run, answers[number_]]));
  view.extend(answers.flatMap(({raw}) => Object.values(raw)), answers.flatMap(({raw, axis}) => Object.values(raw).map(() => axis)));
  for (const chart of charts.filter((one) => !one.box.hidden)) {
    const members = lines.map((line) => line.runs.map((run) => of.get(run)));
    if (!groupedBy) chart.show(members.map(([one]) => one.raw[chart.name]), [], members.map(([one]) => one.axis), view.smoothing ? members.map(([one]) => one.smooth[chart.name]) : []);
    else {
      const bands = members.map((group) => band(group.map((one) => [(one.smooth ?? one.raw)[chart.name], one.axis])));
      chart.show(bands.map((one) => ({steps: one.x, values: one.mean, exact: true})), [], bands.map(() => new Axis()), [], bands);
    }
  }
}

// Of curves the mean, the lowest and the highest value where each of them has one.
function band(members) {
  const tables = members.filter(([curve]) => curve?.steps.length).map(([curve, axis]) => [curve.steps.map((step) => axis.toX(step)), curve.values]);
  const low = Math.max(...tables.map(([x]) => x[0])), high = Math.min(...tables.map(([x]) => x[x.length - 1]));
  const x = [...new Set(tables.flatMap(([xs]) => xs))].filter((at) => at >= low && at <= high).sort((a, b) => a - b);
  const columns = x.map((at) => tables.map(([xs, values]) => interpolated(xs, values, at)));
  return {x, mean: columns.map((all) => all.reduce((sum, value) => sum + value, 0) / all.length), low: columns.map((all) => Math.min(...all)), high: columns.map((all) => Math.max(...all))};
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const Swatch = ({of}) => html`<svg class="line" width="24" height="8" aria-hidden="true"><line x1="0" y1="4" x2="24" y2="4" stroke=${css(colorOf(of.color))} stroke-width="3" stroke-dasharray=${dashOf(of.color).join(" ")} /></svg> `;

// Of each line the mean of its runs, and how far that is from the baseline's.
function Value({line, base, of}) {
  const mean = (one) => { const values = one.runs.map(of).filter((value) => typeof value === "number"); return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null; };
  const value = mean(line), before = base && base !== line ? mean(base) : null, change = value !== null && before ? 100 * (value - before) / Math.abs(before) : null;
  return html`${number(value)} ${change === null ? null : html`<small>${change > 0 ? "+" : ""}${number(Number(change.toPrecision(2)))} %</small>`}`;
}

function table() {
  const base = lines.find((line) => line.label === baseline), bests = metricsOf([...new Set(runs.flatMap((run) => Object.keys(run.bests)))]);
  const main = runs.find((run) => run.best)?.best.name, bestOf = (name) => [`best ${words(name)}`, (run) => run.bests[name]];
  const first = [...(main ? [bestOf(main)] : []), ["Samples/s", (run) => run.speed]];  // is one better, and faster?
  const others = [["Step", (run) => run.step ?? run.last.step], ...bests.filter((name) => name !== main && !MEASURED.includes(name)).sort((a, b) => isMain([b]) - isMain([a])).map(bestOf)], numbers = [...first, ...others];
  const head = ([name]) => html`<th scope="col" class="numeric">${name}</th>`, cell = (line) => ([, of]) => html`<td class="numeric"><${Value} line=${line} base=${base} of=${of} /></td>`;
  const fact = (line, one) => [...new Set(line.runs.map((run) => one.values[runs.indexOf(run)] ?? "-"))].join(", ");
  const choose = (line) => { baseline = baseline === line.label ? "" : line.label; keepInAddress({baseline}); table(); };
  const save = () => download("compare.csv", csv([["run", ...numbers.map(([name]) => name), ...facts.map((one) => one.name)], ...runs.map((run, place_) => [run.name, ...numbers.map(([, of]) => of(run)), ...facts.map((one) => one.values[place_])])]));
  show("list", html`<table id="runs"><thead><tr><th scope="col">Run</th><th scope="col" class="minor">State</th><th scope="col" class="minor"><span class="hidden">Choose a baseline</span></th>
    ${first.map(head)}${facts.map((one) => html`<th scope="col">${one.name}</th>`)}${others.map(head)}</tr></thead>
    <tbody>${lines.map((line) => html`<tr key=${line.label}><td><${Swatch} of=${line} />${line.runs.length === 1 ? html`<a href=${runAddress(line.runs[0].id)} title=${line.runs[0].folder}>${line.label}</a>` : line.label}</td>
      <td class="minor">${line.runs.length === 1 ? html`<${State} ...${line.runs[0]} />` : ""}</td>
      <td class="minor"><button type="button" aria-pressed=${line === base} onClick=${() => choose(line)}>${line === base ? "is the baseline" : "Baseline"}</button></td>
      ${first.map(cell(line))}${facts.map((one) => html`<td class="fact">${fact(line, one)}</td>`)}${others.map(cell(line))}</tr>`)}</tbody></table>
    ${facts.length ? null : html`<p class="note">Nothing that the records know differs: script, arguments, settings, hosts, commit and packages are equal.</p>`}
    <p class="tools"><button type="button" onClick=${save}>CSV</button></p>`);
}

async function load() {
  const answer = await get(`/api/compare?runs=${encodeURIComponent(asked.get("runs") ?? "")}`);
  ({runs, differences: facts} = answer);
  lines = linesOf();
  if (answer.asked > runs.length) fail(Error(`${answer.asked} runs were chosen; the first ${runs.length} are compared, which is the limit`));
  names = metricsOf(answer.names).sort((a, b) => isMain([b]) - isMain([a]));
  charts = names.map((name) => Object.assign(new Chart(place("charts"), words(name), lines, view), {name}));
  table();
  await draw();
}

function fail(error) { place("problem").textContent = error.message; place("problem").hidden = false; }
load().catch(fail);
