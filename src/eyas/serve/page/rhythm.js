// All cycles of an answer at a glance: a column for each cycle, a square for each of its tokens; and a slider over them.

import { el, svg } from "./dom.js";
import { kindOf, summary } from "./explain.js";

const [WIDTH, SQUARE, STEP, MOST] = [10, 7, 8, 9]; // pixels; squares of a column, at most

function column(cycle, at, height, shown) {
  const squares = cycle.tokens.slice(0, MOST).map((_, token) => {
    const { kind, depth } = kindOf(cycle, token);
    return svg("rect", { class: kind, x: 1.5, y: height - (token + 1) * STEP, width: SQUARE, height: SQUARE, rx: 1.5, "--depth": depth });
  });
  const back = svg("rect", { class: "back", width: WIDTH, height: height + 4, rx: 3 });
  return svg("g", { class: at === shown ? "current" : null, transform: `translate(${at * WIDTH} 0)`, "data-cycle": at }, back, ...squares);
}

export class Rhythm {
  /** `go(at)` is called with the number of a cycle that was chosen here. */
  constructor(go) {
    this.picture = svg("svg", { "aria-hidden": "true" });
    this.picture.addEventListener("click", (event) => {
      const chosen = event.target.closest("[data-cycle]");
      if (chosen) go(Number(chosen.getAttribute("data-cycle")));
    });
    this.slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Cycle", oninput: () => go(Number(this.slider.value)) });
    this.strip = el("div", { class: "strip" }, this.picture);
    this.element = el("div", { class: "rhythm" }, this.strip, this.slider);
  }

  /** Show these cycles, number `at` marked and in view. */
  show(cycles, at) {
    const height = Math.max(1, ...cycles.map((cycle) => Math.min(MOST, cycle.tokens.length))) * STEP + 2;
    this.picture.setAttribute("width", cycles.length * WIDTH);
    this.picture.setAttribute("height", height + 4);
    this.picture.replaceChildren(...cycles.map((cycle, i) => column(cycle, i, height, at)));
    this.slider.max = cycles.length - 1;
    this.slider.value = at;
    this.slider.setAttribute("aria-valuetext", summary(cycles[at], cycles));
    const [left, strip] = [at * WIDTH, this.strip];
    if (left < strip.scrollLeft) strip.scrollLeft = left - WIDTH;
    else if (left + WIDTH > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = left + 2 * WIDTH - strip.clientWidth;
  }
}
