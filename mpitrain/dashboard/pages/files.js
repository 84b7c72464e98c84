// What is on the disk of a run: its checkpoints, and what `mpitrain verify` and `mpitrain plan` have said of its script.

import {get} from "./api.js";
import {ago, bytes, element, number} from "./text.js";

const LOOK_MS = 20000;  // a folder may be on a slow share
const place = (name) => document.getElementById(name);

export class Files {
  // `path` answers what there is.
  constructor(path) {
    this.path = path;
    this.isLooking = false;
    setInterval(() => { if (!document.hidden) this.look(); }, LOOK_MS);
  }

  // Ask, one question at a time.
  async look() {
    if (this.isLooking) return;
    this.isLooking = true;
    try {
      const answer = await get(this.path);
      this.showCheckpoints(answer.folders);
      this.showVerify(answer.verify, answer.verifyProblem);
      this.showPlan(answer.plan, answer.planProblem);
    } catch (error) {
      place("filesProblem").textContent = error.message;
    } finally {
      this.isLooking = false;
    }
  }

  showCheckpoints(folders) {
    place("checkpoints").hidden = !folders.length;
    const problems = folders.filter((one) => one.problem).map((one) => `${one.folder} ${one.problem}`);
    place("filesProblem").textContent = problems.join(". ");
    const rows = folders.flatMap((one) => one.checkpoints.map((saved) => row(one.folder, saved)));
    place("checkpointTable").hidden = !rows.length;
    place("checkpointTable").querySelector("tbody").replaceChildren(...rows);
    const notes = folders.map((one) => {
      const total = one.checkpoints.reduce((sum, saved) => sum + (saved.bytes ?? 0), 0);
      const number_ = one.checkpoints.length;
      const more = one.more ? `, and ${number(one.more)} older` : "";
      return one.problem ? null : `${one.folder}: ${number(number_)} ${number_ === 1 ? "checkpoint" : "checkpoints"}, ${bytes(total)}${more}`;
    });
    place("checkpointNote").textContent = notes.filter(Boolean).join("; ");
  }

  showVerify(result, problem) {
    place("verify").hidden = !result && !problem;
    place("verifyProblem").textContent = problem;
    if (!result) return;
    const words = {true: "equal on one rank and on several", false: "not equal on one rank and on several", null: "not compared"};
    place("verifyWords").textContent = words[String(result.is_equal)];
    place("verifyWords").className = `state ${result.is_equal ? "done" : "failed"}`;
    place("verifyWhen").textContent = ` ${circumstances(result)}`;
    place("verifyLines").textContent = result.lines.join("\n");
  }

  showPlan(plan, problem) {
    place("plan").hidden = !plan && !problem;
    place("planProblem").textContent = problem;
    if (!plan) return;
    place("planWords").textContent = plan.lines.at(-1) ?? "";
    place("planWhen").textContent = ` ${circumstances(plan)}`;
    place("planLines").textContent = plan.lines.join("\n");
  }
}

// When a command has looked at a script, and how.
function circumstances(word) {
  const changed = word.isOld ? "; the script has changed since" : "";
  const arguments_ = word.arguments.length ? `, with ${word.arguments.join(" ")}` : "";
  return `${ago(word.at)}${arguments_}${changed}`;
}

function row(folder, saved) {
  const cells = [number(saved.step), ago(saved.saved), bytes(saved.bytes), number(saved.ranks), number(saved.loss), number(saved.score)];
  const made = element("tr", {title: folder}, ...cells.map((text, place_) => element("td", {className: place_ === 1 ? "" : place_ > 2 ? "numeric minor" : "numeric"}, text)));
  made.append(element("td", {className: saved.problem ? "wide problem" : "wide"}, saved.problem));
  return made;
}
