// An answer, token by token. A click on a token, or the focus on it, selects the cycle behind it.
//
//     <- ->   the cycle before, the next one          up, down   the token before, the next one
//     Home, End   the first and the last cycle

import { el } from "./dom.js";
import { kindOf } from "./explain.js";
import { Splitter } from "./split.js";

const MOVES = { ArrowLeft: "cycle", ArrowRight: "cycle", ArrowUp: "token", ArrowDown: "token", Home: "cycle", End: "cycle" };

/** `onSelect(answer, cycle)` is called with the number of the selected cycle, an index of `cycles`. */
export class Answer {
  #splitter = new Splitter();
  #spans = []; // those that belong to a cycle, in order
  #quiet = false; // the focus selects nothing
  #onSelect;

  constructor(onSelect) {
    this.cycles = [];
    this.text = "";
    this.#onSelect = onSelect;
    this.element = el("div", {
      class: "answer",
      role: "group",
      "aria-label": "Answer. Each token can be selected: arrow keys move from cycle to cycle.",
      onclick: (event) => this.#focusOn(event.target),
      onfocusin: (event) => this.#select(event.target),
      onkeydown: (event) => this.#move(event),
    });
  }

  /** The next part of the answer: its text, and the cycle that made it (null: the server sends none). */
  add(text, cycle) {
    if (cycle) this.cycles.push(cycle);
    this.text += text;
    this.#append(this.#splitter.add(text, cycle?.tokens ?? [], this.cycles.length - 1));
  }

  /** Nothing more comes. */
  end() {
    this.#append(this.#splitter.rest());
  }

  #append(parts) {
    this.element.append(...parts.map((part) => this.#span(part)));
  }

  #span({ text, cycle, token }) {
    if (cycle === null) return document.createTextNode(text);
    const { kind, depth } = kindOf(this.cycles[cycle], token);
    const span = el("span", { class: `token ${kind}`, tabindex: this.#spans.length ? "-1" : "0", "--depth": depth }, text);
    span.dataset.cycle = cycle;
    this.#spans.push(span);
    return span;
  }

  #focusOn(span) {
    if (!this.#spans.includes(span)) return;
    span.focus();
    this.#select(span); // a browser that does not focus on a click
  }

  #select(span) {
    if (this.#quiet || !this.#spans.includes(span)) return;
    for (const other of this.#spans) other.tabIndex = other === span ? 0 : -1;
    const cycle = Number(span.dataset.cycle);
    this.#onSelect(this, cycle);
  }

  /** Mark the tokens of a cycle; null: of none. */
  highlight(cycle) {
    for (const span of this.#spans) span.classList.toggle("selected", Number(span.dataset.cycle) === cycle);
  }

  /** Focus on a cycle's first token, if it has text. `quietly`: without selecting it. */
  focus(cycle, quietly = false) {
    this.#quiet = quietly;
    this.#spans.find((span) => Number(span.dataset.cycle) === cycle)?.focus();
    this.#quiet = false;
  }

  /** Bring a cycle's tokens into view. */
  reveal(cycle) {
    this.#spans.find((span) => Number(span.dataset.cycle) === cycle)?.scrollIntoView({ block: "nearest" });
  }

  #move(event) {
    const here = this.#spans.indexOf(event.target);
    if (event.key === "Enter") this.#select(event.target);
    const unit = MOVES[event.key];
    if (!unit || here < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const step = event.key === "ArrowLeft" || event.key === "ArrowUp" ? -1 : 1;
    if (unit === "token") return this.#spans[here + step]?.focus();
    const cycles = [...new Set(this.#spans.map((span) => Number(span.dataset.cycle)))];
    const at = cycles.indexOf(Number(event.target.dataset.cycle));
    const to = { Home: 0, End: cycles.length - 1 }[event.key] ?? at + step;
    if (to in cycles) this.focus(cycles[to]);
  }
}
