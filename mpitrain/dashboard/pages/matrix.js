// A picture of a number for each pair of hosts: rows send, columns receive. Arrows move the focus from cell to cell.

import {element} from "./text.js";

const STEPS = 6;  // of colour
const MOST = 520, LEAST_CELL = 6, MOST_CELL = 36;

export class Matrix {
  // `rows` has a number or null for each pair; `shown` makes a text of a number.
  constructor(parent, title, nodes, rows, shown, {isMoreBetter}) {
    Object.assign(this, {title, nodes, rows, shown, isMoreBetter, at: nodes.length > 1 ? [0, 1] : [0, 0]});
    const values = rows.flat().filter((value) => value !== null);
    this.low = Infinity; this.high = -Infinity;
    for (const value of values) { this.low = Math.min(this.low, value); this.high = Math.max(this.high, value); }
    this.canvas = element("canvas", {className: "matrix", tabIndex: 0, role: "application"});
    this.canvas.setAttribute("aria-label", `${title} of all pairs of hosts. Arrows move from pair to pair; the table below has all values.`);
    this.note = element("p", {className: "now", role: "status"});
    const best = isMoreBetter ? this.high : this.low, worst = isMoreBetter ? this.low : this.high;
    const range = values.length ? `${shown(best)} at best, ${shown(worst)} at worst. Rows send, columns receive.` : "Nothing was measured.";
    this.range = element("p", {className: "note"}, range);
    parent.append(element("section", {}, element("h3", {}, title), this.range, element("div", {}, this.canvas), this.note, this.table()));
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    for (const name of ["focus", "blur"]) this.canvas.addEventListener(name, () => { this.say(this.at); this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // The same as a table, for those who cannot see a picture, and to copy.
  table() {
    const cell = (value) => element("td", {className: "numeric"}, value === null ? "" : this.shown(value));
    const head = element("tr", {}, element("th", {scope: "col"}, "from, to"), ...this.nodes.map((name) => element("th", {scope: "col"}, name)));
    const body = this.nodes.map((name, place) => element("tr", {}, element("th", {scope: "row"}, name), ...this.rows[place].map(cell)));
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
    return element("details", {}, element("summary", {}, `${this.title} as a table`), element("div", {className: "scroll", tabIndex: 0, ariaLabel: `${this.title} of all pairs`}, table));
  }

  // 0 is the worst colour, 1 the best. Ratios count: half of the bandwidth looks as bad at any rate.
  quality(value) {
    if (this.low === this.high) return 1;
    if (this.low <= 0) {
      const part = (value - this.low) / (this.high - this.low);
      return this.isMoreBetter ? part : 1 - part;
    }
    const share = Math.log(value / this.low) / Math.log(Math.max(this.high / this.low, 2));
    return this.isMoreBetter ? share + Math.max(0, 1 - Math.log2(this.high / this.low)) : 1 - share;
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1, size = this.nodes.length;
    if (!width || !size) return;
    const style = getComputedStyle(document.documentElement), context = this.canvas.getContext("2d");
    context.font = "11px system-ui, sans-serif";
    const longest = Math.min(110, Math.max(...this.nodes.map((name) => context.measureText(name).width)));
    this.label = size <= 48 ? Math.ceil(longest) + 8 : 0;
    this.cell = Math.max(Math.min((Math.min(width, MOST + this.label) - this.label) / size, MOST_CELL), width < MOST ? 1 : LEAST_CELL);
    const side = this.label + this.cell * size;  // the names of rows are on the left, those of columns above
    this.canvas.width = this.canvas.height = side * ratio;
    this.canvas.style.width = this.canvas.style.height = `${side}px`;
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif"; context.textBaseline = "middle";
    const every = Math.ceil(12 / this.cell);
    this.nodes.forEach((name, place) => { if (this.label && place % every === 0) this.write(context, style.getPropertyValue("--soft"), name, place); });
    const colors = Array.from({length: STEPS}, (_, step) => style.getPropertyValue(`--heat-${step + 1}`).trim());
    const gap = this.cell > 4 ? 1 : 0;
    this.rows.forEach((row, from) => {
      row.forEach((value, to) => {
        if (value === null && from === to) return;
        const step = value === null ? -1 : Math.min(STEPS - 1, Math.max(0, Math.floor(this.quality(value) * STEPS)));
        context.fillStyle = step < 0 ? style.getPropertyValue("--grid") : colors[step];
        context.fillRect(this.label + to * this.cell, this.label + from * this.cell, this.cell - gap, this.cell - gap);
      });
    });
    if (document.activeElement === this.canvas) {
      context.strokeStyle = style.getPropertyValue("--text"); context.lineWidth = 2;
      context.strokeRect(this.label + this.at[1] * this.cell + 1, this.label + this.at[0] * this.cell + 1, Math.max(2, this.cell - 2), Math.max(2, this.cell - 2));
    }
  }

  // The name of a host beside its row and, upright, above its column.
  write(context, color, name, place) {
    const middle = this.label + (place + 0.5) * this.cell, room = this.label - 8;
    context.fillStyle = color;
    context.textAlign = "right";
    context.fillText(name, this.label - 6, middle, room);
    context.save();
    context.translate(middle, this.label - 6);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(name, 0, 0, room);
    context.restore();
  }

  point(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const to = Math.floor((event.clientX - bounds.left - this.label) / this.cell), from = Math.floor((event.clientY - bounds.top - this.label) / this.cell);
    if (from in this.rows && to in this.rows) this.say([from, to]);
  }

  move(event) {
    const steps = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (!steps) return;
    event.preventDefault();
    const last = this.nodes.length - 1;
    this.at = this.at.map((place, axis) => Math.min(last, Math.max(0, place + steps[axis])));
    this.say(this.at);
    this.draw();
  }

  say([from, to]) {
    if (!this.nodes.length) return;
    const value = this.rows[from][to];
    const words = from === to ? "the same host" : value === null ? "not measured" : this.shown(value);
    const text = `${this.nodes[from]} to ${this.nodes[to]}: ${words}`;
    this.note.textContent = text;
    this.canvas.title = text;
  }
}
