// Elements from texts, by Preact and htm. What looks like markup in a value is shown and never run.

import {h, render} from "./preact/preact.js";
import htm from "./preact/htm.js";

export {render};
export const html = htm.bind(h);

// Shows something in the element with this id. What has not changed stays, so that the focus and a selection stay too.
export function show(id, ...content) { render(content, document.getElementById(id)); }

const SHAPES = {starts: "◔", trains: "●", restarts: "↻", waits: "…", ends: "◑", done: "✓", failed: "✕", lost: "?", stalled: "!", unknown: "?", paused: "‖"};

// A state has a shape and a word besides its colour.
export const State = ({state, why}) => html`<span class=${`state ${/^[a-z]+$/.test(state) ? state : ""}`} title=${why || state}>
  <span aria-hidden="true">${SHAPES[state] ?? "·"} </span>${state}</span>`;

export const runAddress = (id) => `/run/${encodeURIComponent(id)}`;

// Columns are {heading, kind: class of the cells, cell: of a row, title}; rows have a key.
export const Table = ({id, columns, rows, keyOf}) => html`<table id=${id}>
  <thead><tr>${columns.map(({heading, kind, title}) => html`<th scope="col" class=${typeof kind === "string" ? kind : ""} title=${title}>${heading}</th>`)}</tr></thead>
  <tbody>${rows.map((row) => html`<tr key=${keyOf(row)}>${columns.map(({kind, cell}) => html`<td class=${typeof kind === "function" ? kind(row) : kind}>${cell(row)}</td>`)}</tr>`)}</tbody></table>`;
