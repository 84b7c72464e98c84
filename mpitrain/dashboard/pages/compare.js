// Several runs: one metric on one chart, and in what the runs differ.

import {get} from "./api.js";
import {Chart, Zoom, colorOf, dashOf} from "./chart.js";
import {metricsOf} from "./panels.js";
import {element, number, stateMark, time, words} from "./text.js";

const place = (name) => document.getElementById(name);
const ids = new URLSearchParams(location.search).get("runs") ?? "";
const zoom = new Zoom(() => draw());
let runs = [], chart = null;

// Runs in folders of one name are told apart by the folder.
function labels(list) {
  const isUnique = new Set(list.map((run) => run.name)).size === list.length;
  return list.map((run) => isUnique ? run.name : run.folder || run.name);
}

async function draw() {
  const name = place("metric").value;
  const query = `name=${encodeURIComponent(name)}&${zoom.query(chart.width)}`;
  const curves = await Promise.all(runs.map(async (run) => (await get(`/api/runs/${encodeURIComponent(run.id)}/series?${query}`)).curves[name]));
  if (!zoom.range) {
    const ends = curves.filter((curve) => curve.steps.length).flatMap((curve) => [curve.steps[0], curve.steps[curve.steps.length - 1]]);
    if (ends.length) zoom.extent = [Math.min(...ends), Math.max(...ends)];
  }
  chart.show(curves, []);
}

function swatch(number_) {
  const canvas = element("canvas", {width: 24, height: 12, ariaHidden: "true"}), context = canvas.getContext("2d");
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue(colorOf(number_));
  context.lineWidth = 4;
  context.setLineDash(dashOf(number_));
  context.beginPath(); context.moveTo(0, 6); context.lineTo(24, 6); context.stroke();
  return canvas;
}

async function load() {
  const answer = await get(`/api/compare?runs=${encodeURIComponent(ids)}`);
  runs = answer.runs;
  zoom.extent[1] = Math.max(zoom.extent[1], ...runs.map((run) => run.last.step ?? 1));
  const names = labels(runs);
  if (answer.asked > runs.length) fail(Error(`${answer.asked} runs were chosen; the first ${runs.length} are compared, which is the limit`));
  place("metric").replaceChildren(...metricsOf(answer.names).map((name) => element("option", {value: name}, words(name))));
  place("runs").tBodies[0].replaceChildren(...runs.map((run, number_) => element("tr", {},
    element("td", {}, swatch(number_), " ", element("a", {href: `/run/${encodeURIComponent(run.id)}`, title: run.folder}, names[number_])),
    element("td", {}, stateMark(run.state, run.why)), element("td", {}, time(run.started)), element("td", {className: "numeric"}, number(run.step ?? run.last.step)),
    element("td", {className: "numeric"}, number(run.last.loss)), element("td", {className: "numeric"}, number(run.speed)))));
  place("differences").tHead.rows[0].replaceChildren(element("th", {scope: "col"}, "Fact"), ...names.map((name) => element("th", {scope: "col"}, name)));
  const rows = answer.differences.map((one) => element("tr", {}, element("th", {scope: "row"}, one.name), ...one.values.map((value) => element("td", {className: "wide"}, value ?? "-"))));
  if (!rows.length) rows.push(element("tr", {}, element("td", {colSpan: runs.length + 1}, "Nothing that the records know: script, arguments, settings, hosts, commit and packages are equal.")));
  place("differences").tBodies[0].replaceChildren(...rows);
  chart = new Chart(place("charts"), "One metric of all runs", names.map((label, color) => ({label, color})), zoom);
  if (answer.names.length) await draw();
}

function fail(error) { place("problem").textContent = error.message; place("problem").hidden = false; }
place("metric").addEventListener("change", () => { chart.drop(); draw().catch(fail); });
place("controls").addEventListener("submit", (event) => event.preventDefault());
load().catch(fail);
