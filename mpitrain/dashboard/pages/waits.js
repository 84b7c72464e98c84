// Who waits for whom: in words, and in a small table. The server has grouped the ranks.

import {Table, html} from "./html.js";
import {duration} from "./text.js";

const COLUMNS = [{heading: "Ranks", cell: (row) => row.ranks}, {heading: "Hosts", kind: "wide", cell: (row) => row.hosts.join(", ")}, {heading: "Do", kind: "wide", cell: (row) => row.does},
  {heading: "For", cell: (row) => duration(row.seconds)}, {heading: "", cell: (row) => row.is_awaited ? "is waited for" : ""}];

// `waits` is null while no rank waits for long. `stall` is what the launcher says of it.
export function Waits({waits, stall, isStalled, isOperator}) {
  if (!waits && !stall) return null;
  return html`<h3>Who waits for whom</h3><p id="waitText">${waits?.text}</p><p id="stall" class=${isStalled ? "problem" : "note"}>${stall}</p>
    ${waits ? html`<div class="scroll" tabindex="0" aria-label="Who waits for whom"><${Table} id="waitTable" columns=${COLUMNS} rows=${waits.rows} keyOf=${(row) => row.ranks} /></div>` : null}
    ${isOperator ? html`<p class="note"><em>Stacks</em>, under Commands, shows the line that each rank is in.</p>` : null}`;
}
