// An answer, token by token. A click on a token, or the focus on it, selects the cycle behind it.
//
//     left, right   the cycle before, the next one        up, down   the token before, the next one
//     Home, End     the first and the last cycle
//
// An answer may have thousands of tokens: whatever happens to one of them touches the elements of its own cycle only.

import { el } from "./dom.js";
import { kindOf } from "./explain.js";
import { Splitter } from "./split.js";

const MOVES = { ArrowLeft: "cycle", ArrowRight: "cycle", ArrowUp: "token", ArrowDown: "token", Home: "cycle", End: "cycle" };

/** `onSelect(answer, cycle)` is called with the number of the selected cycle, an index of `cycles`. */
export class Answer {
  #splitter = new Splitter();
  #spans = []; // those that belong to a cycle, in order
  #byCycle = new Map(); // the spans of each cycle that has text
  #marked = null; // a cycle
  #stop = null; // the span at which the Tab key stops
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
    const span = el("span", { class: `token ${kind}`, tabindex: "-1", "data-cycle": cycle, "data-place": this.#spans.length, "--depth": depth }, text);
    this.#spans.push(span);
    if (!this.#byCycle.has(cycle)) this.#byCycle.set(cycle, []);
    this.#byCycle.get(cycle).push(span);
    if (this.#stop === null) this.#stopAt(span);
    if (cycle === this.#marked) span.classList.add("selected");
    return span;
  }

  #stopAt(span) {
    if (this.#stop) this.#stop.tabIndex = -1;
    this.#stop = span;
    span.tabIndex = 0;
  }

  #focusOn(element) {
    if (!element.dataset.place) return;
    element.focus();
    this.#select(element); // a browser that does not focus on a click
  }

  #select(element) {
    if (this.#quiet || !element.dataset.place) return;
    this.#stopAt(element);
    this.#onSelect(this, Number(element.dataset.cycle));
  }

  /** Mark the tokens of a cycle; null: of none. */
  highlight(cycle) {
    for (const span of this.#byCycle.get(this.#marked) ?? []) span.classList.remove("selected");
    this.#marked = cycle;
    for (const span of this.#byCycle.get(cycle) ?? []) span.classList.add("selected");
  }

  /** Focus on a cycle's first token, if it has text. `quietly`: without selecting it. */
  focus(cycle, quietly = false) {
    this.#quiet = quietly;
    this.#byCycle.get(cycle)?.[0].focus();
    this.#quiet = false;
  }

  /** Bring a cycle's tokens into view. */
  reveal(cycle) {
    this.#byCycle.get(cycle)?.[0].scrollIntoView({ block: "nearest" });
  }

  #move(event) {
    const { place, cycle } = event.target.dataset;
    const unit = MOVES[event.key];
    if (!place || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter") this.#select(event.target);
    if (!unit) return;
    event.preventDefault();
    const step = event.key === "ArrowLeft" || event.key === "ArrowUp" ? -1 : 1;
    if (unit === "token") return this.#spans[Number(place) + step]?.focus();
    const cycles = [...this.#byCycle.keys()];
    const to = { Home: 0, End: cycles.length - 1 }[event.key] ?? cycles.indexOf(Number(cycle)) + step;
    if (to in cycles) this.focus(cycles[to]);
  }
}
