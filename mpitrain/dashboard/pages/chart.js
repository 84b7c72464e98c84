// Charts over steps that share one zoom. The server chooses the points for the pixels, so a zoom asks it again.

import uPlot from "./uplot/uPlot.esm.js";
import {keepInAddress} from "./api.js";
import {element, number, words} from "./text.js";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HEIGHT = 190;
const MOST_MARKS = 60;
const HELP = "Drag to zoom, double-click to see all. Keys: + and - zoom, arrows move, 0 shows all.";

const COLORS = 8;
const DASH = [6, 4];
// Each line of a chart has a colour and a dash of its own, up to twice the colours.
export const colorOf = (number_) => `--curve-${number_ % COLORS + 1}`;
export const dashOf = (number_) => number_ % (2 * COLORS) < COLORS ? [] : DASH;

// The range of steps that all charts of a page show; null: all steps. It is in the page's address.
export class Zoom {
  constructor(onChange) {
    const [low, high] = ["from", "to"].map((name) => parseFloat(new URLSearchParams(location.search).get(name)));
    this.range = low < high ? [low, high] : null; this.extent = [0, 1]; this.onChange = onChange;
  }
  set(range) {
    if (range && range[1] - range[0] < 1e-9) return;
    this.range = range;
    keepInAddress({from: range ? String(range[0]) : "", to: range ? String(range[1]) : ""});
    this.onChange();
  }
  get shown() { return this.range ?? this.extent; }
  scale(factor) {
    const [low, high] = this.shown, middle = (low + high) / 2, half = (high - low) / 2 * factor;
    const range = [Math.max(this.extent[0], middle - half), Math.min(this.extent[1], middle + half)];
    this.set(range[0] <= this.extent[0] && range[1] >= this.extent[1] ? null : range);
  }
  move(share) {
    const [low, high] = this.shown, by = (high - low) * share;
    const fitting = Math.min(Math.max(by, this.extent[0] - low), this.extent[1] - high);
    if (fitting) this.set([low + fitting, high + fitting]);
  }
  query(pixels) {
    const parts = [`pixels=${Math.max(1, Math.round(pixels))}`];
    if (this.range) parts.push(`from=${this.range[0]}`, `to=${this.range[1]}`);
    return parts.join("&");
  }
}

// One panel. `lines` are [{label, color: number of a colour}], `marks` are [{step, text}].
export class Chart {
  constructor(parent, title, lines, zoom) {
    this.lines = lines; this.zoom = zoom; this.marks = []; this.plot = null; this.data = null;
    this.note = element("p", {className: "note"});
    this.place = element("div", {className: "plot", tabIndex: 0, role: "group", ariaLabel: `Chart of ${title}. ${HELP}`, title: HELP});
    this.box = element("section", {className: "chart"}, element("h3", {}, title), this.place, this.note);
    parent.append(this.box);
    this.place.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.drop(); this.draw(); });
  }

  get width() { return Math.max(120, this.box.clientWidth - 20); }

  key(event) {
    const actions = {"+": () => this.zoom.scale(0.5), "=": () => this.zoom.scale(0.5), "-": () => this.zoom.scale(2), "0": () => this.zoom.set(null),
      Escape: () => this.zoom.set(null), ArrowLeft: () => this.zoom.move(-0.25), ArrowRight: () => this.zoom.move(0.25)};
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  // `curves`: for each line what the server has answered, or null.
  show(curves, marks) {
    this.marks = marks.slice(-MOST_MARKS);
    const tables = curves.map((curve) => curve ? [curve.steps, curve.values] : [[], []]);
    this.data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    const notes = [];
    curves.forEach((curve, place) => {
      if (!curve) return;
      if (curve.notFinite) notes.push(`${this.lines[place].label}: ${number(curve.notFinite)} values are NaN or infinite, the first at step ${number(curve.firstNotFinite)}`);
      if (!curve.exact) notes.push(`${this.lines[place].label}: extremes of ${number(curve.points)} points; zoom in for each`);
    });
    this.note.textContent = notes.join(". ");
    this.draw();
  }

  draw() {
    if (!this.data) return;
    if (!this.plot) this.make();
    const [low, high] = this.zoom.shown;
    this.plot.batch(() => {
      this.plot.setData(this.data, false);
      this.plot.setScale("x", {min: low, max: high > low ? high : low + 1});
    });
  }

  make() {
    const few = this.data[0].length <= 60;
    const axis = {stroke: color("--soft"), grid: {stroke: color("--grid"), width: 1}, ticks: {stroke: color("--line"), width: 1}, font: "12px system-ui, sans-serif"};
    const options = {
      width: this.width, height: HEIGHT, pxAlign: 0,
      scales: {x: {time: false}, y: {range: (_, low, high) => low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.08, false)}},
      axes: [{...axis, size: 34, space: 70, values: (_, ticks) => ticks.map((tick) => tick.toLocaleString("en"))},
        {...axis, size: 58, values: (_, ticks) => ticks.map((tick) => short(tick))}],
      series: [{label: "step", value: (_, value) => value === null ? "" : number(value)}, ...this.lines.map((line) => ({
        label: words(line.label), stroke: color(colorOf(line.color)), dash: dashOf(line.color), width: 1.5, points: {show: few, size: 4},
        value: (_, value) => number(value, 6),
      }))],
      cursor: {drag: {x: true, y: false, setScale: false}, points: {size: 7}, bind: {dblclick: () => () => this.zoom.set(null)}},
      legend: {live: true},
      hooks: {
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const [low, high] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
          plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
          this.zoom.set([low, high]);
        }],
        drawClear: [(plot) => this.drawMarks(plot)],
      },
    };
    this.plot = new uPlot(options, this.data, this.place);
  }

  drawMarks(plot) {
    const [low, high] = [plot.scales.x.min, plot.scales.x.max], {left, top, width, height} = plot.bbox;
    plot.ctx.save();
    plot.ctx.strokeStyle = color("--bad");
    plot.ctx.setLineDash([6, 4]);
    for (const mark of this.marks) {
      if (mark.step < low || mark.step > high) continue;
      const x = left + (mark.step - low) / (high - low) * width;
      plot.ctx.beginPath(); plot.ctx.moveTo(x, top); plot.ctx.lineTo(x, top + height); plot.ctx.stroke();
    }
    plot.ctx.restore();
  }

  drop() { this.plot?.destroy(); this.plot = null; }

  resize() {
    if (this.plot && this.plot.width !== this.width) this.plot.setSize({width: this.width, height: HEIGHT});
  }
}

function short(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(4))}${letter}`;
  }
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(6)));
}
