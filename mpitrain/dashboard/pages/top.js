// How a run goes: how far, until when, how good, and against the run before.

import {html, runAddress} from "./html.js";
import {Noted} from "./notes.js";
import {ago, duration, number, time, words} from "./text.js";

// `checkpoint` is the newest one; null: there is none, and undefined: that is not known yet.
export function Top({run, before, checkpoint, orders}) {
  const now = {...run.last, ...run.metrics}, step = run.step ?? run.last.step ?? null, share = run.steps ? step / run.steps : null;
  const took = run.started ? (run.ended ?? (run.is_live ? Date.now() / 1000 : run.changed)) - run.started : null;
  const far = [share === null ? "" : `${Math.floor(100 * share)} %`, run.left === null ? "" : `${duration(run.left)} left`].filter(Boolean).join(", ");
  const figures = [["step", step === null ? "" : number(step) + (run.steps ? ` / ${number(run.steps)}` : ""), far],
    [run.best ? `best ${words(run.best.name)}` : "", run.best ? number(run.best.value) : "", run.best ? `at step ${number(run.best.step)}` : ""],
    ["loss", number(now.loss), "", "", typeof now.loss === "string" ? "problem" : ""], ["samples/s", number(run.speed ?? run.metrics["samples/s"]), "mean", "", "minor"],
    ["ranks", run.ranks ? number(run.ranks) : "", run.hosts.length ? `on ${number(run.hosts.length)} ${run.hosts.length === 1 ? "host" : "hosts"}` : "", "", "minor"],
    ["took", duration(took), run.started ? `since ${time(run.started)}` : "", "", "minor"],
    ["checkpoint", checkpoint ? `step ${number(checkpoint.step)}` : checkpoint === null ? "none" : "", checkpoint ? `${ago(checkpoint.saved)}, in ${checkpoint.folder}` : "", "", "path"]];
  return html`${share === null ? null : html`<progress max="1" value=${share} aria-label="Steps made"></progress>`}
    <ul id="figures" class="figures">${figures.filter(([name, value]) => name && value !== "").map(([name, value, more, title, kind]) =>
      html`<li key=${name} class=${kind} title=${title}><span>${name}</span><strong>${value}</strong>${more ? html`<small>${more}</small>` : null}</li>`)}</ul>
    <${Noted} run=${run} />
    ${before ? html`<${Against} run=${run} ...${before} />` : null}
    ${orders.length ? html`<p id="orders">Last commands: ${orders.slice(-2).reverse().map((order, place) => html`${place ? "; " : ""}<strong>after step ${number(order.after_step)}</strong> ${order.text}`)}</p>` : null}`;
}

// The last run of the same script, at the step that both have reached, and what was changed since.
function Against({run, id, name, metric, now, before, isHigherBetter, speeds, differences, step}) {
  const parts = [];
  if (metric) {
    const isShare = isHigherBetter && Math.max(Math.abs(now), Math.abs(before)) <= 1;
    const change = 100 * (isShare ? now - before : (now - before) / Math.abs(before || 1));
    const kind = change === 0 ? "" : (change > 0) === isHigherBetter ? "better" : "worse";
    parts.push(html`${words(metric)} <strong class=${kind}>${change > 0 ? "+" : ""}${number(Number(change.toPrecision(2)))} %</strong> ${kind || "equal"}`);
  }
  if (speeds[0] && speeds[1]) parts.push(`${number(speeds[0] / speeds[1], 2)}x speed`);
  const changed = differences.filter((one) => !one.name.startsWith("package ")).map(({name: fact, values}) => `${fact} ${values[0] ?? "not given"} → ${values[1] ?? "not given"}`);
  return html`<p id="against">Against <a href=${runAddress(id)}>${name}</a>, the last run of this script, up to step ${number(step)}: ${parts.map((part, place) => [place ? ", " : "", part])}. <a href=${`/compare?runs=${[id, run.id].map(encodeURIComponent).join(",")}`}>Compare</a>.
    ${changed.length ? html` Changed: <span class="now">${changed.join("; ")}</span>` : " Nothing was changed."}</p>`;
}
