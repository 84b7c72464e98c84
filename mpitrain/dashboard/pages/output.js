// What the ranks have printed, for operators: asked for while its part of the page is open. The launcher keeps it.

import {get} from "./api.js";
import {element} from "./text.js";

const LOOK_MS = 2000;
const TYPING_MS = 300;
const place = (name) => document.getElementById(name);

export class Output {
  // `path` is where the output of this run is asked for. `onLines` is called when `lines` has other ones.
  constructor(path, onLines) {
    this.path = path;
    this.onLines = onLines;
    this.lines = [];
    this.hasAsked = false;
    this.isLive = false;
    this.isLooking = false;
    this.shown = "";
    place("output").hidden = false;
    place("outputPart").addEventListener("toggle", () => this.look());
    place("outputFilter").addEventListener("submit", (event) => { event.preventDefault(); this.look(); });
    for (const name of ["outputRanks", "outputText"]) place(name).addEventListener("input", () => this.lookSoon());
    setInterval(() => { if (!document.hidden && this.isLive) this.look(); }, LOOK_MS);
  }

  // The page has heard of the job, or, with null, that it has gone. What is shown then stays. If it has failed, the lines
  // are asked for also while nobody looks: they say why.
  show(live, isFailed) {
    const isOther = this.isLive !== Boolean(live), isWanted = isFailed && !this.hasAsked;
    this.isLive = Boolean(live);
    this.hasAsked ||= isWanted;
    if (isOther || isWanted) this.look(isWanted);
  }

  lookSoon() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.look(), TYPING_MS);
  }

  // One question at a time. What was typed meanwhile is asked for next.
  async look(isWanted = false) {
    if (!place("outputPart").open && !isWanted) return;
    if (this.isLooking) { this.isStale = true; return; }
    this.isLooking = true;
    this.isStale = false;
    try {
      const query = new URLSearchParams({ranks: place("outputRanks").value, text: place("outputText").value});
      const answer = await get(`${this.path}?${query}`);
      place("outputNote").textContent = answer.refused ?? this.note(answer);
      if (answer.lines) this.showLines(answer.lines);
    } catch (error) {
      place("outputNote").textContent = error.message;
    } finally {
      this.isLooking = false;
      if (this.isStale) this.look();
    }
  }

  note(answer) {
    const count = answer.lines.length, parts = [count === 1 ? "1 line" : `${count.toLocaleString("en")} lines`];
    if (answer.more) parts.push("older ones are not shown: filter for them");
    if (answer.dropped) parts.push(`${answer.dropped.toLocaleString("en")} older lines were not kept`);
    return parts.join("; ");
  }

  showLines(lines) {
    const key = JSON.stringify(lines);
    if (key === this.shown) return;
    this.shown = key;
    this.lines = lines;
    this.onLines();
    const box = place("outputLines");
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 20;
    box.replaceChildren(...lines.map((line) => {
      const who = `[${line.ranks || "mpiexec"}${line.stream === "stderr" ? " stderr" : ""}] `;
      const cut = line.cut ? element("span", {className: "now"}, ` … ${line.cut.toLocaleString("en")} bytes more were not kept`) : null;
      return element("div", {title: new Date(line.at * 1000).toLocaleTimeString("en-GB")}, element("span", {className: "now"}, who), line.text, cut);
    }));
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }
}
