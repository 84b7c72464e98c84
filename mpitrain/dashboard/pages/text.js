// Texts and elements. All texts go through textContent, so what looks like markup is shown and never run.

// Numbers and times are written without Intl: to make one of its formats takes a page longer than to write all its cells.
const grouped = (whole) => String(whole).replace(/\B(?=(\d{3})+$)/g, ",");
const two = (part) => String(part).padStart(2, "0");
const dayOf = (date) => `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (size >= 1e21) return value.toExponential(2);
  if (Number.isInteger(value)) return grouped(value);
  if (size >= 1000) return grouped(Math.round(value));
  if (size !== 0 && size < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function time(seconds) {
  if (!seconds) return "";
  const date = new Date(seconds * 1000), clock = `${two(date.getHours())}:${two(date.getMinutes())}`, day = dayOf(date);
  return day === dayOf(new Date()) ? clock : `${day} ${clock}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return "";
  if (seconds < 100) return `${Number(seconds.toPrecision(2))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// The number of milliseconds.
export function milliseconds(seconds) { return seconds === null || seconds === undefined ? "" : number(1000 * seconds, 3); }

// How long ago a time was, in words, for what lasts.
export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const minutes = Math.max(0, Math.round((Date.now() / 1000 - seconds) / 60));
  if (minutes < 1) return "just now";
  if (minutes < 100) return `${minutes} min ago`;
  const hours = Math.round(minutes / 60);
  return hours < 48 ? `${hours} h ago` : `${Math.round(hours / 24)} days ago`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let place = 0;
  while (value >= 999.5 && place < units.length - 1) { value /= 1000; place++; }
  return `${Number(value.toPrecision(3))} ${units[place]}`;
}

export function words(name) { return name.replaceAll("_", " "); }
