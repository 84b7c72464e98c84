// What people have noted of a run: a name, a note and tags. Operators can change it.

import {tell} from "./api.js";
import {html} from "./html.js";

// In the first lines of the page.
export const Noted = ({run}) => run.note || run.tags.length ? html`<p>${run.tags.map((tag) => html`<span class="tag">${tag}</span> `)}${run.note}</p>` : null;

// For operators.
export function Notes({run, base, isOperator, fail}) {
  if (!isOperator || !run.folder) return null;
  const save = async (event) => {
    event.preventDefault();
    const form = event.target, value = (name) => form.elements[name].value.trim();
    const answer = await tell(`${base}/notes`, {name: value("title"), note: value("note"), tags: value("tags").split(/[\s,]+/).filter(Boolean), is_hidden: form.elements.hides.checked});
    if (answer.refused) fail(Error(answer.refused)); else form.closest("details").open = false;
  };
  const ownName = run.name === run.folder.split("/").pop() ? "" : run.name;
  return html`<h2>Notes</h2><details><summary>Name, note and tags</summary><form onSubmit=${save}>
    <label>Name <input name="title" type="text" maxlength="200" defaultValue=${ownName} autocomplete="off" /></label>
    <label>Tags <input name="tags" type="text" maxlength="300" defaultValue=${run.tags.join(" ")} autocomplete="off" /></label>
    <label>Note <input name="note" type="text" maxlength="1000" defaultValue=${run.note} autocomplete="off" /></label>
    <label><input name="hides" type="checkbox" defaultChecked=${run.isHidden} /> Hide in the list</label>
    <button type="submit">Save the notes</button></form></details>`;
}
