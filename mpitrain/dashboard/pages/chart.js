// One chart. All charts of a page share zoom and cursor. The server chooses the points for the pixels, so a zoom asks it again.

import uPlot from "./uplot/uPlot.esm.js";
import {download, keepInAddress} from "./api.js";
import {duration, element, number, words} from "./text.js";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const MOST_MARKS = 60;
const HELP = "Drag to zoom, double-click to see all. Keys: + and - zoom, arrows move, 0 shows all.";
const FLAG = 15;  // pixels of the row with the labels of events
const NEAR = 24;  // so far a label may be from its line
const BAND = {label: "", class: "band", width: 0, points: {show: false}, cursor: {show: false}};
// A flag has room for a few words, so the first ones must say what was done.
export const brief = (text) => text.replace(/^the learning rate is multiplied by ([^,]+).*/, "rate x $1").replace(/^the training is /, "");
const KINDS = {fault: "--bad", order: "--link"};  // of marks

const COLORS = 8;
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
// Each of 32 lines of a chart has a colour and a dash of its own.
export const colorOf = (number_) => `--curve-${number_ % COLORS + 1}`;
export const dashOf = (number_) => DASHES[Math.floor(number_ / COLORS) % DASHES.length];

// What charts have below them: steps, or a metric of the record that grows with the steps, such as the seconds.
export class Axis {
  constructor(curve = null) { this.curve = curve?.steps.length ? curve : null; }
  toX(step) { return this.curve ? interpolated(this.curve.steps, this.curve.values, step) : step; }
  toStep(x) { return this.curve ? interpolated(this.curve.values, this.curve.steps, x) : x; }
}

export function interpolated(from, to, at) {
  let low = 0, high = from.length - 1;
  if (at <= from[0]) return to[0];
  if (at >= from[high]) return to[high];
  while (high - low > 1) { const middle = (low + high) >> 1; if (from[middle] <= at) low = middle; else high = middle; }
  return to[low] + (to[high] - to[low]) * (at - from[low]) / (from[high] - from[low] || 1);
}

