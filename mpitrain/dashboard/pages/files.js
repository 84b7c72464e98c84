// What is on the disk of a run: its checkpoints, and what `mpitrain verify` and `mpitrain plan` have said of its script.

import {get} from "./api.js";
import {Table, html, show} from "./html.js";
import {ago, bytes, number} from "./text.js";

const LOOK_MS = 20000;  // a folder may be on a slow share

export class Files {
  // `path` answers what there is; `onAnswer` gets it too.
  constructor(path, onAnswer) {
    this.path = path;
    this.onAnswer = onAnswer;
    this.isLooking = false;
    setInterval(() => { if (!document.hidden) this.look(); }, LOOK_MS);
  }

  // Ask, one question at a time.
  async look() {
    if (this.isLooking) return;
    this.isLooking = true;
    try {
      const answer = await get(this.path);
      show("files", html`<${Checkpoints} folders=${answer.folders} />`,
        html`<${Word} title="Verify" word=${answer.verify} problem=${answer.verifyProblem} text=${EQUAL[String(answer.verify?.is_equal)]} kind=${answer.verify?.is_equal ? "state done" : "state failed"} summary="What was compared" />`,
        html`<${Word} title="Plan" word=${answer.plan} problem=${answer.planProblem} text=${answer.plan?.lines.at(-1)} summary="What was predicted" />`);
      this.onAnswer(answer);
    } catch (error) {
      show("files", html`<h2>Checkpoints</h2><p class="problem">${error.message}</p>`);
    } finally {
      this.isLooking = false;
    }
  }
}

const EQUAL = {true: "equal on one rank and on several", false: "not equal on one rank and on several", null: "not compared"};
const COLUMNS = [["Step", "numeric", (saved) => number(saved.step)], ["Saved", "", (saved) => ago(saved.saved)], ["Size", "numeric", (saved) => bytes(saved.bytes)],
  ["Ranks", "numeric minor", (saved) => number(saved.ranks)], ["Loss", "numeric minor", (saved) => number(saved.loss)], ["Score", "numeric minor", (saved) => number(saved.score)],
  ["Fault", (saved) => saved.problem ? "wide problem" : "wide", (saved) => saved.problem]].map(([heading, kind, cell]) => ({heading, kind, cell}));

function Checkpoints({folders}) {
  if (!folders.length) return null;
  const rows = folders.flatMap((one) => one.checkpoints.map((saved) => ({...saved, folder: one.folder})));
  const note = ({folder, checkpoints, more}) => `${folder}: ${number(checkpoints.length)} ${checkpoints.length === 1 ? "checkpoint" : "checkpoints"}, ${bytes(checkpoints.reduce((sum, saved) => sum + (saved.bytes ?? 0), 0))}${more ? `, and ${number(more)} older` : ""}`;
  return html`<section id="checkpoints"><h2>Checkpoints</h2>
    ${folders.map((one) => one.problem ? html`<p class="problem">${one.folder} ${one.problem}</p>` : html`<p class="note">${note(one)}</p>`)}
    ${rows.length ? html`<div class="scroll" tabindex="0" aria-label="Checkpoints, the newest first"><${Table} columns=${COLUMNS} rows=${rows} keyOf=${(saved) => `${saved.folder} ${saved.step}`} /></div>` : null}</section>`;
}

// What a command has said last: `text` in short, and the lines.
function Word({title, word, problem, text, kind, summary}) {
  if (!word && !problem) return null;
  const id = title.toLowerCase();
  return html`<section id=${id}><h2>${title}</h2><p class="problem">${problem}</p>
    ${word ? html`<p><strong id=${`${id}Words`} class=${kind}>${text}</strong> <span>${circumstances(word)}</span></p>
    <details><summary>${summary}</summary><pre id=${`${id}Lines`} class="scroll" tabindex="0" aria-label=${summary}>${word.lines.join("\n")}</pre></details>` : null}</section>`;
}

// When a command has looked at a script, and how.
function circumstances(word) {
  const changed = word.isOld ? "; the script has changed since" : "";
  const arguments_ = word.arguments.length ? `, with ${word.arguments.join(" ")}` : "";
  return `${ago(word.at)}${arguments_}${changed}`;
}
