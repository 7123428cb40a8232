// An answer, token by token. A click on a token, or the focus on it, selects the cycle behind it.
//
//     left, right   the cycle before, the next one        up, down   the token before, the next one
//     Home, End     the first and the last cycle
//
// What is written grows at its end only: of the blocks that are drawn, new text changes the last two at most, and only those are drawn anew.

import { el } from "./dom.js";
import { kindOf } from "./explain.js";
import { asWritten } from "./piece.js";
import { Splitter } from "./split.js";

const MOVES = { ArrowLeft: "cycle", ArrowRight: "cycle", ArrowUp: "token", ArrowDown: "token", Home: "cycle", End: "cycle" };
const OPEN = 2; // blocks at the end that new text may change

/** `onSelect(answer, cycle)` is called with the number of the selected cycle, an index of `cycles`. */
export class Answer {
  #splitter = new Splitter();
  #parts = []; // what the splitter made of the text
  #owners = []; // for each character of the text, the number of its part
  #shown = ""; // the text of the parts
  #blocks = []; // what is drawn, as [{ at, element }]
  #marked = null; // a cycle
  #stop = 0; // the part at which the Tab key stops
  #quiet = false; // the focus selects nothing
  #format;
  #onSelect;

  /** `format`: `markdown` or `asWritten`. */
  constructor(onSelect, format = asWritten) {
    this.cycles = [];
    this.text = "";
    this.#format = format;
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

  /** The next part of the answer: its text, and the cycle that made it (null: the server sends none). It is shown by `draw`. */
  add(text, cycle) {
    if (cycle) this.cycles.push(cycle);
    this.text += text;
    this.#take(this.#splitter.add(text, cycle?.tokens ?? [], this.cycles.length - 1));
  }

  /** Nothing more comes. */
  end() {
    this.#take(this.#splitter.rest());
    this.draw();
  }

  set format(format) {
    if (format === this.#format) return;
    this.#format = format;
    this.element.replaceChildren();
    this.#blocks = [];
    this.draw();
  }

  #take(parts) {
    for (const part of parts) {
      for (let i = 0; i < part.text.length; i++) this.#owners.push(this.#parts.length);
      this.#parts.push(part);
      this.#shown += part.text;
    }
  }

  /** Show what has been added. */
  draw() {
    const focused = this.element.contains(document.activeElement) ? document.activeElement.dataset.place : undefined;
    const from = this.#blocks.at(-OPEN)?.at ?? 0;
    for (const { element } of this.#blocks.splice(-OPEN)) element.remove();
    const fresh = this.#format(this.#shown.slice(from), from, (piece) => this.#nodes(piece));
    this.#blocks.push(...fresh);
    this.element.append(...fresh.map(({ element }) => element));
    this.#stopAt(this.element.querySelector(`[data-place="${this.#stop}"]`) ?? this.element.querySelector("[data-place]"));
    if (focused && !this.element.contains(document.activeElement)) this.#quietly(() => this.#spans(`[data-place="${focused}"]`)[0]?.focus());
  }

  /** A piece's text, each token in an element of its own. */
  #nodes({ text, places }) {
    const nodes = [];
    for (let from = 0, to = 0; from < text.length; from = to) {
      const owner = this.#owners[places[from]];
      while (to < text.length && this.#owners[places[to]] === owner) to++;
      nodes.push(this.#node(owner, text.slice(from, to)));
    }
    return nodes;
  }

  #node(place, text) {
    const { cycle, token } = this.#parts[place];
    if (cycle === null) return document.createTextNode(text);
    const { kind, depth } = kindOf(this.cycles[cycle], token);
    const marked = cycle === this.#marked ? "selected" : "";
    return el("span", { class: `token ${kind} ${marked}`, tabindex: "-1", "data-cycle": cycle, "data-place": place, "--depth": depth }, text);
  }

  #spans(selector = "[data-place]") {
    return [...this.element.querySelectorAll(selector)];
  }

  #stopAt(span) {
    if (!span) return;
    for (const other of this.#spans('.token[tabindex="0"]')) other.tabIndex = -1;
    this.#stop = Number(span.dataset.place);
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

  #quietly(act) {
    this.#quiet = true;
    act();
    this.#quiet = false;
  }

  /** Mark the tokens of a cycle; null: of none. */
  highlight(cycle) {
    for (const span of this.#spans(".token.selected")) span.classList.remove("selected");
    this.#marked = cycle;
    for (const span of this.#spans(`[data-cycle="${cycle}"]`)) span.classList.add("selected");
  }

  /** Focus on a cycle's first token, if it is shown, without selecting it. */
  focus(cycle) {
    this.#quietly(() => this.#spans(`[data-cycle="${cycle}"]`)[0]?.focus());
  }

  /** Bring a cycle's tokens into view. */
  reveal(cycle) {
    this.#spans(`[data-cycle="${cycle}"]`)[0]?.scrollIntoView({ block: "nearest" });
  }

  #move(event) {
    const { place, cycle } = event.target.dataset;
    const unit = MOVES[event.key];
    if (!place || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter") this.#select(event.target);
    if (!unit) return;
    event.preventDefault();
    const spans = this.#spans();
    const back = event.key === "ArrowLeft" || event.key === "ArrowUp";
    const same = (span) => span.dataset[unit === "token" ? "place" : "cycle"];
    const firsts = spans.filter((span, n) => n === 0 || same(span) !== same(spans[n - 1]));
    const here = firsts.findIndex((span) => same(span) === (unit === "token" ? place : cycle));
    const to = { Home: 0, End: firsts.length - 1 }[event.key] ?? here + (back ? -1 : 1);
    firsts[to]?.focus();
  }
}
