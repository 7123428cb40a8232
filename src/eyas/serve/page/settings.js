// The form of sampling controls: what is asked of the server besides the messages. Values are kept for the next visit; the API key only
// until the tab is closed.

import { keep, kept, keptObject } from "./keep.js";

const STORED = "eyas.settings";
const KEY = "eyas.key";

export class Settings {
  /** `form` holds the controls, by name; those of the class "number" are left out of a request while they are empty. */
  constructor(form) {
    this.form = form;
    for (const [name, value] of Object.entries(keptObject("localStorage", STORED) ?? {})) {
      const control = form.elements[name];
      if (control && name !== "key") control.value = value;
    }
    form.elements.key.value = kept("sessionStorage", KEY) ?? "";
    form.addEventListener("change", () => this.#store());
    form.addEventListener("reset", () => setTimeout(() => this.#store()));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  #store() {
    const { key, ...values } = Object.fromEntries(new FormData(this.form));
    keep("localStorage", STORED, JSON.stringify(values));
    keep("sessionStorage", KEY, key);
  }

  /** The methods that the server drafts by, as choices. */
  offerMethods(names) {
    const select = this.form.elements.drafting;
    const chosen = select.value || keptObject("localStorage", STORED)?.drafting;
    const known = new Set([...select.options].map((option) => option.value));
    for (const name of names.filter((name) => !known.has(name))) select.add(new Option(name, name));
    if (chosen) select.value = chosen;
    if (!select.value) select.value = "auto"; // a method of another server
  }

  get key() {
    return this.form.elements.key.value.trim();
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  /** Whether answers are shown as Markdown. */
  get markdown() {
    return this.form.elements.shown.value === "markdown";
  }

  /** The first control whose value is impossible; null if all is well. */
  get invalid() {
    return this.form.querySelector(":invalid");
  }

  /** The fields of a request's body. */
  get body() {
    const body = {};
    for (const control of this.form.querySelectorAll("input.number")) {
      if (control.value !== "") body[control.name] = control.valueAsNumber;
    }
    const drafting = this.form.elements.drafting.value;
    if (drafting && drafting !== "auto") body.drafting = Number(drafting) || drafting;
    return body;
  }
}
