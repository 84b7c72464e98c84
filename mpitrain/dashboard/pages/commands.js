// What an operator can tell a job: buttons, the factor of the learning rate, tunable values; and what the job answers.
// The job's launcher decides what can be done. The page shows its answer as it is.

import {get, tell} from "./api.js";
import {element, number} from "./text.js";

const LOOK_MS = 5000;  // other operators change values too
const MOST_ANSWERS = 5;
const LEAST_FACTOR = 0.01, MOST_FACTOR = 100;  // others of the learning rate are asked about, because most are slips
const place = (name) => document.getElementById(name);

export class Commands {
  // `path` is where the job of this run is told something.
  constructor(path) {
    this.path = path;
    this.isLive = false;
    this.isPaused = false;
    this.isLooking = false;
    this.rows = new Map();
    for (const kind of ["save", "stacks"]) this.button(kind, () => ({kind}));
    place("stop").addEventListener("click", () => this.ask("Stop the run", "Stop",
      `End ${this.job} after the present step? It is saved there. The steps behind it are not made; the checkpoint can be resumed.`, {kind: "stop"}));
    place("kill").addEventListener("click", () => this.ask("Kill the job", "Kill",
      `End ${this.job} now, without a save? All that it has made since its last checkpoint is lost.`, {kind: "kill"}));
    this.button("pause", () => ({kind: this.isPaused ? "resume" : "pause"}));
    this.form(place("rate"), () => ({kind: "rate", value: place("factor").value}));
    place("sure").addEventListener("close", () => {
      if (place("sure").returnValue === "yes") this.tell(this.asked.title, this.asked.order);
      place("sure").returnValue = "";
    });
    setInterval(() => { if (!document.hidden) this.look(); }, LOOK_MS);
  }

  // Have the user say yes first, to a question that names what is ended or changed.
  ask(yes, title, question, order) {
    this.asked = {title, order};
    place("sureText").textContent = question;
    place("sureYes").textContent = yes;
    place("sure").showModal();
  }

  // The page has heard of the job, or, with null, that it has gone. Only operators' pages call this.
  show(live) {
    const isNew = live && (!this.isLive || this.isPaused !== Boolean(live.paused));
    this.isLive = Boolean(live);
    this.isPaused = Boolean(live?.paused);
    if (live) {
      const step = Math.max(0, ...live.ranks.map((rank) => rank.step));
      this.job = `job ${live.job} (${[live.script, ...live.arguments].join(" ")}), which is at step ${number(step)},`;
    }
    place("pause").textContent = this.isPaused ? "Resume" : "Pause";
    place("controls").hidden = !live;
    place("commands").hidden = !live && !place("answers").childElementCount;
    if (!live && place("sure").open) place("sure").close();
    if (isNew) this.look();
  }

  // Ask what the job can be told, one question at a time.
  async look() {
    if (!this.isLive || this.isLooking) return;
    this.isLooking = true;
    try {
      const answer = await get(this.path);
      place("cannot").textContent = answer.refused ?? "";
      place("cannot").hidden = !answer.refused;
      if (answer.can) this.showValues(answer.can);
    } catch (error) {
      if (this.isLive) { place("cannot").textContent = error.message; place("cannot").hidden = false; }
    } finally {
      this.isLooking = false;
    }
  }

  showValues(can) {
    place("nowFactor").textContent = `multiplied by ${number(can.rate_factor)} now`;
    const names = Object.keys(can.tunables);
    for (const [name, row] of this.rows) if (!names.includes(name)) { row.form.remove(); this.rows.delete(name); }
    for (const [name, value] of Object.entries(can.tunables)) {
      const row = this.rows.get(name) ?? this.addRow(name);
      const text = String(value);
      // What somebody is typing stays.
      if (row.input.value === row.shown) row.input.value = text;
      row.shown = text;
      row.now.textContent = text === "" ? "is empty now" : `is ${text} now`;
    }
  }

  addRow(name) {
    const input = element("input", {type: "text", autocomplete: "off", maxLength: 120, spellcheck: false});
    const now = element("span", {className: "now"});
    const form = element("form", {className: "command"}, element("label", {}, `${name} `, input), element("button", {type: "submit", ariaLabel: `Set ${name}`}, "Set"), now);
    const row = {form, input, now, shown: ""};
    this.rows.set(name, row);
    this.form(form, () => ({kind: "set", name, value: input.value}));
    place("tunables").append(form);
    return row;
  }

  button(name, order) {
    const button = place(name);
    button.addEventListener("click", () => this.once(button, button.textContent, order()));
  }

  form(form, order) {
    const button = form.querySelector("button");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const made = order(), factor = parseFloat(made.value), isRate = made.kind === "rate";
      const title = isRate ? `Learning rate times ${made.value}` : `${made.name}=${made.value}`;
      if (isRate && factor > 0 && (factor < LEAST_FACTOR || factor > MOST_FACTOR)) {
        this.ask("Multiply", title, `Multiply the learning rate of ${this.job} by ${made.value}? Factors are mostly from ${LEAST_FACTOR} to ${MOST_FACTOR}.`, made);
      } else this.once(button, title, made);
    });
  }

  // A button waits for the answer to its command. It is not disabled, because it would lose the focus.
  async once(button, title, order) {
    if (button.ariaDisabled === "true") return;
    button.ariaDisabled = "true";
    await this.tell(title, order);
    button.ariaDisabled = null;
  }

  // What takes an order back; null: nothing does. A value was what the page has shown before.
  backOf(order) {
    if (order.kind === "rate") return {title: `Learning rate times 1/${order.value}`, order: {kind: "rate", value: String(1 / parseFloat(order.value))}};
    const before = order.kind === "set" ? this.rows.get(order.name)?.shown : undefined;
    return before === undefined ? null : {title: `${order.name}=${before}`, order: {...order, value: before}};
  }

  async tell(title, order) {
    const text = element("span", {}, "waits for the answer, which comes after a step");
    const clock = new Date().toLocaleTimeString("en-GB");
    place("answers").prepend(element("li", {}, `${clock} `, element("strong", {}, title), ": ", text));
    while (place("answers").childElementCount > MOST_ANSWERS) place("answers").lastElementChild.remove();
    const back = this.backOf(order), answer = await tell(this.path, order);
    const isText = order.kind === "stacks" && answer.accepted;
    text.textContent = isText ? "see below" : answer.accepted ?? `refused: ${answer.refused}`;
    text.className = answer.accepted ? "" : "problem";
    if (back && answer.accepted) {
      const undo = element("button", {type: "button", ariaLabel: `Undo ${title}`, onclick: () => { undo.remove(); this.tell(`Undo: ${back.title}`, back.order); }}, "Undo");
      text.after(" ", undo);
    }
    if (isText) place("stackText").textContent = answer.accepted;
    place("stackText").hidden = !place("stackText").textContent;
    this.look();
  }
}
