// The form of sampling controls: what is asked of the server besides the messages. Values are kept for the next visit; the API key only
// until the tab is closed.

const STORED = "eyas.settings";
const KEY = "eyas.key";

function stored(storage, name) {
  try {
    return storage.getItem(name);
  } catch {
    return null; // the browser keeps nothing for this page
  }
}

function store(storage, name, value) {
  try {
    storage.setItem(name, value);
  } catch {
    // likewise
  }
}

export class Settings {
  /** `form` holds the controls, by name; those of the class "number" are left out of a request while they are empty. */
  constructor(form) {
    this.form = form;
    let values = {};
    try {
      values = JSON.parse(stored(localStorage, STORED) ?? "{}");
    } catch {
      // damaged: the defaults stand
    }
    for (const [name, value] of Object.entries(values)) {
      const control = form.elements[name];
      if (control && name !== "key") control.value = value;
    }
    form.elements.key.value = stored(sessionStorage, KEY) ?? "";
    form.addEventListener("change", () => this.#store());
    form.addEventListener("reset", () => setTimeout(() => this.#store()));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  #store() {
    const { key, ...values } = Object.fromEntries(new FormData(this.form));
    store(localStorage, STORED, JSON.stringify(values));
    store(sessionStorage, KEY, key);
  }

  /** The methods that the server drafts by, as choices. */
  offerMethods(names) {
    const select = this.form.elements.speculation;
    const chosen = select.value || JSON.parse(stored(localStorage, STORED) ?? "{}").speculation;
    const known = new Set([...select.options].map((option) => option.value));
    for (const name of names.filter((name) => !known.has(name))) select.add(new Option(name, name));
    if (chosen) select.value = chosen;
  }

  get key() {
    return this.form.elements.key.value.trim();
  }

  get system() {
    return this.form.elements.system.value.trim();
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
    const speculation = this.form.elements.speculation.value;
    if (speculation && speculation !== "auto") body.speculation = speculation === "off" ? false : Number(speculation) || speculation;
    return body;
  }
}
