// Answers of the server, and the stream of what changes.

export async function get(path, signal) {
  const answer = await fetch(path, {signal});
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer.json();
}

// Tells a job something. Returns its answer: {"accepted": text} or {"refused": text}, the latter also from the server.
export async function tell(path, order) {
  try {
    const answer = await fetch(path, {method: "POST", body: JSON.stringify(order)});
    return answer.ok ? await answer.json() : {refused: await answer.text()};
  } catch {
    return {refused: "the dashboard does not answer"};
  }
}

// What a page shows is in its address, so that a reload, a bookmark and a friend see the same. "" removes a value.
export function keepInAddress(values) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(values)) if (value === "") query.delete(name); else query.set(name, value);
  const text = query.toString();
  history.replaceState(null, "", location.pathname + (text ? `?${text}` : ""));
}

// Calls `onMessage` with each message. The element with the id "connection" says whether the page is connected.
export function listen(path, onMessage) {
  const note = document.getElementById("connection");
  const stream = new EventSource(path);
  stream.onopen = () => { note.textContent = "connected"; note.className = "ok"; };
  stream.onerror = () => {
    note.textContent = "not connected: the dashboard has ended or does not answer; trying again";
    note.className = "problem";
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => listen(path, onMessage), 3000);
  };
  stream.onmessage = (event) => onMessage(JSON.parse(event.data));
  addEventListener("pagehide", () => stream.close());
}

// Have the browser save something as a file of this name.
export function download(name, blob) {
  const link = Object.assign(document.createElement("a"), {href: URL.createObjectURL(blob), download: name.replaceAll("/", "-")});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// A table of texts and numbers as CSV.
export function csv(rows) {
  const cell = (value) => /[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? "");
  return new Blob([rows.map((row) => row.map(cell).join(",")).join("\n") + "\n"], {type: "text/csv"});
}
