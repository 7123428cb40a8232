// The bar over the conversation: which one is shown, a new one, files of it, and forgetting.

import { saveFile } from "./dom.js";
import { asJson, asMarkdown, titleOf } from "./talks.js";

export class Bar {
  #talk = null; // the conversation that is shown

  /** `parts`: the elements talks, new, more, markdown, json, delete, empty and unkept. `open(talk)` is called with what is chosen. */
  constructor(parts, talks, open) {
    Object.assign(this, { parts, talks, open });
    const files = { markdown: ["md", "text/markdown", asMarkdown], json: ["json", "application/json", asJson] };
    for (const [name, [ending, type, write]] of Object.entries(files)) {
      parts[name].addEventListener("click", () => saveFile(`${titleOf(this.#talk)}.${ending}`, type, write(this.#talk)));
    }
    parts.talks.addEventListener("change", () => open(talks.open(parts.talks.value)));
    parts.new.addEventListener("click", () => open(talks.open(null)));
    parts.delete.addEventListener("click", () => this.#forget("Delete this conversation?", [this.#talk]));
    parts.empty.addEventListener("click", () => this.#forget("Delete all conversations that this browser keeps?", talks.list()));
    parts.more.addEventListener("focusout", ({ relatedTarget }) => relatedTarget && !parts.more.contains(relatedTarget) && this.close());
    parts.more.addEventListener("click", (event) => event.target.closest("button") && this.close());
    addEventListener("click", (event) => !parts.more.contains(event.target) && this.close());
    addEventListener("storage", () => this.show(this.#talk)); // another tab
  }

  /** Close the menu; return whether it was open. */
  close() {
    const { more } = this.parts;
    const was = more.open;
    if (was && more.contains(document.activeElement)) more.querySelector("summary").focus();
    more.open = false;
    return was;
  }

  #forget(question, talks) {
    if (!confirm(`${question} This cannot be undone.`)) return;
    for (const { id } of talks) this.talks.remove(id);
    this.open(this.talks.open(null));
  }

  /** Show which conversation is open, and the others; `isKept`: whether it will be there at the next visit. */
  show(talk, isKept = true) {
    const { parts } = this;
    this.#talk = talk;
    const kept = this.talks.list();
    const all = kept.some(({ id }) => id === talk.id) ? kept : [talk, ...kept];
    parts.talks.replaceChildren(...all.map((one) => new Option(titleOf(one), one.id, false, one.id === talk.id)));
    for (const name of ["new", "markdown", "json", "delete"]) parts[name].disabled = !talk.messages.length;
    parts.empty.disabled = !kept.length;
    parts.unkept.hidden = isKept;
  }
}