// How the charts of a page are shown: the range of x, null: all; what x is; a logarithmic axis; and smoothing, in percent
// of the range of which a point is the mean. All of it is in the page's address.
export class View {
  constructor(onChange) {
    const query = new URLSearchParams(location.search), [low, high] = ["from", "to"].map((name) => parseFloat(query.get(name)));
    this.range = low < high ? [low, high] : null; this.extent = [0, 1]; this.onChange = onChange;
    this.x = query.get("x") ?? "step"; this.isLog = query.has("log"); this.smoothing = parseFloat(query.get("smooth")) || 0;
  }
  set(range) {
    if (range && range[1] - range[0] < 1e-9) return;
    this.range = range;
    keepInAddress({from: range ? String(range[0]) : "", to: range ? String(range[1]) : ""});
    this.onChange();
  }
  change(values) {
    Object.assign(this, values, "x" in values ? {range: null} : {});
    keepInAddress({from: this.range ? String(this.range[0]) : "", to: this.range ? String(this.range[1]) : "", x: this.x === "step" ? "" : this.x, log: this.isLog ? "1" : "", smooth: this.smoothing ? String(this.smoothing) : ""});
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
  query(pixels, axis) {
    const parts = [`pixels=${Math.max(1, Math.round(pixels))}`];
    if (this.range) parts.push(`from=${axis.toStep(this.range[0])}`, `to=${axis.toStep(this.range[1])}`);
    return parts.join("&");
  }
  // Of the query above, also for the smoothed lines; null: there are none.
  smoothQuery(pixels, axis) { return this.smoothing ? `${this.query(pixels, axis)}&mean=${Math.round(100 / this.smoothing)}` : null; }
  extend(curves, axes) {
    const ends = curves.flatMap((curve, place) => curve?.steps.length ? [curve.steps[0], curve.steps[curve.steps.length - 1]].map((step) => axes[place].toX(step)) : []);
    if (!this.range && ends.length) this.extent = [Math.min(...ends), Math.max(...ends)];
  }
}

// One panel. `lines` are [{label, color: number of a colour}], `marks` are [{step, text, number, kind}].
export class Chart {
  constructor(parent, title, lines, view) {
    this.title = title; this.lines = lines; this.view = view; this.marks = []; this.plot = null; this.data = null; this.form = "";
    this.note = element("p", {className: "note"});
    this.place = element("div", {className: "plot", tabIndex: 0, role: "group", ariaLabel: `Chart of ${title}. ${HELP}`, title: HELP});
    this.box = element("section", {className: "chart"}, element("h3", {}, title), element("button", {type: "button", ariaLabel: `Save ${title} as PNG`, onclick: () => this.save()}, "PNG"), this.place, this.note);
    parent.append(this.box);
    this.place.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.drop(); this.draw(); });
  }

  get width() { return Math.max(120, this.box.clientWidth - 20); }
  get height() { return innerWidth < 600 ? 150 : 210; }

  key(event) {
    const actions = {"+": () => this.view.scale(0.5), "=": () => this.view.scale(0.5), "-": () => this.view.scale(2), "0": () => this.view.set(null),
      Escape: () => this.view.set(null), ArrowLeft: () => this.view.move(-0.25), ArrowRight: () => this.view.move(0.25)};
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  // `curves` and `smooth`: for each line what the server has answered, or null. `axes`: one for each line. `bands`: for each
  // line {x, low, high}, between which it is filled.
  show(curves, marks, axes, smooth = [], bands = []) {
    this.marks = marks.slice(-MOST_MARKS);
    this.axis = axes[0] ?? new Axis();
    const table = (curve, place) => curve ? [curve.steps.map((step) => axes[place].toX(step)), curve.values] : [[], []];
    const tables = [...curves.map(table), ...smooth.map(table), ...bands.flatMap(({x, low, high}) => [[x, high], [x, low]])];
    this.hasBands = bands.length > 0;
    this.data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    // A browser without a GPU takes 0.3 s for a line of 1.5 pixels up and down in each column, and a tenth for the thinnest one.
    this.isDense = curves.some((curve) => curve && !curve.exact);
    const values = curves.flatMap((curve) => curve?.values ?? []).filter((value) => value !== null);
    this.isLog = this.view.isLog && values.every((value) => value > 0);
    const notes = this.view.isLog && !this.isLog ? ["no logarithmic axis: not all values are above 0"] : [];
    curves.forEach((curve, place) => {
      if (!curve) return;
      if (curve.notFinite) notes.push(`${this.lines[place].label}: ${number(curve.notFinite)} values are NaN or infinite, the first at step ${number(curve.firstNotFinite)}`);
      if (!curve.exact) notes.push(`${this.lines[place].label}: extremes of ${number(curve.points)} points; zoom in for each`);
    });
    this.note.textContent = notes.join(". ");
    const form = [tables.length, this.isLog, this.view.x, this.data[0].length <= 60, this.isDense, this.marks.length > 0].join();
    if (form !== this.form) this.drop();
    this.form = form;
    this.draw();
  }

  draw() {
    if (!this.data) return;
    if (!this.plot) this.make();
    const [low, high] = this.view.shown;
    this.plot.batch(() => {
      this.plot.setData(this.data, false);
      this.plot.setScale("x", {min: low, max: high > low ? high : low + 1});
    });
  }

  make() {
    const few = this.data[0].length <= 60, isSmooth = !this.hasBands && this.data.length - 1 > this.lines.length;
    const axis = {stroke: color("--soft"), grid: {stroke: color("--grid"), width: 1}, ticks: {stroke: color("--line"), width: 1}, font: "12px system-ui, sans-serif"};
    const written = this.view.x === "seconds" ? duration : (value) => number(value);
    const line = (of, label, alpha) => ({label, stroke: color(colorOf(of.color)), dash: dashOf(of.color), width: this.isDense ? 1 / devicePixelRatio : 1.5, alpha, points: {show: few && alpha === 1, size: 4}, value: (_, value) => number(value, 6)});
    const options = {
      width: this.width, height: this.height, pxAlign: 0, padding: [this.marks.length ? FLAG + 3 : 8, null, null, null],
      scales: {x: {time: false}, y: this.isLog ? {distr: 3} : {range: (_, low, high) => low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.08, false)}},
      axes: [{...axis, size: 34, space: 70, values: (_, ticks) => ticks.map((tick) => this.view.x === "seconds" ? duration(tick) : short(tick))},
        {...axis, size: 58, values: (_, ticks) => ticks.map((tick) => tick === null ? "" : short(tick))}],
      series: [{label: this.view.x === "seconds" ? "time" : this.view.x, value: (_, value) => value === null ? "" : written(value)},
        ...this.lines.map((one) => line(one, words(one.label), isSmooth ? 0.3 : 1)),
        ...(isSmooth ? this.lines.map((one) => line(one, `${words(one.label)}, mean of ${this.view.smoothing} %`, 1)) : []),
        ...(this.hasBands ? this.lines.flatMap(() => [BAND, BAND]) : [])],
      bands: this.hasBands ? this.lines.map((one, place) => ({series: [this.lines.length + 2 * place + 1, this.lines.length + 2 * place + 2], fill: `color-mix(in srgb, ${color(colorOf(one.color))} 22%, transparent)`})) : [],
      cursor: {drag: {x: true, y: false, setScale: false}, points: {size: 7}, sync: {key: "page"}, bind: {dblclick: () => () => this.view.set(null)}},
      legend: {live: true},
      hooks: {
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const [low, high] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
          plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
          this.view.set([low, high]);
        }],
        drawClear: [(plot) => this.drawMarks(plot)],
      },
    };
    this.plot = new uPlot(options, this.data, this.place);
  }

  // A line for each event, and in the row above the curves its number and as much of its text as finds room.
  drawMarks(plot) {
    const [low, high] = [plot.scales.x.min, plot.scales.x.max], {left, top, width, height} = plot.bbox, ratio = devicePixelRatio, context = plot.ctx;
    const shown = this.marks.map((mark) => ({...mark, x: left + (this.axis.toX(mark.step) - low) / (high - low) * width})).filter(({x}) => x >= left - 1 && x <= left + width + 1).sort((a, b) => a.x - b.x);
    context.save();
    context.font = `${11 * ratio}px system-ui, sans-serif`; context.textBaseline = "middle"; context.textAlign = "left"; context.lineWidth = ratio;
    let free = left;
    shown.forEach((mark, place) => {
      context.strokeStyle = context.fillStyle = color(KINDS[mark.kind] ?? "--muted");
      context.setLineDash([6 * ratio, 4 * ratio]);
      context.beginPath(); context.moveTo(mark.x, top); context.lineTo(mark.x, top + height); context.stroke();
      const end = shown[place + 1]?.x ?? left + width, isLeft = end - mark.x < 90 * ratio && place === shown.length - 1 && mark.x - free > end - mark.x;
      const room = (isLeft ? mark.x - free : end - mark.x) - 8 * ratio;
      let text = `${mark.number} ${brief(mark.text)}`;
      while (text.length > 1 && context.measureText(text).width > room) text = text.endsWith("…") ? `${text.slice(0, -2)}…` : `${text.slice(0, -1)}…`;
      if (text.length < String(mark.number).length + 3) text = String(mark.number);
      const wide = context.measureText(text).width + 6 * ratio, wanted = isLeft ? mark.x - wide : Math.min(mark.x, left + width - wide);
      const from = wanted < free && free - wanted < NEAR * ratio ? free : wanted;
      if (from < free - 1) return;
      context.fillRect(from, top - FLAG * ratio, wide, (FLAG - 1) * ratio);
      context.fillStyle = color("--surface");
      context.fillText(text, from + 3 * ratio, top - (FLAG + 1) / 2 * ratio);
      free = from + wide + 2 * ratio;
    });
    context.restore();
  }

  // As a picture with its title and the names of its lines.
  save() {
    const source = this.plot.ctx.canvas, ratio = devicePixelRatio, head = 24 * ratio;
    const canvas = element("canvas", {width: source.width, height: source.height + head}), context = canvas.getContext("2d");
    context.fillStyle = color("--surface"); context.fillRect(0, 0, canvas.width, canvas.height);
    context.font = `${13 * ratio}px system-ui, sans-serif`; context.textBaseline = "middle";
    let x = 8 * ratio;
    for (const line of this.lines) {
      const text = `— ${words(line.label)}`;
      context.fillStyle = color(colorOf(line.color)); context.fillText(text, x, head / 2);
      x += context.measureText(text).width + 14 * ratio;
    }
    context.drawImage(source, 0, head);
    canvas.toBlob((blob) => download(`${this.title}.png`, blob));
  }

  drop() { this.plot?.destroy(); this.plot = null; }

  resize() {
    if (this.plot && this.plot.width !== this.width) this.plot.setSize({width: this.width, height: this.height});
  }
}

function short(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(4))}${letter}`;
  }
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(6)));
}
