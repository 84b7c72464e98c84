// The columns of the list of runs: facts of each run, its arguments, and the best and the last value of each metric.

import {State, html, runAddress} from "./html.js";
import {duration, number, time, words} from "./text.js";

const length = (run) => run.started ? (run.ended ?? (run.is_live ? Date.now() / 1000 : run.changed)) - run.started : null;
const Name = ({run}) => html`<a href=${runAddress(run.id)} title=${run.folder || run.script}>${run.name}</a>${run.tags.map((tag) => html` <span class="tag">${tag}</span>`)}`;

// The course of the loss, on a logarithmic axis where that is possible.
function Spark({values}) {
  if (values.length < 2) return null;
  const heights = values.every((value) => value > 0) ? values.map(Math.log) : values, low = Math.min(...heights), range = Math.max(...heights) - low || 1;
  const points = heights.map((value, place) => `${(70 * place / (heights.length - 1)).toFixed(1)},${(16 - 14 * (value - low) / range).toFixed(1)}`).join(" ");
  return html`<svg class="spark" width="72" height="18" aria-hidden="true"><polyline points=${points} /></svg>`;
}

const stepOf = (run) => run.step ?? run.last.step ?? null;
const percent = (run) => run.steps && !run.ended ? `${Math.floor(100 * stepOf(run) / run.steps)} %` : "";
const far = (run) => [percent(run), run.left === null ? "" : `${duration(run.left)} left`].filter(Boolean).join(", ");
const Step = ({run}) => html`${number(stepOf(run))}${run.steps ? html`<span class="minor"> / ${number(run.steps)}</span>` : ""}<small class="below">${far(run)}</small>`;

// What is to be known of it: what cannot be read, why it does not train any more, its slow rank, or its last event.
function News({run}) {
  if (run.problems.length) return `⚠ ${run.problems[0]}`;
  const trouble = ["failed", "lost", "stalled"].includes(run.state) ? run.why : run.slow;
  return trouble ? html`<span class="problem">${trouble}</span>` : run.event;
}

// `value` is by what a column sorts and groups; those with `hasCommon` show in a group what all its runs have.
const FACTS = [
  {name: "Run", value: (run) => run.name, cell: (run) => html`<${Name} run=${run} />`},
  {name: "State", value: (run) => run.state, cell: (run) => html`<${State} ...${run} />`, hasCommon: true},
  {name: "Started", value: (run) => run.started, cell: (run) => time(run.started), minor: true, hasNoMean: true},
  {name: "Took", value: length, cell: (run) => duration(length(run)), minor: true, hasNoMean: true},
  {name: "Hosts", value: (run) => run.hosts.join(" "), cell: (run) => run.hosts.length > 3 ? `${run.hosts.length} hosts` : run.hosts.join(", "), minor: true, hasCommon: true},
  {name: "Ranks", value: (run) => run.ranks, cell: (run) => run.ranks ? number(run.ranks) : "", numeric: true, minor: true},
  {name: "Step", value: stepOf, cell: (run) => html`<${Step} run=${run} />`, numeric: true},
  {name: "Left", value: (run) => run.left, cell: (run) => run.left === null ? "" : duration(run.left), isExtra: true},
  {name: "Loss", value: (run) => run.metrics.loss ?? run.last.loss ?? null, cell: (run) => html`<${Spark} values=${run.curve} /> ${number(run.metrics.loss ?? run.last.loss)}`, numeric: true, minor: true},
  {name: "Best", value: (run) => run.best?.value ?? null, cell: (run) => run.best ? html`${number(run.best.value)}<small class="below">${words(run.best.name)}</small>` : "", numeric: true, title: "best value in an evaluation"},
  {name: "Samples/s", value: (run) => run.speed ?? run.metrics["samples/s"] ?? null, numeric: true, minor: true, title: "mean over the run"},
  {name: "Last event", value: (run) => run.event, cell: (run) => html`<${News} run=${run} />`, wide: true, minor: true},
  {name: "Note", value: (run) => run.note, wide: true, isExtra: true},
];

// A number that is written as one sorts as one.
const plain = (text) => text !== undefined && text.trim() !== "" && isFinite(text) ? Number(text) : text ?? null;

export function columnsOf(runs) {
  const names = (of) => [...new Set(runs.flatMap((run) => Object.keys(of(run))))].sort();
  const columns = [...FACTS,
    ...names((run) => run.arguments).map((name) => ({name, value: (run) => plain(run.arguments[name]), cell: (run) => run.arguments[name] ?? "", isArgument: true, isExtra: true})),
    ...names((run) => run.bests).map((name) => ({name: `best ${name}`, value: (run) => run.bests[name] ?? null, numeric: true, isExtra: true})),
    ...names((run) => run.last).map((name) => ({name: `last ${name}`, value: (run) => run.last[name] ?? null, numeric: true, isExtra: true}))];
  return columns.map((column) => ({cell: (run) => number(column.value(run)), ...column,
    kind: [column.numeric ? "numeric" : "", column.wide ? "wide" : "", column.minor ? "minor" : ""].join(" ").trim()}));
}

export function defaults(columns) { return columns.filter((column) => !column.isExtra).map((column) => column.name); }
