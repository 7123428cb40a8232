// All cycles of an answer at a glance: a column for each cycle, a square for each of its tokens; and below them a slider of the same scale,
// whose thumb (cycle.css) is as wide as a column.

import { el, svg } from "./dom.js";
import { kindOf, summary } from "./explain.js";

const [WIDTH, SQUARE, STEP, MOST] = [10, 7, 8, 9]; // pixels; squares of a column, at most
const TOP = -(MOST * STEP + 4); // columns stand on the line y = 0

const shown = (cycle) => Math.min(MOST, cycle.tokens.length);

function column(cycle, at) {
  const squares = cycle.tokens.slice(0, MOST).map((_, token) => {
    const { kind, depth } = kindOf(cycle, token);
    return svg("rect", { class: kind, x: 1.5, y: -(token + 1) * STEP - 1, width: SQUARE, height: SQUARE, rx: 1.5, "--depth": depth });
  });
  const back = svg("rect", { class: "back", y: TOP, width: WIDTH, height: -TOP + 1, rx: 3 });
  return svg("g", { transform: `translate(${at * WIDTH} 0)`, "data-cycle": at }, back, ...squares);
}

export class Rhythm {
  #cycles = null; // those that are drawn
  #tallest = 1;

  /** `go(at)` is called with the number of a cycle that was chosen here. */
  constructor(go) {
    this.picture = svg("svg", { "aria-hidden": "true" });
    this.picture.addEventListener("click", (event) => {
      const chosen = event.target.closest("[data-cycle]");
      if (chosen) go(Number(chosen.getAttribute("data-cycle")));
    });
    this.slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Cycle", oninput: () => go(Number(this.slider.value)) });
    this.element = el("div", { class: "rhythm", "--column": `${WIDTH}px` }, this.picture, this.slider);
  }

  /** Show these cycles, number `at` marked and in view. Of the same answer only new ones are drawn. */
  show(cycles, at) {
    this.#draw(cycles);
    this.picture.querySelector(".current")?.classList.remove("current");
    this.picture.children[at].classList.add("current");
    this.slider.max = cycles.length - 1;
    this.slider.value = at;
    this.slider.setAttribute("aria-valuetext", summary(cycles[at], cycles));
    const [left, strip] = [at * WIDTH, this.element];
    if (left < strip.scrollLeft) strip.scrollLeft = left - WIDTH;
    else if (left + WIDTH > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = left + 2 * WIDTH - strip.clientWidth;
  }

  #draw(cycles) {
    if (this.#cycles !== cycles) {
      this.picture.replaceChildren();
      [this.#cycles, this.#tallest] = [cycles, 1];
    }
    const drawn = this.picture.children.length;
    if (drawn === cycles.length) return;
    const fresh = cycles.slice(drawn);
    this.picture.append(...fresh.map((cycle, i) => column(cycle, drawn + i)));
    this.#tallest = Math.max(this.#tallest, ...fresh.map(shown));
    const [width, height] = [cycles.length * WIDTH, this.#tallest * STEP + 4];
    this.slider.style.width = `${width}px`;
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 ${-height} ${width} ${height}` })) this.picture.setAttribute(name, value);
  }
}
