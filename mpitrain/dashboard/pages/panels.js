// Which metrics share a panel: those that end in the same word, such as "loss" and "test loss". As `mpitrain plot`.

const PLACES = new Set(["epoch", "samples", "seconds", "copy_steps", "outer_steps"]);
export const MEASURED = ["samples_per_second", "learning_rate", "gradient_norm", "communication_share"];  // and never "best"
const FIRST = ["loss", ...MEASURED];

export function metricsOf(names) {
  const shown = names.filter((name) => !PLACES.has(name));
  return [...FIRST.filter((name) => shown.includes(name)), ...shown.filter((name) => !FIRST.includes(name))];
}

export function panelsOf(names) {
  const panels = new Map();
  for (const name of metricsOf(names)) {
    const key = name.split(" ").pop();
    panels.set(key, [...(panels.get(key) ?? []), name]);
  }
  return panels;
}

// Of what a metric is: "test" of "test loss"; "" of the training.
export const sourceOf = (name) => name.split(" ").slice(0, -1).join(" ");

// By which a run is judged: those come first, and others are folded.
const MAIN = /^loss$|^(test|valid|validation|val|eval|evaluation|dev)[ _/.-]|(^|[ _/.-])(acc|accuracy|score|f1|auc)$/i;
export function isMain(names) { return names.some((name) => MAIN.test(name)); }
