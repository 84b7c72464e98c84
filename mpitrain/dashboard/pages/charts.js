// The charts of one run: loss and evaluation, and folded the other metrics.

import {get, keepInAddress} from "./api.js";
import {Axis, Chart, View} from "./chart.js";
import {html, show} from "./html.js";
import {isMain, panelsOf, sourceOf} from "./panels.js";
import {words} from "./text.js";

const place = (name) => document.getElementById(name);
const X = {step: "steps", seconds: "time", samples: "samples"};
const SMOOTHING = [0, 0.5, 1, 2, 5];

// How charts are shown. `names` are those of the metrics that there are.
export const Tools = ({view, names, csv}) => html`<form class="tools">
  <label>x <select id="x" onChange=${(event) => view.change({x: event.target.value})}>${Object.entries(X).filter(([name]) => name === "step" || names.includes(name)).map(([name, text]) => html`<option value=${name} selected=${view.x === name}>${text}</option>`)}</select></label>
  <label>Smoothing <select id="smoothing" onChange=${(event) => view.change({smoothing: parseFloat(event.target.value)})}>${SMOOTHING.map((share) => html`<option value=${share} selected=${view.smoothing === share}>${share ? `mean of ${share} %` : "none"}</option>`)}</select></label>
  <label><input id="log" type="checkbox" checked=${view.isLog} onChange=${(event) => view.change({isLog: event.target.checked})} /> Log</label>
  ${csv ? html`<a href=${csv} download>CSV</a>` : null}</form>`;

export class Charts {
  // `base` is the address of the run's answers.
  constructor(base, fail) {
    this.base = base; this.fail = fail; this.charts = []; this.names = []; this.events = []; this.axis = new Axis();
    this.asking = null; this.pause = 0; this.isStale = false;
    this.view = new View(() => this.again());
    place("others").addEventListener("toggle", () => this.draw(true).catch(fail));
    place("others").open = new URLSearchParams(location.search).has("metrics");
    place("metricFilter").value = new URLSearchParams(location.search).get("metrics") ?? "";
    place("metricFilter").addEventListener("input", () => { keepInAddress({metrics: place("metricFilter").value}); this.draw(true).catch(fail); });
  }

  async again() {
    this.tools();
    await this.measure().then(() => this.draw(true)).catch(this.fail);
  }

  tools() { show("chartTools", html`<${Tools} view=${this.view} names=${this.all} csv=${`${this.base}/rows.csv`} />`); }

  // There are new rows: of these metrics, with these events.
  async take(names, events, last) {
    this.events = events;
    this.all = names;
    if (this.view.x === "step") this.view.extent[1] = Math.max(this.view.extent[1], last.step ?? 1);  // of a zoom that the address has
    const shown = [...panelsOf(names).values()].flat();
    if (shown.join("\n") !== this.names.join("\n")) { this.names = shown; this.make(); }
    this.tools();
    await this.measure();
    await this.draw();
  }

  // Learn which step has which x.
  async measure() {
    const {x} = this.view;
    this.axis = new Axis(x === "step" ? null : (await get(`${this.base}/series?name=${x}&pixels=2000`)).curves[x]);
  }

  make() {
    const panels = [...panelsOf(this.names).values()], main = panels.some(isMain) ? panels.filter(isMain) : panels.slice(0, 1);
    const sources = [...new Set(this.names.map(sourceOf))];  // each has a colour in all charts
    place("metrics").hidden = !panels.length;
    place("others").hidden = main.length === panels.length;
    this.charts.forEach((chart) => chart.drop());
    place("charts").replaceChildren();
    place("otherCharts").replaceChildren();
    this.charts = panels.map((ofPanel) => {
      const isFirst = main.includes(ofPanel);
      const chart = new Chart(place(isFirst ? "charts" : "otherCharts"), ofPanel.map(words).join(", "), ofPanel.map((label) => ({label, color: sources.indexOf(sourceOf(label))})), this.view);
      return Object.assign(chart, {names: ofPanel, isFirst});
    });
  }

  // Those that are to be seen: the others may be folded, or not fit the filter.
  get shown() {
    const asked = place("metricFilter").value.toLowerCase();
    for (const chart of this.charts) chart.box.hidden = !chart.isFirst && !chart.title.toLowerCase().includes(asked);
    return this.charts.filter((chart) => chart.isFirst || (place("others").open && !chart.box.hidden));
  }

  // One request at a time; where a run is so long that an answer takes time, the next one for new rows comes later. A zoom
  // waits for nothing: it takes the place of a request that goes on.
  async draw(isZoom = false) {
    if (!isZoom && (this.asking || this.pause)) { this.isStale = true; return; }
    const charts = this.shown;
    if (!charts.length) return;
    this.asking?.abort();
    clearTimeout(this.pause);
    this.pause = 0; this.isStale = false;
    const own = this.asking = new AbortController(), begun = performance.now();
    try {
      const query = charts.flatMap((chart) => chart.names).map((name) => `name=${encodeURIComponent(name)}`).join("&");
      const ask = (more) => more === null ? null : get(`${this.base}/series?${query}&${more}`, own.signal);
      const [answer, smooth] = await Promise.all([ask(this.view.query(charts[0].width, this.axis)), ask(this.view.smoothQuery(charts[0].width, this.axis))]);
      if (this.asking !== own) return;
      const curves = Object.values(answer.curves);
      this.view.extend(curves, curves.map(() => this.axis));
      const marks = this.events.map((event) => ({...event, step: event.after_step}));
      for (const chart of charts) {
        const of = (one) => chart.names.map((name) => one.curves[name] ?? null);
        chart.show(of(answer), marks, chart.names.map(() => this.axis), smooth ? of(smooth) : []);
      }
      place("charts").dataset.drawn = String(performance.now());
    } catch (error) {
      if (!own.signal.aborted) throw error;
    } finally {
      if (this.asking === own) {
        const wait = Math.min(10 * (performance.now() - begun), 5000);
        this.asking = null;
        this.pause = setTimeout(() => { this.pause = 0; if (this.isStale) this.draw().catch(this.fail); }, wait > 500 ? wait : 0);
      }
    }
  }
}
