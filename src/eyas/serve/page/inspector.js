// The panel that shows one cycle of an answer: the tree, why its path ended, its time, and the way to the other cycles.

import { el } from "./dom.js";
import { accepted, count, milliseconds, planned, reason, summary } from "./explain.js";
import { Rhythm } from "./rhythm.js";
import { drawTree, nodeTable } from "./tree.js";

const ZOOM = 1.25;
const [SMALLEST, LARGEST] = [0.3, 2.5]; // zoom factors

function fact(name, value, detail) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, el("strong", {}, value), el("span", { class: "quiet" }, detail)));
}

function facts(cycle) {
  if (cycle.prefill) return [fact("Time", milliseconds(cycle.ms), "for the whole prompt")];
  const drafted = accepted(cycle);
  const own = cycle.tokens.length - drafted;
  const stages = Object.entries(cycle.parts_ms ?? {}).map(([name, value]) => `${name} ${milliseconds(value).replace(" ms", "")}`);
  const nodes = Math.max(0, cycle.nodes.length - 1);
  const levels = Math.max(0, ...cycle.nodes.map((node) => node.depth));
  return [
    fact("Tokens", String(cycle.tokens.length), `${drafted} drafted${own ? ` + ${own} own` : ""}`),
    fact("Time", milliseconds(cycle.ms), stages.join(" \u00b7 ")),
    fact("Tree", nodes ? count(nodes, "node") : "none", nodes ? `${count(levels, "level")} \u00b7 ${chosen(cycle.plan)}` : chosen(cycle.plan)),
    fact("tau so far", cycle.tau_so_far.toFixed(2), "tokens per cycle"),
  ];
}

function chosen(plan) {
  return `${plan}: ${planned(plan)}`;
}

function button(name, sign, onclick, attributes = {}) {
  return el("button", { type: "button", "aria-label": name, title: name, onclick, ...attributes }, sign);
}

function key(kind, text) {
  return el("span", { class: `key ${kind}` }, text);
}

export class Inspector {
  #answer = null;
  #at = 0;
  #scale = "auto";

  /** `panel` is an empty element; `empty` is shown in it while no cycle is. */
  constructor(panel, empty) {
    this.panel = panel;
    this.title = el("h2");
    this.previous = button("Previous cycle", "\u2190", () => this.#go(this.#at - 1));
    this.next = button("Next cycle", "\u2192", () => this.#go(this.#at + 1));
    const close = button("Close the cycle", "\u00d7", () => this.close(), { class: "close" });
    this.rhythm = new Rhythm((at) => this.#go(at));
    this.facts = el("dl", { class: "facts" });
    this.reason = el("div", { class: "reason" });
    this.drawing = el("div", { class: "drawing", tabindex: "0", role: "region", "aria-label": "The tree; it can be scrolled" });
    this.table = el("details", { ontoggle: () => this.#fillTable() }, el("summary", {}, "All nodes as a table"));
    this.tree = el("section", { "aria-label": "Draft tree" }, this.#legend(), this.drawing, this.table);
    const head = el("header", {}, this.title, el("div", { class: "buttons" }, this.previous, this.next, close));
    this.status = el("p", { class: "hidden", role: "status" });
    this.cycle = el("div", { class: "cycle" }, head, this.rhythm.element, this.facts, this.reason, this.tree);
    this.empty = empty;
    panel.append(this.status, this.empty, this.cycle);
    panel.addEventListener("keydown", (event) => this.#key(event));
    document.addEventListener("keydown", (event) => event.key === "Escape" && !event.defaultPrevented && this.close());
    new ResizeObserver(() => typeof this.#scale === "string" && this.#drawTree()).observe(this.drawing);
    this.close();
  }

  /** The answer whose cycle is shown; null without one. */
  get answer() {
    return this.#answer;
  }

  /** The number of that cycle. */
  get at() {
    return this.#at;
  }

  /** Show cycle number `at` of an answer. `following`: nobody chose it, the answer is being written; a screen reader is not told. */
  show(answer, at, following = false) {
    if (this.#answer !== answer) this.#answer?.highlight(null);
    [this.#answer, this.#at, this.following] = [answer, at, following];
    answer.highlight(at);
    const cycle = answer.cycles[at];
    this.panel.classList.add("open");
    this.empty.hidden = true;
    this.cycle.hidden = false;
    const of = el("span", { class: "quiet" }, ` of ${answer.cycles.at(-1).number}`);
    this.title.replaceChildren(...(cycle.prefill ? ["The prompt"] : [`Cycle ${cycle.number}`, of]));
    this.previous.disabled = at === 0;
    this.next.disabled = at === answer.cycles.length - 1;
    this.rhythm.show(answer.cycles, at);
    this.facts.replaceChildren(...facts(cycle));
    this.reason.replaceChildren(reason(cycle));
    this.tree.hidden = cycle.nodes.length < 2; // nothing was drafted
    this.#drawTree();
    this.#fillTable();
    if (following) return;
    this.status.textContent = summary(cycle, answer.cycles);
    answer.reveal(at);
  }

  /** Show no cycle. The focus goes back to the answer if it was in here. */
  close() {
    const answer = this.#answer;
    const inside = this.panel.contains(document.activeElement);
    this.#answer = null;
    this.panel.classList.remove("open");
    this.cycle.hidden = true;
    this.empty.hidden = false;
    this.status.textContent = "";
    answer?.highlight(null);
    if (inside) answer?.focus(this.#at);
  }

  #go(at) {
    if (!(at in this.#answer.cycles)) return;
    const focused = document.activeElement;
    this.show(this.#answer, at);
    if (focused.disabled) this.rhythm.slider.focus(); // the button at an end, which some browsers take the focus from at once
  }

  #key(event) {
    const own = event.target === this.rhythm.slider || event.target === this.drawing; // they have arrow keys of their own
    if (own || !this.#answer || event.altKey || event.ctrlKey || event.metaKey) return;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.#go(this.#at + step);
  }

  #legend() {
    const zoom = (name, sign, scale) => button(name, sign, () => this.#zoom(scale));
    const zooms = [zoom("Zoom out", "\u2212", 1 / ZOOM), zoom("Zoom in", "+", ZOOM), zoom("Fit the tree into the panel", "Fit", "fit")];
    const keys = [key("accepted", "accepted"), key("own", "target's own"), key("refused", "not taken")];
    return el("div", { class: "legend" }, ...keys, el("span", { class: "buttons" }, ...zooms));
  }

  #zoom(scale) {
    const picture = this.drawing.firstElementChild;
    const now = picture.getBoundingClientRect().width / picture.viewBox.baseVal.width;
    this.#scale = scale === "fit" ? scale : Math.min(LARGEST, Math.max(SMALLEST, now * scale));
    this.#drawTree();
  }

  #drawTree() {
    const cycle = this.#answer?.cycles[this.#at];
    if (!cycle || this.tree.hidden) return;
    const { paddingLeft, paddingRight } = getComputedStyle(this.drawing);
    const room = this.drawing.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
    this.drawing.replaceChildren(drawTree(cycle, this.#scale, room));
  }

  #fillTable() {
    this.table.querySelector("table")?.remove();
    if (this.table.open && this.#answer) this.table.append(nodeTable(this.#answer.cycles[this.#at]));
  }
}
