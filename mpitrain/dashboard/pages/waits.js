// Who waits for whom: in words, and in a small table. The server has grouped the ranks.

import {duration, element} from "./text.js";

const place = (name) => document.getElementById(name);

// `waits` is null while no rank waits for long. `stall` is what the launcher says of it.
export function showWaits(waits, stall, isStalled, isOperator) {
  place("waits").hidden = !waits && !stall;
  place("stall").textContent = stall ?? "";
  place("stall").className = isStalled ? "problem" : "note";
  place("waitText").textContent = waits?.text ?? "";
  place("waitStacks").hidden = !isOperator;
  place("waitTable").hidden = !waits;
  place("waitTable").tBodies[0].replaceChildren(...(waits?.rows ?? []).map((row) =>
    element("tr", {}, element("td", {}, row.ranks), element("td", {className: "wide"}, row.hosts.join(", ")), element("td", {className: "wide"}, row.does),
      element("td", {}, duration(row.seconds)), element("td", {}, row.is_awaited ? "is waited for" : ""))));
}
