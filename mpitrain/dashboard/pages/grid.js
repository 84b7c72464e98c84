// The grid of ranks and time: a row for each rank, a column for each look, a colour for what the rank does.

import {element} from "./text.js";

// Phases of docs/reference/formats-and-protocols.md by the colour that they share.
const KINDS = {computes: "computes", waits: "waits", wire: "wire", disk: "disk", busy: "busy", paused: "paused", starts: "starts", done: "waits",
  stopped: "red", failed: "red", ended: "red", lost: "red", unknown: "red"};
const KEY = [["computes", "computes"], ["waits", "waits for other ranks"], ["wire", "data arrives or leaves"], ["busy", "busy, such as a checkpoint"], ["paused", "paused"],
  ["disk", "stuck at a disk"], ["starts", "starts"], ["red", "stopped, failed, lost or silent"]];
const LABEL = 34;

export const kindOf = (phase) => KINDS[phase] ?? "waits";

export class Grid {
  constructor(parent) {
    this.history = []; this.hosts = [];
    this.canvas = element("canvas", {className: "grid", role: "img", ariaLabel: "What each rank has done in the last minutes. The table below says what each does now."});
    const key = element("ul", {className: "key"}, ...KEY.map(([kind, text]) => element("li", {className: kind}, element("span", {className: "swatch"}), text)));
    parent.append(this.canvas, key);
    this.canvas.addEventListener("mousemove", (event) => this.explain(event));
    new ResizeObserver(() => this.draw()).observe(parent);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  set(history) { this.history = history.slice(-600); this.draw(); }

  add(look) {
    const last = this.history[this.history.length - 1];
    this.hosts = look.ranks.map((rank) => rank.host);
    if (last && look.at <= last[0] && last[0] - look.at < 60) return;
    this.history.push([look.at, look.column ?? look.ranks.map((rank) => rank.phase)]);
    this.history = this.history.slice(-600);
    this.draw();
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    const ranks = Math.max(0, ...this.history.map(([, phases]) => phases.length));
    this.columns = Math.min(600, Math.max(60, Math.floor((width - LABEL) / 5)));
    this.row = Math.max(4, Math.min(18, Math.floor(600 / Math.max(ranks, 1))));
    this.column = (width - LABEL) / this.columns;
    const height = Math.max(1, ranks) * this.row;
    this.canvas.width = width * ratio; this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif"; context.textBaseline = "middle"; context.textAlign = "right";
    context.fillStyle = style.getPropertyValue("--soft");
    const every = Math.ceil(12 / this.row);
    for (let rank = 0; rank < ranks; rank += every) context.fillText(String(rank), LABEL - 6, (rank + 0.5) * this.row);
    const shown = this.history.slice(-this.columns), begin = this.columns - shown.length, colors = {};
    for (const kind of new Set(Object.values(KINDS))) colors[kind] = style.getPropertyValue(`--${kind}`).trim();
    shown.forEach(([, phases], place) => phases.forEach((phase, rank) => {
      context.fillStyle = colors[kindOf(phase)];
      context.fillRect(LABEL + (begin + place) * this.column, rank * this.row, Math.ceil(this.column), this.row - 1);
    }));
  }

  explain(event) {
    const bounds = this.canvas.getBoundingClientRect(), shown = this.history.slice(-this.columns);
    const place = Math.floor((event.clientX - bounds.left - LABEL) / this.column) - (this.columns - shown.length);
    const rank = Math.floor((event.clientY - bounds.top) / this.row), look = shown[place];
    if (!look || !(rank in look[1])) { this.canvas.title = ""; return; }
    const clock = new Date(look[0] * 1000).toLocaleTimeString("en-GB");
    this.canvas.title = `${clock} rank ${rank}${this.hosts[rank] ? ` on ${this.hosts[rank]}` : ""}: ${look[1][rank]}`;
  }
}
