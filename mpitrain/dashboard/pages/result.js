// How a run ended: why, its last words, its newest checkpoint, and the command that resumes it.

import {html} from "./html.js";
import {ago, bytes, number} from "./text.js";

const MOST_LINES = 30;

// From the last traceback on, if there is one among the lines.
function lastWords(lines) {
  const begin = lines.findLastIndex((line) => line.text.includes("Traceback (most recent call last)"));
  const shown = lines.slice(Math.max(begin, 0)).filter((line) => !/^[ ^~]+$|^mpitrain: end of the failure /.test(line.text));
  if (begin >= 0) return shown.filter((line) => line.ranks === lines[begin].ranks).slice(-MOST_LINES).map((line) => line.text).join("\n");
  return shown.slice(-MOST_LINES).map((line) => `[${line.ranks || "mpiexec"}] ${line.text}`).join("\n");
}

const quoted = (word) => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;

function resumes(document_) {
  const hosts = Object.entries(document_.hosts), isHere = hosts.length === 1;
  const where = isHere ? ["-n", String(hosts[0][1].length)] : ["-H", hosts.map(([host, ranks]) => `${host}:${ranks.length}`).join(",")];
  return `cd ${quoted(document_.folder)} && mpitrain run ${[...where, document_.script, ...document_.arguments].map(quoted).join(" ")}`;
}

// The end is what matters, and the rest is above.
const toEnd = (box) => { if (box) box.scrollTop = box.scrollHeight; };

export function Result({run, document: of, checkpoint, lines}) {
  const text = run.state === "failed" ? lastWords(lines) : "";
  return html`<section class=${`card ${run.state}`} aria-label="How it ended">
    <p><strong>${{done: "Done", failed: "Failed", lost: "Lost"}[run.state] ?? run.state}</strong>: ${run.why}</p>
    ${text ? html`<pre ref=${toEnd} tabindex="0" aria-label="Its last words">${text}</pre>` : null}
    ${checkpoint ? html`<p>Newest checkpoint: step ${number(checkpoint.step)}, ${bytes(checkpoint.bytes)}, ${ago(checkpoint.saved)}, in <code>${checkpoint.folder}</code></p>` : null}
    ${of && checkpoint && run.why !== "all steps were made" ? html`<p>This resumes it: <code>${resumes(of)}</code></p>` : null}</section>`;
}
